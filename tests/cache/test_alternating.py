"""A flag that differs from epoch to epoch: each value has a cut of its own, and all are served."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.ways = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x, way):
        x = self.front(x)
        return self.ways[0](x) if way else self.ways[1](x)


def train(directory, gate, ways):
    model = TwoWays()
    model.front.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 6, generator=g), torch.randint(3, (32,), generator=g))
    losses, hits = [], []
    with ActivationCache(model, directory, "front", gate=gate, audit_rate=0.1) as cache:
        order = torch.Generator().manual_seed(2)
        loader = EgeriaLoader(data, 8, shuffle=True, generator=order, cache=cache, seed=3)
        for way in ways:
            before = cache.stats().hits
            for x, y in loader:
                loss = F.cross_entropy(model(x, way), y)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                cache.flush()
            hits.append(cache.stats().hits - before)
        assert cache.stats().audit_failures == 0
    return losses, hits


@pytest.mark.parametrize(
    "ways", [[True, False] * 3, [True, True, False, False, True, False]], ids=str
)
def test_each_value_is_served_whole_once_it_was_stored(tmp_path, ways):
    computed, _ = train(tmp_path / "never", "never", ways)
    losses, hits = train(tmp_path / "always", "always", ways)
    torch.testing.assert_close(losses, computed, rtol=1e-5, atol=1e-6)
    assert hits == [32 if way in ways[:epoch] else 0 for epoch, way in enumerate(ways)]
