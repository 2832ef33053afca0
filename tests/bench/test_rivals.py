"""The rivals against hand-made traces: loops that do without any of the package's own code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rivals import (
    AutoFreezePolicy,
    FreezeOutPolicy,
    LinearPolicy,
    PipeTransformerPolicy,
    SmartPipePolicy,
)
from egeria_core import FreezeController, Policy
from egeria_core.policies import Reading
from tests.helpers.core_nets import batch, mlp
from tests.helpers.steps import take_step

LAYERS = ["0", "2", "4", "6"]
STEPS = 24


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return mlp(64, 32, 16, 16, 10)


def loss_at(net: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return F.cross_entropy(net(x.flatten(1)), y)


def run(
    policy: Policy, make: Any, schedule: Any = None, told: float | None = None, **options: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer, FreezeController]:
    net = model()
    optimizer = make(net.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    options = {"layers": LAYERS, "total_steps": STEPS} | options
    # On so few steps hardly any move pays; which are asked for is what is tested.
    options = {"move_cost": 1e-9} | options
    controller = FreezeController(net, optimizer, policy=policy, **options)
    for step in range(STEPS):
        loss = take_step(loss_at(net, step), optimizer)
        if scheduler is not None:
            scheduler.step()
        controller.step(loss if told is None else told)
    controller.close()
    return net, optimizer, controller


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("scaled", [True, False])
def test_freezeout_equals_a_loop_with_one_annealed_group_per_layer(make: Any, scaled: bool) -> None:
    net, optimizer, controller = run(FreezeOutPolicy(scaled=scaled), make)

    hand = model()
    ends = [(0.8 + 0.2 * i / 4) ** 3 for i in range(3)] + [1.0]
    groups = [list(hand[2 * i].parameters()) for i in range(4)]
    by_hand = make([{"params": group} for group in groups])
    full = optimizer.param_groups[0]["lr"]
    for step in range(STEPS):
        t = step / STEPS
        for group, end in zip(by_hand.param_groups, ends, strict=True):
            first = full / end if scaled else full
            group["lr"] = 0.5 * first * (1 + math.cos(math.pi * t / end)) if t < end else 0.0
            if t > end:
                for parameter in group["params"]:
                    parameter.requires_grad_(False)
        by_hand.zero_grad()
        loss_at(hand, step).backward()
        by_hand.step()
    assert same(net, hand)
    moves = [
        (math.floor(end * STEPS) + 1, name) for end, name in zip(ends, LAYERS[:3], strict=False)
    ]
    assert controller.schedule() == moves
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == full
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]


def test_freezeout_takes_the_full_rate_and_leaves_the_schedulers_alone() -> None:
    """A warm-up or a decay of the user's is not used, and not disturbed."""

    def decay(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.01 * (step + 1))

    plain, _, _ = run(FreezeOutPolicy(), sgd)
    scheduled, optimizer, _ = run(FreezeOutPolicy(), sgd, decay)
    assert same(plain, scheduled)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.01 * (STEPS + 1))
    cycle: Any = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(  # noqa: E731
        optimizer, 0.1, total_steps=STEPS + 1, cycle_momentum=False
    )
    cycled, _, _ = run(FreezeOutPolicy(), sgd, cycle)
    assert same(plain, cycled)


def gradients_of(net: nn.Sequential, frozen: int) -> list[Any]:
    return [
        None
        if index < frozen
        else np.concatenate([p.grad.numpy().ravel().copy() for p in net[2 * index].parameters()])
        for index in range(4)
    ]


def trained_by_hand(decide: Any) -> list[tuple[int, str]]:
    """Train with plain PyTorch; `decide(step, gradients, frozen)` after each step."""
    net = model()
    optimizer = sgd(net.parameters())
    frozen, moves = 0, []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss_at(net, step - 1).backward()
        gradients = gradients_of(net, frozen)
        optimizer.step()
        now = decide(step, gradients, frozen)
        if now > frozen:
            frozen = now
            moves.append((step, LAYERS[frozen - 1]))
            for index in range(frozen):
                for parameter in net[2 * index].parameters():
                    parameter.requires_grad_(False)
                    parameter.grad = None
    return moves


def test_autofreeze_from_the_first_step_equals_its_formula_on_summed_gradients() -> None:
    sums: list[Any] = [None] * 4
    before: list[float | None] = []

    def decide(step: int, gradients: list[Any], frozen: int) -> int:
        nonlocal sums, before
        sums = [g if s is None else s + g if g is not None else None
                for s, g in zip(sums, gradients, strict=True)]  # fmt: skip
        if step % 4:
            return frozen
        now = [None if s is None else float(np.abs(s).sum()) for s in sums]
        sums, last, before = [None] * 4, before, now
        if not last:
            return frozen
        changes = [abs(a - b) / a for a, b in zip(last[frozen:], now[frozen:], strict=True)]  # type: ignore[operator]
        bar = np.percentile(changes, 50)
        return min(frozen + next(i for i, c in enumerate(changes) if c >= bar - 1e-6), 3)

    expected = trained_by_hand(decide)
    _, _, controller = run(AutoFreezePolicy(), sgd, evaluate_every=4)
    assert controller.schedule() == expected
    assert expected
    assert not controller.history.of("bootstrap")
    steps = [reading["step"] for reading in controller.history.of("reading")]
    assert steps == list(range(4, 25, 4))


def test_smartpipe_from_the_first_step_equals_its_formula_on_single_gradients() -> None:
    kept: list[Any] = []
    first: list[float | None] = [None] * 4

    def decide(step: int, gradients: list[Any], frozen: int) -> int:
        nonlocal kept
        if step % 3:
            return frozen
        last, kept = kept, gradients
        if not last:
            return frozen
        change = [
            None if new is None else float(np.linalg.norm(old - new) / np.linalg.norm(old))
            for old, new in zip(last, gradients, strict=True)
        ]
        now = frozen
        while now < min(frozen + int(0.5 * (4 - frozen)), 3):
            value, start = change[now], first[now]
            if value is None or start is None or value >= 0.9 * start:
                break
            now += 1
        for index, value in enumerate(change):
            if first[index] is None:
                first[index] = value
        return now

    expected = trained_by_hand(decide)
    _, _, controller = run(SmartPipePolicy(), sgd, evaluate_every=3)
    assert controller.schedule() == expected
    assert expected
    assert not controller.history.of("bootstrap")


ROWS: dict[int, tuple[float | None, ...]] = {
    # L = 9: 3 by the schedule, but the second layer's gradient is the smallest.
    2: (5.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 2.0),
    # 2 + 7 / 3 = 4.33; the smallest of the active ones lies behind.
    4: (None, None, 4.0, 4.0, 4.0, 4.0, 4.0, 1.0, 2.0),
    # 4.33 + 4.67 / 3 = 5.89, of which the ceiling; the last layer's is the smallest.
    6: (None, None, None, None, None, 4.0, 4.0, 4.0, 2.0),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("policy", "steps", "rows", "num_layers", "expected"),
    [
        (PipeTransformerPolicy(steps_per_epoch=2), range(1, 8), ROWS, 9, [0, 2, 2, 5, 5, 6, 6]),
        # L = 9, alpha = 1/3: 9 (1 - (2/3)^e) = 0, 3, 5, 6.33, ...
        (PipeTransformerPolicy(steps_per_epoch=10, gradients=False), [0, 9, 10, 20, 30, 400], {}, 9,
         [0, 0, 3, 5, 7, 8]),
        (LinearPolicy(steps_per_epoch=10, start=0.5, level=1.0), [0, 49, 50, 60, 79, 90, 100], {},
         6, [0, 0, 0, 1, 2, 4, 5]),
    ],
)  # fmt: skip
def test_schedules_follow_their_formula(
    policy: Policy, steps: Any, rows: Any, num_layers: int, expected: list[int]
) -> None:
    total = max(steps)
    found = [
        policy.observe(
            Reading(step=s, num_layers=num_layers, lr=(0.1,), total_steps=total, values=rows.get(s))
        )
        for s in steps
    ]
    assert found == expected
