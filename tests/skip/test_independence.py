"""What depends on its neighbours, or on how often it was called, is never cached."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader
from tests.helpers.skip_harness import assert_same_run
from tests.helpers.skip_models import Base, call, harness_of


class Early(nn.Module):
    """A frozen layer, and `mix`: its code behind it."""

    def __init__(self, mix):
        super().__init__()
        self.linear, self.mix = nn.Linear(6, 6), mix

    def forward(self, x):
        return self.mix(self.linear(x))


def run(make, sizes=(8, 8)):
    harness, start = harness_of(make), 0
    for size in sizes:
        call(harness.model, harness.batch(range(start, start + size))).backward()
        start += size
    return harness


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_function_of_the_sample_is_cut_by_a_first_batch_of_any_size(size):
    mix = lambda h: F.layer_norm(h, (6,)) * h.amax((1, 2), keepdim=True)  # noqa: E731
    harness = run(type("Own", (Base,), {}, early=lambda: Early(mix)), (size, size))
    assert harness.host.refusals == []
    assert harness.engine.cut is not None


def test_rounding_in_a_small_channel_is_not_taken_for_a_dependence():
    def make():
        model = Base()
        # Cancels to what rounding leaves.
        model.early = Early(lambda h: (h + 1e4) - 1e4)
        with torch.no_grad():
            model.early.linear.weight.mul_(1e3)
            model.middle.bias[0] = 1e5
            model.middle.weight[1] *= 1e-5
        return model

    assert run(make).host.refusals == []


# ---- a prefix that counts ---------------------------------------------------------------------


class Counting(nn.Module):
    """Moves an attribute, of which its own result may not even depend."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind
        self.steps, self.tally, self.log = 0, {"n": 0}, []
        self.average = torch.zeros(6)
        self.register_buffer("mean", torch.zeros(6))
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x):
        h = self.linear(x)
        if self.kind == "number":
            self.steps += 1
        elif self.kind == "dict":
            self.tally["n"] += 1
        elif self.kind == "list":
            self.log.append(1)
        elif self.kind == "tensor":
            self.average = self.average * 0.9 + h.detach().mean((0, 1))
        elif self.kind == "buffer":
            self.mean.mul_(0.9).add_(h.detach().mean((0, 1)))
        elif self.kind == "generator":
            torch.rand(1, generator=self.noise)
        elif self.kind == "left behind":
            self.average = h.detach()
        return h


@pytest.mark.parametrize(
    ("kind", "name"),
    [("number", "steps"), ("dict", "tally"), ("list", "log"), ("tensor", "average"),
     ("buffer", "mean"), ("generator", "noise"), ("left behind", "average")],
)  # fmt: skip
def test_a_prefix_that_counts_is_refused_by_the_attributes_name(kind, name):
    (error,) = run(type("Own", (Base,), {}, early=lambda: Counting(kind))).host.refusals
    assert f"'early.{name}'" in str(error)


@pytest.mark.parametrize("draw", [lambda: torch.rand(3), random.random])
def test_a_layer_that_draws_random_numbers_is_not_cut(draw):
    harness = harness_of(type("Own", (Base,), {}, early=lambda: Early(lambda h: (draw(), h)[1])))
    assert_same_run(harness, call, [range(8)] * 2)
    refused = ["draws random numbers" in str(error) for error in harness.host.refusals]
    assert (harness.host.num_loads, refused) == (0, [True])


def test_code_that_decides_one_call_in_twenty_by_lot_is_not_cut():
    random.seed(1)
    forward = lambda m, x: Base.forward(m, x if random.randrange(20) else 2 * x)  # noqa: E731
    assert run(type("Own", (Base,), {"forward": forward}), (8,)).host.refusals


# ---- gradient mode ----------------------------------------------------------------------------


def test_a_prefix_that_does_not_ask_is_cut_once_for_both():
    harness = run(Base)
    with torch.no_grad():
        harness.model(harness.batch(range(8))["x"])
    assert harness.engine._plans._num_dry_runs == 1
    assert harness.host.num_loads == 1


# Rounding is no dependence: results under autocast are as coarse as what they were made of.

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
