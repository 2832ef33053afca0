"""`suggest_boundary`: what it measures is what the loop does, and nothing is left behind."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from egeria_core import FreezeController, StaticPolicy, Suggestion, suggest_boundary
from tests.helpers.core_nets import ResNet, batch, mlp
from tests.helpers.steps import take_step

LAYERS = ["0", "2", "4", "6"]
Batch = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(64, 32, 16, 16, 10)


def batches(count: int) -> list[Batch]:
    return [(x.flatten(1), y) for x, y in (batch(step) for step in range(count))]


def loss(model: nn.Module, given: Batch) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def loop(model: nn.Module, given: Any, policy: StaticPolicy | None, layers: Any = LAYERS) -> None:
    optimizer = sgd(model)
    controller = policy and FreezeController(model, optimizer, policy=policy, layers=layers)
    for one in given:
        take_step(loss(model, one), optimizer)
        if controller is not None:
            controller.step()
    if controller is not None:
        controller.close()


def test_the_harm_is_that_of_a_plain_loop_on_the_same_batches() -> None:
    given, held_out = batches(10), batches(12)[10:]

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return float(np.mean([loss(model, one).item() for one in held_out]))

    found = suggest_boundary(
        net(), lambda model, policy: loop(model, given, policy), score, higher_is_better=False
    )
    scores = []
    for frozen in range(4):
        model = net()
        model[: 2 * frozen].requires_grad_(False)
        loop(model, given, None)
        scores.append(score(model.eval()))
    assert [trial.boundary for trial in found.trials] == LAYERS[:3]
    for trial, own in zip(found.trials, scores[1:], strict=True):
        assert trial.score == pytest.approx(own, rel=1e-6)
        assert trial.harm == pytest.approx(own - scores[0], abs=1e-6)
    sizes = [64 * 32 + 32, 32 * 16 + 16, 16 * 16 + 16, 16 * 10 + 10]
    parts = np.cumsum(sizes) / sum(sizes)
    assert [trial.frozen_parameters for trial in found.trials] == pytest.approx(parts[:3])


def test_all_trials_have_the_same_random_numbers() -> None:
    drawn: list[Tensor] = []

    def train(model: nn.Module, policy: StaticPolicy) -> None:
        drawn.append(torch.rand(4))
        loop(model, batches(1), policy)

    suggest_boundary(net(), train, lambda model: 0.0)
    assert len(drawn) == 4
    assert all(torch.equal(one, drawn[0]) for one in drawn)


def test_model_and_generators_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "egeria")
    torch.manual_seed(0)
    model = ResNet()
    model.layer1[0].conv1.weight.requires_grad_(False)
    calls: list[int] = []
    model.register_forward_hook(lambda *args: calls.append(1))
    weights = copy.deepcopy(model.state_dict())
    dataset = TensorDataset(torch.randn(24, 1, 8, 8), torch.randint(0, 10, (24,)))
    drawn = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    loader = DataLoader(dataset, 8, shuffle=True)
    suggest_boundary(
        model, lambda model, policy: loop(model, loader, policy, None), lambda model: 0.0
    )
    assert not caplog.records
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (np.random.get_state()[1] == drawn[1]).all()
    assert random.getstate() == drawn[2]
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert all(p.grad is None for p in model.parameters())
    fixed = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert fixed == ["layer1.0.conv1.weight"]
    assert model.training
    assert not calls, "hooks of the user's are not copied"
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 1


def frozen_layers(model: nn.Module) -> int:
    return sum(not model.get_submodule(name).weight.requires_grad for name in LAYERS)


def asked(metric: Any, **options: Any) -> Suggestion:
    given = batches(2)
    return suggest_boundary(
        net(), lambda model, policy: loop(model, given, policy), metric, **options
    )


@pytest.mark.parametrize(
    ("higher", "metric", "budget", "best"),
    [
        (True, [0.90, 0.91, 0.895, 0.80], 0.01, "2"),
        (True, [0.90, 0.91, 0.895, 0.80], 0.001, "0"),
        (True, [0.90, 0.80, 0.80, 0.80], 0.01, None),
        (False, [2.0, 1.9, 2.1, 2.005], 0.01, "4"),
    ],
)
def test_the_deepest_boundary_within_the_budget_is_suggested(
    higher: bool, metric: list[float], budget: float, best: str | None
) -> None:
    found = asked(
        lambda model: metric[frozen_layers(model)], higher_is_better=higher, harm_budget=budget
    )
    sign = -1 if higher else 1
    assert [t.harm for t in found.trials] == pytest.approx(
        [sign * (m - metric[0]) for m in metric[1:]]
    )
    assert found.boundary == best


def test_what_cannot_be_probed_is_told() -> None:
    with pytest.raises(ValueError, match="made no FreezeController with this policy"):
        suggest_boundary(net(), lambda model, policy: None, lambda model: 0.0)
