from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from egeria_core import FreezeController, History, StaticPolicy
from tests.helpers.core_nets import ResNet, batch
from tests.helpers.steps import take_step


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
            loss = take_step(F.cross_entropy(model(x), y), optimizer)
            controller.step(loss)
    return controller


def test_every_reading_decision_and_refresh_is_a_json_line(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "history.jsonl"
    history = run(log_path=path).history
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == list(history)
    assert {"reading", "refresh", "boundary"} <= {line["kind"] for line in lines}
    assert History.load(path) == history
    assert len(history) == len(lines)
    assert history[0] == lines[0]


def test_active_parameters_fall_and_come_back() -> None:
    moves = run().history.of("boundary")
    counts = [move["active_parameters"] for move in moves]
    unfreeze = [move["boundary"] for move in moves].index(None)
    assert counts[:unfreeze] == sorted(counts[:unfreeze], reverse=True)
    assert counts[unfreeze] == moves[0]["total_parameters"]
    assert counts[unfreeze - 1] < 0.8 * counts[unfreeze]


def test_listeners_get_every_record() -> None:
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = FreezeController(model, optimizer, policy=StaticPolicy({1: "layer1.1"}))
    seen: list[dict[str, Any]] = []
    controller.history.listeners.append(seen.append)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    controller.step()
    assert [record["kind"] for record in seen] == ["boundary"]
    controller.close()


def test_a_history_is_drawn_by_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    import plot_history

    path = tmp_path / "history.jsonl"
    run(log_path=path)
    assert plot_history.main([str(path)]) == 0
    assert (tmp_path / "history.png").stat().st_size > 10_000
    (tmp_path / "empty.jsonl").write_text("")
    assert plot_history.main([str(tmp_path / "empty.jsonl")]) == 0
    assert "empty.png" in capsys.readouterr().out
