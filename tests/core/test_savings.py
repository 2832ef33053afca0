"""Moves that cannot pay are not made, whoever asks for them; what pays is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from egeria_core import FreezeController, Policy, StaticPolicy
from egeria_core.policies import Measure, Reading
from egeria_core.savings.savings import BACKWARD_SHARE, saved_parts
from egeria_core.watch.forward import ForwardTrace, LayerMap
from tests.helpers.core_nets import ResNet, batch, mlp
from tests.helpers.steps import take_step


def test_the_count_is_that_of_the_products() -> None:
    model = mlp(64, 16, 32, 10)
    layers = LayerMap(model, r"[024]", 7)
    model(torch.randn(8, 64))
    layers.resolve()
    products = [64 * 16, 16 * 32, 32 * 10]
    parts = [sum(products[: k + 1]) / sum(products) for k in range(3)]
    assert layers.parts == pytest.approx(parts)
    saves = saved_parts(layers.parts, [1, 1, 1])
    assert saves == pytest.approx([0, *(BACKWARD_SHARE * part for part in parts[:2])])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_counted(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(11, 16), kind(16, 16))
    trace = ForwardTrace(model, ["1"])
    model(torch.randint(11, (4, 8)))
    trace.close()
    weights = sum(w.numel() for w in model[1].parameters() if w.dim() == 2)
    assert trace.upto["1"] == pytest.approx(2 * 32 * weights)


def test_a_forward_that_raises_leaves_no_mode_behind() -> None:
    class Broken(nn.Linear):
        broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise RuntimeError("no")
            return super().forward(x)

    model = nn.Sequential(Broken(4, 4))
    trace = ForwardTrace(model, ["0"])
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 4))
    torch.randn(4, 4) @ torch.randn(4, 4)
    assert trace.total == 0
    model[0].broken = False  # type: ignore[assignment]
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert trace.total == 0, "no training forward"
    model(torch.randn(2, 4))
    assert trace.total == 2 * 2 * 16
    trace.close()


def test_without_a_count_parameters_stand_for_it() -> None:
    saves = saved_parts(None, [10, 30, 60])
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
        loss = take_step(F.cross_entropy(model(x), y), optimizer)
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
