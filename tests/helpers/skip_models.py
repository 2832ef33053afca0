"""A small model with a frozen front, its data, and a harness that drives it."""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.skip_harness import Harness, freeze

DATA = {
    "x": torch.randn(24, 4, 6, generator=torch.Generator().manual_seed(1)),
    "y": torch.randint(3, (24,), generator=torch.Generator().manual_seed(2)),
}
BATCHES = [range(0, 8), range(8, 16), range(16, 24)]


class Base(nn.Module):
    """early -> middle (the boundary) -> late, head; a class may have other parts, or more."""

    parts = MappingProxyType(dict.fromkeys(("early", "middle", "late"), lambda: nn.Linear(6, 6)))

    def __init_subclass__(cls, **parts):
        cls.parts = {**cls.parts, **parts}

    def __init__(self):
        super().__init__()
        for name, make in self.parts.items():
            setattr(self, name, make())
        self.head = nn.Linear(6, 3)

    def finish(self, x):
        return self.head(F.dropout(torch.tanh(self.late(x)), 0.2, self.training).mean(1))

    def forward(self, x):
        return self.finish(self.middle(torch.tanh(self.early(x))))


def call(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def harness_of(make=Base, *, frozen=("early", "middle"), boundary="middle", data=DATA):
    torch.manual_seed(0)
    model = make()
    freeze(model, *frozen)
    harness = Harness(model, data)
    harness.engine.set_boundary(boundary)
    return harness
