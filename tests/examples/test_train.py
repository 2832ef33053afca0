"""`train.py` runs each task, and goes on after a kill as if nothing had happened."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import train

from egeria_core import Bootstrap
from tests.helpers import published

ROOT = Path(train.__file__).parents[1]
EAGER = "--evaluator inline --evaluate-every 1 --window 2 --tolerance 5 --save-every 3 --workers 0"
"""Freezes within a few steps, at the same steps in every run."""
TASK = "image-classification"


@pytest.fixture(autouse=True)
def bootstrapping_ends(monkeypatch):
    """So short a run hardly learns."""
    monkeypatch.setattr("egeria_core.config.Bootstrap", partial(Bootstrap, fall=None))


def arguments(data, output, *more):
    if not data.exists():
        published.cifar10(data)
    where = ["--task", TASK, "--data", str(data), "--output", str(output), "--device", "cpu"]
    return [*where, *EAGER.split(), "--batch-size", "15", "--epochs", "5", *more]


def log_of(output):
    return (output / "log.jsonl").read_text()


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_losses(tmp_path):
    data = tmp_path / "data"
    assert train.main(arguments(data, tmp_path / "whole")) == 0
    killed = arguments(data, tmp_path / "parts")
    script = (
        "import os, signal, sys, torch, train, training.log\n"
        "import functools, egeria_core.config\n"
        "made = functools.partial(egeria_core.config.Bootstrap, fall=None)\n"
        "egeria_core.config.Bootstrap = made\n"
        "torch.set_num_threads(1)\n"
        "add_loss = training.log.RunLog.add_loss\n"
        "def dying(self, step, loss):\n"
        "    add_loss(self, step, loss)\n"
        "    if step == 14:\n"
        "        self.flush()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "training.log.RunLog.add_loss = dying\n"
        "train.main(sys.argv[1:])\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    done = subprocess.run(
        [sys.executable, "-c", script, *killed],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert '"step": 14,' in log_of(tmp_path / "parts")  # ahead of the checkpoint at step 12
    assert train.main(killed) == 0
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    assert train.main(killed) == 0  # complete: nothing is left to do
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")


def test_freezing_is_what_changes_the_losses_and_the_cache_is_not(tmp_path):
    data = tmp_path / "data"
    logs = {}
    for name, flags in {
        "cached": (),
        "uncached": ("--gate", "never"),
        "plain": ("--no-freeze",),
    }.items():
        assert train.main(arguments(data, tmp_path / name, *flags)) == 0
        logs[name] = log_of(tmp_path / name)
    assert logs["cached"] == logs["uncached"] != logs["plain"]
    assert not (tmp_path / "plain" / "cache").exists()


def test_other_settings_are_refused_until_asked_for(tmp_path, capsys):
    data, output = tmp_path / "data", tmp_path / "run"
    assert train.main([*arguments(data, output), "--epochs", "1"]) == 0
    assert train.main([*arguments(data, output), "--epochs", "2"]) == 2
    assert "--epochs was 1, is 2" in capsys.readouterr().err
    assert train.main([*arguments(data, output), "--epochs", "2", "--restart"]) == 0
    (output / "checkpoint.pt").write_bytes(b"PK")
    assert train.main([*arguments(data, output), "--epochs", "2"]) == 2
    assert "begin anew with --restart" in capsys.readouterr().err
