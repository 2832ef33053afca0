"""The rivals against hand-made traces: loops that do without any of the package's own code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rivals import (
    FreezeOutPolicy,
    LinearPolicy,
    PipeTransformerPolicy,
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


def run(policy: Policy, make: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, FreezeController]:
    net = model()
    optimizer = make(net.parameters())
    # On so few steps hardly any move pays; which are asked for is what is tested.
    options: dict[str, Any] = {"layers": LAYERS, "total_steps": STEPS, "move_cost": 1e-9}
    controller = FreezeController(net, optimizer, policy=policy, **options)
    for step in range(STEPS):
        controller.step(take_step(loss_at(net, step), optimizer))
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
