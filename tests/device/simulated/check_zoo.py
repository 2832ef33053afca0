"""Architectures written by others, on the simulated device."""

import pytest

pytest.importorskip("transformers", minversion="5")

from tests.device.simulated.runs import DEVICE
from tests.helpers import zoo
from tests.skip import test_zoo

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ("bert", "llama", "resnet", "swin", "t5", "whisper")
CASES = [(name, zoo.BOUNDARIES[name][0]) for name in NAMES]


@pytest.mark.parametrize(("name", "boundary"), CASES, ids=[f"{n}-{b}" for n, b in CASES])
def test_losses_and_gradients_are_those_of_the_frozen_model(monkeypatch, name, boundary):
    build, call = zoo.build, test_zoo.call

    def on_device(name):
        model, data = build(name)
        return model.to(DEVICE), data

    def moving(model, batch):
        return call(model, {key: value.to(DEVICE) for key, value in batch.items()})

    monkeypatch.setattr(zoo, "build", on_device)
    monkeypatch.setattr(test_zoo, "call", moving)
    harness = test_zoo.run(name, boundary)
    assert harness.host.refusals == []
    assert harness.host.changes == []
    assert harness.host.num_loads == 4
    assert harness.reloaded == 0
