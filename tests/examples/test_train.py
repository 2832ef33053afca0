"""`train.py` runs each task, and goes on after a kill as if nothing had happened."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train

from tests.helpers import published

ROOT = Path(train.__file__).parents[1]
EAGER = "--evaluator inline --evaluate-every 1 --window 2 --tolerance 5 --save-every 3 --workers 0"
"""Freezes within a few steps, at the same steps in every run."""
TASKS = {
    "image-classification": (published.cifar10, "--batch-size 15 --epochs 5"),
    "segmentation": (published.voc, "--size 17 --batch-size 2 --epochs 4"),
    "translation": (published.text_pairs, "--size 12 --batch-size 10 --epochs 5 --languages en-de"),
    "question-answering": (published.squad, "--size 48 --batch-size 4 --epochs 6"),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def moves_pay(monkeypatch):
    """So short a run is not worth a move, and hardly learns."""
    monkeypatch.setattr("egeria_core.savings.MoveCost.pays", property(lambda payoff: True))
    monkeypatch.setattr("egeria_core.bootstrap.Bootstrap._has_fallen", lambda self, smooth: True)


def arguments(task, data, output, *more):
    make, own = TASKS[task]
    if not data.exists():
        make(data)
    where = ["--task", task, "--data", str(data), "--output", str(output), "--device", "cpu"]
    return [*where, *EAGER.split(), *own.split(), *more]


def log_of(output):
    return (output / "log.jsonl").read_text()


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_losses(tmp_path):
    task, data = "image-classification", tmp_path / "data"
    assert train.main(arguments(task, data, tmp_path / "whole")) == 0
    killed = arguments(task, data, tmp_path / "parts")
    script = (
        "import os, signal, sys, torch, train, training.log\n"
        "import egeria_core.bootstrap, egeria_core.savings\n"
        "egeria_core.savings.MoveCost.pays = property(lambda payoff: True)\n"
        "egeria_core.bootstrap.Bootstrap._has_fallen = lambda self, smooth: True\n"
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
    task, data = "image-classification", tmp_path / "data"
    logs = {}
    for name, flags in {
        "cached": (),
        "uncached": ("--gate", "never"),
        "plain": ("--no-freeze",),
    }.items():
        assert train.main(arguments(task, data, tmp_path / name, *flags)) == 0
        logs[name] = log_of(tmp_path / name)
    assert logs["cached"] == logs["uncached"] != logs["plain"]
    assert not (tmp_path / "plain" / "cache").exists()


def test_other_settings_are_refused_until_asked_for(tmp_path, capsys):
    task, data, output = "image-classification", tmp_path / "data", tmp_path / "run"
    assert train.main([*arguments(task, data, output), "--epochs", "1"]) == 0
    assert train.main([*arguments(task, data, output), "--epochs", "2"]) == 2
    assert "--epochs was 1, is 2" in capsys.readouterr().err
    assert train.main([*arguments(task, data, output), "--epochs", "2", "--restart"]) == 0
    (output / "checkpoint.pt").write_bytes(b"PK")
    assert train.main([*arguments(task, data, output), "--epochs", "2"]) == 2
    assert "begin anew with --restart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "resnet5"], "has small, resnet56, resnet50, mobilenetv2"),
        (["--weights", "nothing.pt"], "there is no such file"),
        (["--data", "nowhere"], "is neither CIFAR-10"),
    ],
)
def test_wrong_arguments_say_what_is_known(tmp_path, capsys, flags, message):
    given = arguments("image-classification", tmp_path / "data", tmp_path / "run", *flags)
    assert train.main(given) == 2
    assert message in capsys.readouterr().err


def test_weights_that_fit_are_taken(tmp_path):
    published.image_folder(tmp_path / "data", classes=("bee", "cat", "dog"))
    from benchmarks.models import CifarResNet

    torch.save(CifarResNet(1, 10).state_dict(), tmp_path / "weights.pt")
    where = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "run"), "--size", "16"]
    flags = ["--weights", str(tmp_path / "weights.pt"), "--epochs", "1", "--workers", "0", "--amp"]
    task = ["--task", "image-classification", "--device", "cpu"]
    assert train.main([*task, *where, *flags]) == 0
    torch.save({"other": torch.zeros(1)}, tmp_path / "weights.pt")
    assert train.main([*task, *where, *flags, "--restart"]) == 2
