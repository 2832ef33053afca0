"""`suggest_boundary`: what it measures equals the plain computation, and nothing is left behind."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from egeria_core import FreezeController, Suggestion, Trial, suggest_boundary
from tests.helpers.core_nets import ResNet, batch, mlp

LAYERS = ["0", "2", "4", "6"]
Batch = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(64, 32, 16, 16, 10)


def batches(count: int) -> list[Batch]:
    return [(x.flatten(1), y) for x, y in (batch(step) for step in range(count))]


def loss(model: nn.Module, given: Batch) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-3)


def trained(model: nn.Sequential, frozen: int, given: list[Batch]) -> nn.Sequential:
    """A plain loop over a schedule that falls linearly to zero."""
    for parameter in model[: 2 * frozen].parameters():
        parameter.requires_grad_(False)
    optimizer = sgd(model.parameters())
    for number, one in enumerate(given):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - number / len(given))
        optimizer.zero_grad()
        loss(model, one).backward()
        optimizer.step()
    return model


def test_the_harm_is_that_of_a_plain_loop_on_the_same_batches() -> None:
    given = batches(12)
    found = suggest_boundary(net(), given, loss, optimizer=sgd, steps=15, layers=LAYERS)
    train, held_out = (given[:10] * 2)[:15], given[10:]  # a fifth of what there is
    scores = []
    for frozen in range(4):
        model = trained(net(), frozen, train).eval()
        with torch.no_grad():
            scores.append([loss(model, one).item() for one in held_out])
    assert [trial.boundary for trial in found.trials] == LAYERS[:3]
    for trial, own in zip(found.trials, scores[1:], strict=True):
        worse = np.subtract(own, scores[0])
        assert trial.score == pytest.approx(np.mean(own), rel=1e-6)
        assert trial.harm == pytest.approx(worse.mean(), abs=1e-6)
        assert trial.harm_error == pytest.approx(worse.std(ddof=1) / 2**0.5, abs=1e-6)
    sizes = [64 * 32 + 32, 32 * 16 + 16, 16 * 16 + 16, 16 * 10 + 10]
    parts = np.cumsum(sizes) / sum(sizes)
    assert [trial.frozen_parameters for trial in found.trials] == pytest.approx(parts[:3])


def test_the_trainings_own_optimizer_is_copied_with_its_full_rate() -> None:
    """A warm-up has already lowered the rate; it is not what the probe should train with."""
    model, given = net(), batches(9)
    optimizer = sgd(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 100)
    made = suggest_boundary(net(), given, loss, optimizer=sgd, steps=6, layers=LAYERS)
    copied = suggest_boundary(model, given, loss, optimizer=optimizer, steps=6, layers=LAYERS)
    assert [t.score for t in made.trials] == [t.score for t in copied.trials]
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_model_optimizer_and_generators_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "egeria")
    torch.manual_seed(0)
    model = ResNet()
    model.layer1[0].conv1.weight.requires_grad_(False)
    optimizer = sgd(model.parameters())
    calls: list[int] = []
    model.register_forward_hook(lambda *args: calls.append(1))
    weights = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    dataset = TensorDataset(torch.randn(40, 1, 8, 8), torch.randint(0, 10, (40,)))
    drawn = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    loader = DataLoader(dataset, 8, shuffle=True)
    suggest_boundary(model, loader, loss, optimizer=optimizer, steps=3)
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


@pytest.mark.parametrize(
    ("higher", "metric", "budget", "best"),
    [
        (True, [0.90, 0.91, 0.895, 0.80], 0.01, "2"),
        (True, [0.90, 0.91, 0.895, 0.80], 0.001, "0"),
        (True, [0.90, 0.80, 0.80, 0.80], 0.01, None),
        (False, [2.0, 1.9, 2.1, 2.005], 0.01, "4"),
    ],
)
def test_with_a_metric_the_deepest_boundary_within_the_budget_is_suggested(
    higher: bool, metric: list[float], budget: float, best: str | None
) -> None:
    found = suggest_boundary(
        net(), batches(2), loss, optimizer=sgd, steps=3, layers=LAYERS, harm_budget=budget,
        validate=lambda model: metric[frozen_layers(model)], higher_is_better=higher,
    )  # fmt: skip
    sign = -1 if higher else 1
    assert [t.harm for t in found.trials] == pytest.approx(
        [sign * (m - metric[0]) for m in metric[1:]]
    )
    assert found.boundary == best
    assert found.by_validation
    assert all(trial.harm_error is None for trial in found.trials)


def test_a_suggestion_is_followed_from_the_first_forward_on() -> None:
    found = suggest_boundary(
        net(), batches(2), loss, optimizer=sgd, steps=2, layers=LAYERS,
        validate=lambda model: 1.0, higher_is_better=True,
    )  # fmt: skip
    model = net()
    controller = FreezeController(
        model, sgd(model.parameters()), policy=found.policy(), layers=LAYERS, total_steps=4
    )
    assert controller.boundary == found.boundary == "4"
    assert frozen_layers(model) == 3
    controller.close()
    nothing = Suggestion(
        trials=(), boundary=None, harm_budget=0.0, by_validation=True, steps=1, seconds=0.0
    )
    model = net()
    with FreezeController(
        model, sgd(model.parameters()), policy=nothing.policy(), layers=LAYERS
    ) as controller:
        assert controller.boundary is None


class Numbers(Dataset[Batch]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Batch:
        return torch.full((64,), float(index)), torch.tensor(index % 10)


def test_samples_that_are_held_out_are_never_trained_on() -> None:
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    def told(model: nn.Module, given: Batch) -> Tensor:
        seen[torch.is_grad_enabled()].update(given[0][:, 0].int().tolist())
        return loss(model, (given[0] / 50, given[1]))

    loader = DataLoader(Numbers(), 5, shuffle=True)
    suggest_boundary(net(), loader, told, optimizer=sgd, steps=16, layers=LAYERS)
    assert not seen[True] & seen[False]
    assert len(seen[True]) == 40
    assert len(seen[False]) == 10


def test_what_cannot_be_probed_is_told() -> None:
    def ask(data: Any, how: Any = loss, **options: Any) -> None:
        suggest_boundary(net(), data, how, optimizer=sgd, layers=LAYERS, **options)

    with pytest.raises(ValueError, match="gives 2 batches; 3 are needed"):
        ask(batches(2))
    with pytest.raises(ValueError, match="steps must be at least 2"):
        ask(batches(9), steps=1)
    with pytest.raises(ValueError, match="gives 0 batches"):
        ask([], steps=6, validate=lambda model: 0.0)
    model = net()
    model.extra = model[0].weight * 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Sequential cannot be copied"):
        suggest_boundary(model, batches(9), loss, optimizer=sgd, layers=LAYERS)


def trial(boundary: str, harm: float, error: float | None) -> Trial:
    return Trial(boundary=boundary, score=1.0, harm=harm, harm_error=error, frozen_parameters=0.25)


def test_the_table_reads_well() -> None:
    trials = (trial("layer1", -0.002, 0.001), trial("layer2", 0.0312, 0.004))
    found = Suggestion(
        trials=trials, boundary="layer1", harm_budget=0.01, by_validation=False, steps=60,
        seconds=12.3,
    )  # fmt: skip
    assert str(found).splitlines() == [
        "layer1  harm -0.0020 ± 0.0010; 25% of the parameters",
        "layer2  harm +0.0312 ± 0.0040; 25% of the parameters",
        "freeze up to layer1 from the start: it gains 0.0020 where 0.01 are allowed (measured in "
        "the held-out loss after 60 steps each, 12 s in all)",
    ]
