"""Loops made to be served wrongly, with their models and batches on the device."""

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.device.simulated.runs import DEVICE
from tests.hostile import harness
from tests.hostile.test_prefix_tensors import *  # noqa: F403
from tests.hostile.test_served_loops import *  # noqa: F403

NOT_ON_A_DEVICE = (
    "numpy", "NumPy", "dlpack", "arrays_that_share", "one that joins", "registered",
    "replaced_by_a_wider", "an adapter that joins", "moving_target", "saved_and_loaded",
    "two_models_with_one_loader", "adversarial_features", "evaluation_before_the_training",
)  # fmt: skip
"""Their scripts write through the host's memory, or make tensors on the host in mid-training."""


class Moving:
    """A loader whose batches are moved, as loops on a device do first of all."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield tree_map(lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x, batch)

    def __len__(self):
        return len(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch, request):
    if any(name in request.node.name for name in NOT_ON_A_DEVICE):
        pytest.skip("the script itself is of the host")
    freeze, loader = harness.Run.freeze, harness.Run.loader
    monkeypatch.setattr(
        harness.Run, "freeze", lambda run, model, *a, **k: freeze(run, model.to(DEVICE), *a, **k)
    )
    monkeypatch.setattr(harness.Run, "loader", lambda *a, **k: Moving(loader(*a, **k)))
