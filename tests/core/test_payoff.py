"""Moves that cannot pay are not made, whoever asks for them; what pays is measured or counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from egeria_core import FreezeController, Policy, Reading, StaticPolicy
from egeria_core.forward_cost import BACKWARD_SHARE, ForwardCost, saved_parts
from egeria_core.payoff import ASSUMED_COST, StepClock
from egeria_core.policies import Measure
from tests.helpers.core_nets import ResNet, batch, mlp


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ticks(clock: Clock, steps: StepClock, seconds: Sequence[float]) -> None:
    for value in seconds:
        clock.now += value
        steps.tick()


def test_a_move_costs_what_the_steps_after_it_take_too_long() -> None:
    clock = Clock()
    steps = StepClock(now=clock)
    ticks(clock, steps, [0.0, *[1.0] * 10])
    assert steps.step_s == 1.0
    assert steps.cost == ASSUMED_COST
    steps.moved()
    # The steps are shorter by now: 0.5 s, and 2 + 1 + 0 more in the first three.
    ticks(clock, steps, [2.5, 1.5, 0.5, 0.5])
    assert steps.cost == pytest.approx((2 + 1) / 0.5)
    assert steps.step_s == 0.5
    ticks(clock, steps, [0.5] * 5)
    steps.moved()
    ticks(clock, steps, [0.5, 0.5, 100.0, 0.5])  # someone evaluated
    assert steps.cost == pytest.approx((6 + 7) / 2)


def test_a_cost_that_was_given_is_kept() -> None:
    clock = Clock()
    steps = StepClock(2.5, now=clock)
    ticks(clock, steps, [1.0] * 4)
    steps.moved()
    ticks(clock, steps, [9.0] * 4)
    assert steps.cost == 2.5


def test_the_clock_goes_on_where_it_was() -> None:
    clock = Clock()
    steps, again = StepClock(now=clock), StepClock(now=clock)
    ticks(clock, steps, [1.0, 2.0, 3.0])
    steps.moved()
    ticks(clock, steps, [6.0, 2.0, 2.0, 2.0, 2.0])
    again.load_state_dict(steps.state_dict())
    assert (again.cost, again.step_s) == (steps.cost, steps.step_s)
    ticks(clock, again, [1000.0])
    assert again.step_s == steps.step_s, "the time between two runs is no step"


def test_the_count_is_that_of_the_products() -> None:
    model = mlp(64, 16, 32, 10)
    cost = ForwardCost(model, ["0", "2", "4"])
    model(torch.randn(8, 64))
    model(torch.randn(8, 64))
    cost.close()
    products = [64 * 16, 16 * 32, 32 * 10]
    assert cost.total == 2 * 8 * sum(products)
    assert [cost.upto[n] for n in "024"] == [16 * sum(products[: k + 1]) for k in range(3)]
    saves = saved_parts(["0", "2", "4"], cost, [1, 1, 1])
    expected = [0.0, 1024 / 1856, 1536 / 1856]
    assert saves == pytest.approx([BACKWARD_SHARE * part for part in expected])


def test_a_forward_that_raises_leaves_no_mode_behind() -> None:
    class Broken(nn.Linear):
        broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise RuntimeError("no")
            return super().forward(x)

    model = nn.Sequential(Broken(4, 4))
    cost = ForwardCost(model, ["0"])
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 4))
    torch.randn(4, 4) @ torch.randn(4, 4)
    assert cost.total == 0
    model[0].broken = False  # type: ignore[assignment]
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert cost.total == 0, "no training forward"
    model(torch.randn(2, 4))
    assert cost.total == 2 * 2 * 16
    cost.close()


def test_without_a_count_parameters_stand_for_it() -> None:
    saves = saved_parts(["a", "b", "c"], None, [10, 30, 60])
    assert saves == pytest.approx([0, BACKWARD_SHARE * 0.1, BACKWARD_SHARE * 0.4])


class Wishes:
    """Asks for given numbers of frozen layers from given steps on; measures nothing."""

    measure: Measure = "nothing"

    def __init__(self, schedule: dict[int, int]) -> None:
        self.schedule = schedule

    def bind(self, boundaries: Sequence[str]) -> None:
        pass

    def observe(self, reading: Reading) -> int:
        return ([0] + [k for step, k in sorted(self.schedule.items()) if step <= reading.step])[-1]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def run(policy: Policy, steps: int = 20, **options: Any) -> FreezeController:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"total_steps": 20, "move_cost": 3.0, "layers": r"layer\d\.\d|fc"} | options
    controller = FreezeController(model, optimizer, policy=policy, **settings)
    for step in range(steps):
        x, y = batch(step, 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        controller.step(loss)
    controller.close()
    return controller


def test_a_move_that_cannot_pay_is_not_made_and_the_history_says_so() -> None:
    controller = run(Wishes({2: 2, 18: 3}))
    assert [step for step, _ in controller.schedule()] == [2]
    (record,) = controller.history.of("declined")
    assert (record["step"], record["boundary"]) == (18, "layer2.0")
    assert record["saving_steps"] < record["cost_steps"] == 3.0
    assert record["left_steps"] == 2
    assert controller.num_frozen == 2


def test_a_deeper_move_may_pay_where_a_shallow_one_does_not() -> None:
    controller = run(Wishes({8: 1, 9: 5}), move_cost=4.0)
    assert [r["boundary"] for r in controller.history.of("declined")] == ["layer1.0"]
    assert controller.schedule() == [(9, "layer3.0")]


def test_what_was_set_by_hand_is_done_and_unfreezing_is_no_question_of_time() -> None:
    assert run(StaticPolicy({19: "layer1.0"})).schedule() == [(19, "layer1.0")]
    assert run(Wishes({2: 2, 19: 0})).schedule() == [(2, "layer1.1"), (19, None)]


def test_where_the_end_is_unknown_every_move_is_made() -> None:
    controller = run(Wishes({19: 1}), total_steps=None)
    assert controller.schedule() == [(19, "layer1.0")]
    assert "saving_steps" not in controller.history.of("boundary")[0]
