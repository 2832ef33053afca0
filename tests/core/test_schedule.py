"""What is left of a schedule, against the rates that were then used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from egeria_core.rules import MeanRate
from egeria_core.savings import Schedule, find_length

TOTAL = 60
SCHEDULERS: dict[str, Callable[[Any], lrs.LRScheduler]] = {
    "lambda": lambda o: lrs.LambdaLR(o, [lambda n: 1 - n / TOTAL, lambda n: 0.5]),
    "step": lambda o: lrs.StepLR(o, 20),
    "multistep": lambda o: lrs.MultiStepLR(o, [20, 50]),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, TOTAL),
    "onecycle": lambda o: lrs.OneCycleLR(o, [0.1, 0.2], TOTAL),
    "warm-up, cosine": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=10), lrs.CosineAnnealingLR(o, TOTAL - 10)], [10]
    ),
    "chained": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 10), lrs.ExponentialLR(o, 0.97)]
    ),
    "constant": lambda o: lrs.ConstantLR(o, 1.0, 1),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 15),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 10, cycle_momentum=False),
    "polynomial": lambda o: lrs.PolynomialLR(o, TOTAL),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.98),
}
LENGTHS = {"cosine": 60, "onecycle": 60, "warm-up, cosine": 60, "polynomial": 60}


def make_optimizer() -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    rates = zip(model, (0.1, 0.01), strict=True)
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in rates]
    return torch.optim.AdamW(groups)


def run(scheduler: Any, optimizer: Any, schedule: Schedule, every: int, *, late: bool) -> Any:
    """Step to the end; return (rates used, what was foretold after each step)."""
    used: list[float] = []
    told: dict[int, Any] = {}
    for step in range(1, TOTAL + 1):
        used.append(MeanRate(optimizer)())
        optimizer.step()
        due = step % every == 0 and step < TOTAL
        if due and not late:
            scheduler.step()
        schedule.look(step)
        told[step] = schedule.remaining(step, MeanRate(optimizer)())
        if due and late:
            scheduler.step()
    return used, told


@pytest.mark.parametrize("late", [False, True], ids=["scheduler_first", "controller_first"])
@pytest.mark.parametrize("every", [1, 5], ids=["per_step", "per_epoch"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_sum_is_that_of_the_rates_then_used(name: str, every: int, late: bool) -> None:
    optimizer = make_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    schedule = Schedule(scheduler, TOTAL)
    used, told = run(scheduler, optimizer, schedule, every, late=late)
    for step in range(2 * every + 3, TOTAL + 1):
        assert told[step].steps == TOTAL - step
        assert told[step].rate == pytest.approx(sum(used[step:]), abs=1e-9), step
        assert told[step].highest == pytest.approx(max(used[step:], default=0.0), abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_length_is_known_where_the_scheduler_says_it(name: str) -> None:
    scheduler = SCHEDULERS[name](make_optimizer())
    assert find_length(scheduler) == LENGTHS.get(name)
    schedule = Schedule(scheduler, None)
    assert schedule.has_end is (name in LENGTHS)


def test_a_function_of_the_step_is_a_schedule() -> None:
    schedule = Schedule(lambda step: 1 / (1 + step), 30)
    left = schedule.remaining(10, 1 / 10)
    assert left is not None
    assert left.rate == pytest.approx(sum(1 / (1 + n) for n in range(10, 30)))


def test_without_a_scheduler_only_the_steps_are_known() -> None:
    left = Schedule(None, 30).remaining(10, 0.1)
    assert left is not None
    assert (left.steps, left.rate) == (20, None)
    assert Schedule(None, None).remaining(10, 0.1) is None


def test_a_plateau_cannot_be_foretold_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make_optimizer()
    scheduler = lrs.ReduceLROnPlateau(optimizer)
    schedule = Schedule(scheduler, 30)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 20):
            optimizer.step()
            scheduler.step(1.0)
            schedule.look(step)
            left = schedule.remaining(step, 0.1)
    assert left is not None
    assert (left.steps, left.rate) == (11, None)
    assert caplog.text.count("cannot be foretold") == 1


def test_a_scheduler_that_is_stepped_twice_a_step_is_followed() -> None:
    """As under Accelerate with two processes."""
    optimizer = make_optimizer()
    scheduler = lrs.CosineAnnealingLR(optimizer, 2 * TOTAL)

    class Twice:
        def __init__(self, inner: lrs.LRScheduler) -> None:
            self.scheduler = inner

        def step(self) -> None:
            self.scheduler.step()
            self.scheduler.step()

    wrapper = Twice(scheduler)
    used, told = run(wrapper, optimizer, Schedule(wrapper, TOTAL), 1, late=False)
    for step in range(10, TOTAL):
        assert told[step].rate == pytest.approx(sum(used[step:]), abs=1e-6)


def test_something_else_is_a_clear_error() -> None:
    with pytest.raises(TypeError, match="torch scheduler or a function"):
        Schedule(3, 10)  # type: ignore[arg-type]
