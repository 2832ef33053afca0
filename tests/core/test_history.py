from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from egeria_core import FreezeController, History
from egeria_core.history import make_listener
from egeria_core.plot import main
from tests.helpers.core_nets import ResNet, batch


def run(**options: Any) -> FreezeController:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"evaluate_every": 1, "window": 3, "tolerance": 1e6, "bootstrap": None} | options
    options |= {"evaluator": "inline", "reference": "fp32"}
    with FreezeController(model, optimizer, **options) as controller:
        for step in range(30):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 if step < 20 else 0.01
            x, y = batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            controller.step(loss)
    return controller


def test_every_reading_decision_and_refresh_is_a_json_line(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "history.jsonl"
    history = run(log_path=path).history
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == list(history)
    assert {"reading", "refresh", "boundary"} <= {line["kind"] for line in lines}
    history.save(tmp_path / "copy.jsonl")
    assert list(History.load(tmp_path / "copy.jsonl")) == lines
    assert len(history) == len(lines)
    assert history[0] == lines[0]


def test_active_parameters_fall_and_come_back() -> None:
    moves = run().history.of("boundary")
    counts = [move["active_parameters"] for move in moves]
    unfreeze = [move["boundary"] for move in moves].index(None)
    assert counts[:unfreeze] == sorted(counts[:unfreeze], reverse=True)
    assert counts[unfreeze] == moves[0]["total_parameters"]
    assert counts[unfreeze - 1] < 0.8 * counts[unfreeze]


def test_a_history_is_drawn_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    run(log_path=path)
    assert main([str(path)]) == 0
    assert (tmp_path / "history.png").stat().st_size > 10_000
    (tmp_path / "empty.jsonl").write_text("")
    assert main([str(tmp_path / "empty.jsonl"), "-o", str(tmp_path / "empty.png")]) == 0
    assert main([str(tmp_path / "missing.jsonl")]) == 1
    assert "missing.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["history.jsonl"]], ids=" ".join)
def test_without_matplotlib_one_line_says_so(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "history.jsonl").touch()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(argv) == 1
    assert (
        capsys.readouterr().err == "egeria-plot: drawing needs matplotlib: pip install matplotlib\n"
    )


def test_tensorboard_gets_readings_and_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars: list[tuple[str, float, int]] = []
    closed: list[bool] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

        def close(self) -> None:
            closed.append(True)

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    history = run(tensorboard_dir=tmp_path).history
    names = {name for name, _, _ in scalars}
    assert {"egeria/plasticity/layer1.1", "egeria/frozen_layers"} <= names
    expected = len(history.of("reading")) + 2 * len(history.of("boundary"))
    assert len(scalars) == expected
    assert closed == [True]


def test_without_tensorboard_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level("INFO"):
        assert make_listener(tmp_path) is None
    assert "tensorboard is not installed" in caplog.text
