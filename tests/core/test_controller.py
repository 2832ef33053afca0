from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_core import BoundaryMoved, FreezeController, StaticPolicy
from tests.helpers.core_nets import ResNet, batch, train
from tests.helpers.steps import take_step


def make(**options: Any) -> tuple[ResNet, torch.optim.Optimizer, FreezeController]:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    options = {"evaluate_every": 1, "window": 3, "tolerance": 2.0, "bootstrap": None} | options
    options.setdefault("evaluator", "inline")
    return model, optimizer, FreezeController(model, optimizer, **options)


def test_a_run_freezes_layer_by_layer_and_unfreezes_on_the_tenfold_drop() -> None:
    events: list[BoundaryMoved] = []
    model, optimizer, controller = make(listeners=[events.append])
    train(model, optimizer, controller, range(60), lr={40: 0.01})
    boundaries = [event.boundary for event in events]
    unfreeze = boundaries.index(None)
    assert boundaries[:unfreeze] == controller.boundaries[:unfreeze]
    assert unfreeze >= 1
    assert events[unfreeze].step == 41
    assert len(boundaries) > unfreeze + 1, "nothing froze again"
    assert [event.previous for event in events[1:]] == boundaries[:-1]
    assert controller.boundary != controller.layers[-1]


def test_a_cache_that_is_cut_in_the_first_forward_does_not_blur_the_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static = StaticPolicy({0: "layer2.1"})
    with ActivationCache(model, tmp_path, gate="always") as cache:
        controller = FreezeController(
            model, optimizer, cache, static, layers=r"layer\d\.\d|fc", total_steps=4
        )
        x, y = batch(0)
        loader = EgeriaLoader(TensorDataset(x, y), len(x) // 2, cache=cache)
        model.train()
        for _ in range(2):
            for images, targets in loader:
                loss = take_step(F.cross_entropy(model(images), targets), optimizer)
                controller.step(loss)
        trainable = {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad}
        assert trainable == {"layer3", "fc"}
        assert cache.boundary == controller.boundary == "layer2.1"
        cache.flush()
        assert cache.stats().misses > 0
        controller.close()


def test_an_unfreeze_gives_everything_back() -> None:
    model, optimizer, controller = make(policy=StaticPolicy({2: "layer1.1", 4: None}))
    model.layer1[0].conv1.weight.requires_grad_(False)
    train(model, optimizer, controller, range(3))
    assert not model.bn1.training
    train(model, optimizer, controller, range(3, 6))
    assert model.bn1.training
    untrainable = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert untrainable == ["layer1.0.conv1.weight"], "the user's own freeze must stay"


def test_a_recorded_schedule_replays_to_the_same_losses() -> None:
    model, optimizer, controller = make()
    losses = train(model, optimizer, controller, range(50), lr={35: 0.01})
    schedule = controller.schedule()
    assert any(boundary is None for _, boundary in schedule)
    again, optimizer, replay = make(policy=StaticPolicy(schedule))
    assert train(again, optimizer, replay, range(50), lr={35: 0.01}) == losses
    assert replay.schedule() == schedule


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(x)).relu())


def test_a_head_tied_to_the_frozen_embedding_is_named_once_and_something_still_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = TiedModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FreezeController(
        model, optimizer, policy=StaticPolicy([(1, "embed")]), layers=["embed", "block", "head"]
    ) as controller:
        assert controller.layers == ["embed", "head"]  # "block" and "head" together
        for _ in range(4):
            x = torch.randint(0, 11, (4, 5))
            loss = take_step(F.cross_entropy(model(x).flatten(0, 1), x.flatten()), optimizer)
            controller.step(loss)
    said = [record.message for record in caplog.records if "same tensor" in record.message]
    assert len(said) == 1
    assert "embed.weight" in said[0]
    assert "head.weight" in said[0]


class Drawing(nn.Module):
    """Draws in inference mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(()) + torch.empty(()).uniform_() + torch.randn(2, device="cpu").sum()
        return x + 1e-6 * noise


def drawing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3), Drawing(), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3), Drawing(), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )


@pytest.mark.parametrize("reference", ["int8", "fp32"])
@pytest.mark.parametrize("make", [ResNet, drawing])
def test_references_leave_the_generators_of_the_training_alone(make, reference) -> None:
    states = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        controller = None
        if watched:
            controller = FreezeController(
                model, optimizer, evaluate_every=1, window=3, tolerance=1e-9, bootstrap=None,
                evaluator="inline", reference=reference,
            )  # fmt: skip
        states.append([])
        for step in range(5):
            x, y = batch(step)
            loss = take_step(F.cross_entropy(model(x), y), optimizer)
            if controller is not None:
                controller.step(loss)
            states[-1].append(torch.get_rng_state())
        if controller is not None:
            assert controller.history.of("reading")
            controller.close()
    assert all(map(torch.equal, *states))


def test_every_reading_decision_and_refresh_is_a_json_line(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "history.jsonl"
    model, optimizer, controller = make(log_path=path, tolerance=1e6, reference="fp32")
    with controller:
        train(model, optimizer, controller, range(30), lr={20: 0.01})
    history = controller.history
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == list(history)
    assert {"reading", "refresh", "boundary"} <= {line["kind"] for line in lines}
    assert len(history) == len(lines)
    assert history[0] == lines[0]
