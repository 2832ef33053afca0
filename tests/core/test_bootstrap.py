"""The bootstrapping stage: where it looks, and what ends it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from egeria_core import Bootstrap, ControllerConfig, FreezeController
from tests.helpers.core_nets import ResNet


def test_a_loss_that_has_not_begun_to_fall_is_not_settled() -> None:
    stage = Bootstrap()
    assert not any(stage.observe(x) for x in [2.30, 2.31, 2.29, 2.30, 2.30, math.nan])
    answers = [stage.observe(x) for x in [1.5, 1.2, 1.1, 1.05, 1.04]]
    assert answers[-1]
    assert not answers[0]


@pytest.mark.parametrize(("every", "total", "apart"), [
    (6, 768, 24), (12, 768, 24), (24, 768, 24), (48, 768, 48), (2, None, 2), (1, 10, 1),
])  # fmt: skip
def test_looks_lie_a_share_of_the_schedule_apart_whatever_n_is(
    every: int, total: int | None, apart: int
) -> None:
    assert Bootstrap().interval(every, total) == apart


@pytest.mark.parametrize("every", [1, 2, 4])
def test_the_stage_ends_at_the_same_step_whatever_n_is(every: int) -> None:
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    controller = FreezeController(
        model, optimizer, policy="plasticity", total_steps=160, evaluate_every=every,
        evaluator="inline", reference="fp32",
    )  # fmt: skip
    for step in range(40):
        controller.step(4.0 / (1 + step))
        if controller.history.of("bootstrap") and controller.history.of("bootstrap")[-1]["done"]:
            break
    controller.close()
    looks = [record["step"] for record in controller.history.of("bootstrap")]
    assert all(step % 4 == 0 for step in looks)
    means = [sum(4.0 / (1 + s) for s in range(k - 4, k)) / 4 for k in range(4, 44, 4)]
    smooth = [sum(means[i - 2 : i + 1]) / 3 for i in range(2, len(means))]
    settled = [i for i in range(1, len(smooth)) if abs(smooth[i] / smooth[i - 1] - 1) < 0.1]
    assert looks[-1] == (4 * (settled[0] + 3) if settled else 40)


def test_who_brings_a_meter_has_no_such_stage_unless_it_is_given() -> None:
    config = ControllerConfig(evaluate_every=1)
    assert config.bootstrap_for("plasticity") is not None
    assert config.bootstrap_for("own") is None
    own = Bootstrap()
    assert ControllerConfig(bootstrap=own).bootstrap_for("own") is own
    assert ControllerConfig(bootstrap=own).bootstrap_for("nothing") is None
    assert ControllerConfig(bootstrap=None).bootstrap_for("plasticity") is None
    with pytest.raises(ValueError, match="bootstrap must be"):
        ControllerConfig(bootstrap="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_resumed_stage_ends_where_the_uninterrupted_one_does(cut: int) -> None:
    losses = [4.0, 3.0, 2.0, 1.6, 1.5, 1.45, 1.44, 1.44, 1.44]
    whole, first, second = Bootstrap(), Bootstrap(), Bootstrap()
    expected = [whole.observe(x) for x in losses]
    for x in losses[:cut]:
        first.observe(x)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.observe(x) for x in losses[cut:]] == expected[cut:]
    assert expected[-1]
