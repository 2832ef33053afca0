"""The controller on a device: every evaluator reads what the host would read."""

import math

import pytest
import torch
from torch.nn import functional as F

from egeria_core import Bootstrap, FreezeController
from tests.device.simulated.runs import DEVICE
from tests.helpers.core_nets import FAMILIES, family_batch
from tests.helpers.steps import take_step


def readings(device, family="resnet", steps=24, **options):
    """Train; return losses, the readings and the schedule."""
    torch.manual_seed(0)
    make, kind = FAMILIES[family]
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {
        "evaluate_every": 2, "window": 3, "tolerance": 2.0, "evaluator": "inline",
        "reference": "fp32", "bootstrap": Bootstrap(change=10.0, fall=None),
    } | options  # fmt: skip
    controller = FreezeController(model, optimizer, **settings)
    losses = []
    try:
        for step in range(steps):
            model.train()
            torch.manual_seed(step)
            x, y = (part.to(device) for part in family_batch(kind, step))
            loss = take_step(F.cross_entropy(model(x), y), optimizer)
            controller.step(loss)
            losses.append(loss.item())
            controller.state_dict()  # which waits for the verdicts that are under way
        found = [
            (r["step"], r["layer"], r["value"])
            for r in controller.history
            if r["kind"] == "reading"
        ]
        return losses, found, controller.schedule()
    finally:
        controller.close()


STILL = {"tolerance": 1e-12}
"""Nothing freezes, so that runs do not go apart where a verdict comes a step later."""


@pytest.fixture(scope="module")
def on_host():
    return readings("cpu", **STILL)


@pytest.fixture(scope="module")
def on_device():
    return readings(DEVICE, **STILL)


@pytest.mark.parametrize(("evaluator", "reference"), [("inline", "fp32"), ("process", "fp32")])
def test_every_evaluator_reads_on_the_device_what_is_read_on_the_host(
    on_device, on_host, evaluator, reference
):
    losses, found, _ = readings(DEVICE, evaluator=evaluator, reference=reference, **STILL)
    assert losses == on_device[0]
    values = {(step, layer): value for step, layer, value in on_device[1]}
    assert len(found) > 3
    for step, layer, value in found:
        assert math.isclose(value, values[step, layer], rel_tol=1e-4, abs_tol=1e-7)
    assert on_device == on_host
