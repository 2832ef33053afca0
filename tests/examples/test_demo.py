"""The demo: its losses are those of plain PyTorch, and it goes on where it was killed."""

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest
import torch

EXAMPLES = Path(demo.__file__).parent
FLAGS = ["--quick", "--act", "finetune", "--out"]


@pytest.fixture(autouse=True)
def threads_and_signals():
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    logging.getLogger("egeria.modes").setLevel(logging.NOTSET)
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


def losses(out):
    (act,) = json.loads((out / "demo.json").read_text())["acts"]
    return act["plain"]["losses"], act["egeria"]["losses"]


def test_its_losses_are_those_of_plain_pytorch(tmp_path, capsys):
    assert demo.main([*FLAGS, str(tmp_path)]) == 0
    assert "as fast" in capsys.readouterr().out
    plain, egeria = losses(tmp_path)
    assert plain == egeria
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle_it_goes_on(tmp_path, number, capsys):
    killed = tmp_path / "killed"
    command = [sys.executable, EXAMPLES / "demo.py", *FLAGS, killed]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    state, deadline = killed / "state" / "finetune-egeria.pt", time.monotonic() + 120
    while not state.exists():  # an epoch of both runs is over
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    text = process.communicate(timeout=60)[0]
    if number == signal.SIGTERM:
        assert "goes on from here" in text
    assert not (killed / "demo.json").exists()
    assert demo.main([*FLAGS, str(killed)]) == 0
    assert "as fast" in capsys.readouterr().out
    plain, egeria = losses(killed)
    assert plain == egeria
    whole = tmp_path / "whole"
    assert demo.main([*FLAGS, str(whole)]) == 0
    assert losses(whole) == (plain, egeria)
