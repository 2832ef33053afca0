"""What a running training says of its cache, and `cache-inspect DIR` shows; the bare command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.cache import notes as live
from egeria_cache.cache.notes import LiveFile, read_live
from egeria_cache.inspect import main
from tests.cache.test_auto import data, train
from tests.cache.test_filling import frozen_blocks


@pytest.fixture
def often(monkeypatch):
    """Write at every call."""
    monkeypatch.setattr(live, "EVERY_S", 0.0)


def test_a_running_training_is_seen_and_gone_when_it_is_closed(directory, often, capsys):
    model = frozen_blocks()
    with ActivationCache(model, directory, "blocks.1", gate="always", audit_rate=0) as cache:
        loader = EgeriaLoader(data(), batch_size=8, cache=cache)
        train(model, loader, 1)
        cache.flush()
        train(model, loader, 2)
        deadline = time.monotonic() + 60
        while True:  # a reader thread writes it
            ((process, (seen,)),) = read_live(directory).items()
            if seen["hits"] + seen["misses"] >= 88 or time.monotonic() > deadline:
                break
            model(next(iter(loader))[0])
        assert process == os.getpid()
        assert seen["boundary"] == "blocks.1"
        assert seen["hits"] >= 56
        assert main([str(directory)]) == 0
        text = capsys.readouterr().out
        assert f"process {os.getpid()}: frozen up to blocks.1, " in text
        assert "samples from the cache" in text
        assert main([str(directory), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["processes"][str(os.getpid())][0]["boundary"] == "blocks.1"
    assert read_live(directory) == {}
    assert main([str(directory)]) == 0
    assert "process" not in capsys.readouterr().out


def test_the_training_thread_writes_nothing_and_seldom_asks(directory, monkeypatch):
    model, writers = frozen_blocks(), []
    monkeypatch.setattr(
        LiveFile, "write", lambda self, content: writers.append(threading.get_ident())
    )
    with ActivationCache(model, directory, "blocks.1") as cache:
        cache._live._next = 0.0  # it would tell nothing of a training that is over in a second
        train(model, EgeriaLoader(data(), batch_size=8, cache=cache), 3)
    assert 1 <= len(writers) <= 1 + 60
    assert threading.get_ident() not in writers


def test_a_call_while_or_after_the_cache_is_closed_is_none_of_its_business(directory, often):
    """A wrapper may have kept the forward, and another thread may be within it."""
    with ActivationCache(torch.nn.Linear(2, 2), directory) as cache:
        told = cache._live
        told.called()
        cache._readers.close()
        told.called()
    told.called()
    assert read_live(directory) == {}


def test_what_a_killed_process_left_is_not_shown_and_goes(directory, often):
    directory.mkdir(exist_ok=True)
    script = f"""
import time
from pathlib import Path
from egeria_cache.cache.notes import LiveFile
LiveFile(Path({str(directory)!r})).write({{"hits": 1}})
print("written", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        assert read_live(directory)[process.pid][0]["hits"] == 1
        process.send_signal(signal.SIGKILL)
    assert read_live(directory) == {}
    assert list(directory.glob("live-*"))
    LiveFile(directory)
    assert not list(directory.glob("live-*"))


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"[" * 100_000, b"\xff", b"x" * 100_000])
def test_garbage_in_a_live_file_is_ignored(directory, content, capsys):
    with ActivationCache(torch.nn.Linear(2, 2), directory):
        (directory / f"live-{os.getpid()}-999.json").write_bytes(content)
        (directory / "live-x.json").write_bytes(content)
        (directory / "live-1.json").symlink_to("/etc/passwd")
        assert main([str(directory)]) == 0


@pytest.mark.parametrize("values", [{"hits": "many", "saved_s": None}, {"boundary": 3}, {}])
def test_figures_of_another_kind_are_shown_as_none(directory, values, capsys):
    with ActivationCache(torch.nn.Linear(2, 2), directory):
        LiveFile(directory).write(values)
        assert main([str(directory)]) == 0
    assert f"process {os.getpid()}: " in capsys.readouterr().out


def test_the_bare_command_explains_itself(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for command in ("plan", "fill", "verify", "show", "diff", "prune", "clear"):
        assert f" {command}" in text
    assert max(map(len, text.splitlines())) <= 100
