"""boundary="auto": the deepest module before which nothing trains, found by itself."""

import copy
import logging
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.steps import take_step
from tests.hostile.nets import Net, net


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data():
    g = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(32, 6, generator=g), torch.randint(3, (32,), generator=g))


def freeze(model, *names):
    for name, module in model.named_modules():
        if name:
            module.requires_grad_(True)
    for name in names:
        model.get_submodule(name).requires_grad_(False)


def frozen_blocks():
    torch.manual_seed(0)
    model = Blocks()
    freeze(model, "stem", "blocks.0", "blocks.1")
    return model


def train(model, loader, epochs, each_epoch=lambda epoch: None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for epoch in range(epochs):
        each_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = take_step(F.cross_entropy(model(x), y), optimizer)
            losses.append(loss.item())
    return losses


def both(directory, model, epochs, each_epoch=lambda model, epoch: None, held=(), **options):
    """Train plainly and cached; return (plain losses, ours, cache's boundaries, stats)."""
    plain, boundaries = copy.deepcopy(model), []

    def note(epoch):
        cache.flush()
        boundaries.append(cache.boundary)
        each_epoch(model, epoch)

    expected = train(
        plain, EgeriaLoader(data(), batch_size=8), epochs, lambda epoch: each_epoch(plain, epoch)
    )
    with ActivationCache(model, directory, "auto", gate="always", **options) as cache:
        ours = train(model, EgeriaLoader(data(), batch_size=8, cache=cache), epochs, note)
        boundaries.append(cache.boundary)
        return expected, ours, boundaries, cache.stats()


def test_the_deepest_frozen_block_is_found_on_the_first_call(directory):
    model = frozen_blocks()
    expected, ours, boundaries, stats = both(directory, model, 3)
    assert boundaries == [None, "blocks.1", "blocks.1", "blocks.1"]
    assert ours == pytest.approx(expected, abs=1e-6)
    assert stats.hits == 64  # of the second and third epoch, all


def test_a_resumed_run_finds_what_was_stored_from_its_first_epoch_on(directory):
    """Which version of its samples the next epoch has is not to wait for the boundary."""
    model = frozen_blocks()
    with ActivationCache(model, directory, "auto", gate="always") as cache:
        loader = EgeriaLoader(data(), batch_size=8, cache=cache)
        train(model, loader, 2)
        state = loader.state_dict()
    with ActivationCache(model, directory, "auto", gate="always", audit_rate=0) as cache:
        loader = EgeriaLoader(data(), batch_size=8, cache=cache)
        loader.load_state_dict(state)
        train(model, loader, 1)
        assert cache.stats().hits == 24  # all but the first batch, which finds the boundary


def test_it_follows_what_is_frozen_and_what_is_thawed(directory):
    def each_epoch(model, epoch):
        frozen = {0: 1, 2: 3, 4: 2, 6: 0, 8: 4}.get(epoch)
        if frozen is not None:
            freeze(model, *["stem", *(f"blocks.{i}" for i in range(frozen))] if frozen else [])

    expected, ours, boundaries, stats = both(directory, Blocks(), 10, each_epoch)
    assert boundaries[2::2] == ["blocks.0", "blocks.2", "blocks.1", None, "blocks.3"]
    assert ours == pytest.approx(expected, abs=1e-5)
    assert stats.hits > 96


@pytest.mark.parametrize("frozen", [(), ("stem",)])
def test_nothing_found_is_no_error_and_the_reason_is_given(directory, frozen):
    """Where anything is frozen, a copy of the model cannot be made."""
    freeze(model := Blocks(), *frozen)
    model.random = type("Own", (random.SystemRandom,), {"__deepcopy__": lambda self, memo: self})()
    expected, ours, boundaries, stats = both(directory, model, 3)
    assert (boundaries[-1], ours) == (None, expected)
    assert ("on a copy of the model" if frozen else "no module is frozen") in stats.why_not
    assert "none: nothing is skipped" in stats.report()


def test_a_module_that_cannot_be_the_boundary_gives_way_to_one_before_it(directory, caplog):
    class Mixing(Blocks):
        def forward(self, x):
            x = torch.relu(self.stem(x))
            x = self.blocks[0](x)
            return self.head(self.blocks[1](x - x.mean(0)))  # depends on the batch

    model = Mixing()
    freeze(model, "stem", "blocks.0", "blocks.1")
    with caplog.at_level(logging.WARNING):
        expected, ours, boundaries, stats = both(directory, model, 4)
    assert boundaries[-1] == "blocks.0"
    assert ours == pytest.approx(expected, abs=1e-6)
    assert stats.hits >= 64
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_cannot_be_cut_anywhere_is_told_once(directory, caplog):
    model = net(forward=lambda m, x: Net.forward(m, x - x.mean(0)))
    freeze(model, "early", "middle")
    with caplog.at_level(logging.WARNING):
        expected, ours, _, stats = both(directory, model, 3)
    assert ours == expected
    assert stats.hits == 0
    assert len([r for r in caplog.records if "uncached" in r.getMessage()]) == 1


def test_a_name_given_by_hand_ends_the_search(directory):
    model = frozen_blocks()
    with ActivationCache(model, directory, "auto") as cache:
        cache.set_boundary("blocks.0")
        train(model, EgeriaLoader(data(), batch_size=8, cache=cache), 2)
        assert cache.boundary == "blocks.0"
        cache.set_boundary("auto")
        train(model, EgeriaLoader(data(), batch_size=8, cache=cache), 1)
        assert cache.boundary == "blocks.1"
