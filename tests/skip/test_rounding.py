"""Rounding is no dependence: results under autocast are as coarse as what they were made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader

NUM, WIDTH = 24, 32


class Front(nn.Module):
    """A residual branch whose sum is taken in another order for other numbers of rows, as kernels
    do; and, if it is `mixing`, a little of the batch's mean.
    """

    def __init__(self, mixing: float) -> None:
        super().__init__()
        self.weight, self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH)), mixing

    def forward(self, x):
        pieces = range(0, WIDTH, 4)
        total = 0.0
        for at in pieces if len(x) % 3 else reversed(pieces):
            total = total + F.linear(x[:, at : at + 4], self.weight[:, at : at + 4])
        return x + total + self.mixing * x.mean(0)


class Net(nn.Module):
    def __init__(self, mixing: float) -> None:
        super().__init__()
        self.front, self.head = Front(mixing), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.front(x))


def stats(directory, mixing):
    torch.manual_seed(0)
    model, data = Net(mixing), torch.randn(NUM, WIDTH)
    model.front.requires_grad_(False)
    with ActivationCache(model, directory, "front", gate="always") as cache:
        loader = EgeriaLoader(data, 8, shuffle=True, cache=cache, seed=1)
        for _ in range(3):
            for x in loader:
                with torch.autocast("cpu", torch.bfloat16):
                    model(x).float().sum().backward()
                cache.flush()
        return cache.stats()


def test_a_front_that_rounds_as_autocast_does_is_served(tmp_path):
    model, x = Net(0.0), torch.randn(9, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        differs = (model.front(x)[:8] - model.front(x[:8])).abs().max() / model.front(x).abs().max()
    assert differs > 1e-3
    found = stats(tmp_path, 0.0)
    assert (found.hits, found.why_not, found.audit_failures) == (2 * NUM, None, 0)


@pytest.mark.parametrize("mixing", [0.1, 0.02])
def test_one_that_looks_at_its_neighbours_is_not_though_it_differs_by_no_more(tmp_path, mixing):
    with pytest.raises(BoundaryError, match="mixes the samples of a batch"):
        stats(tmp_path, mixing)


class Faint(nn.Module):
    """Adds a little of the batch's mean to a channel that is small beside the others, and that in
    batches of eight alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1e-5] + [1.0] * (WIDTH - 1)))

    def forward(self, x):
        h = x * self.scale
        return h + 0.1 * h.mean(0) * (self.scale < 1e-3) * (len(x) == 8)


def test_what_only_the_whole_batch_shows_in_a_small_channel_is_decided_in_float64_too(tmp_path):
    torch.manual_seed(0)
    model, x = Net(0.0), torch.randn(NUM, WIDTH)
    model.front = Faint().requires_grad_(False)
    with (
        ActivationCache(model, tmp_path, "front", gate="always") as cache,
        pytest.raises(BoundaryError, match="mixes the samples of a batch"),
    ):
        model(next(iter(EgeriaLoader(x, 8, cache=cache))))
