"""Loops that use a device in ways of their own: wrappers, two devices, compiled blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.device.backend import counts
from tests.device.simulated.runs import DEVICE, assert_same, moved, plain, run
from tests.helpers.nets import Net, make_net


class Ahead:
    """Moves the next batch to the device, on a stream of its own, before this one is used."""

    def __init__(self, loader, depth=1):
        self.loader, self.depth = loader, depth

    def __iter__(self):
        stream, current = torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
        waiting = []
        for batch in self.loader:
            torch.accelerator.set_stream(stream)
            there = moved(batch, non_blocking=True)
            torch.accelerator.set_stream(current)
            waiting.append((there, stream.record_event()))
            if len(waiting) > self.depth:
                yield self._waited(*waiting.pop(0), current)
        for batch, event in waiting:
            yield self._waited(batch, event, current)

    @staticmethod
    def _waited(batch, event, current):
        current.wait_event(event)
        return batch


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("moves", [None, {9: "layer2", 20: None}], ids=["still", "moves"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapper_that_prefetches_to_the_device(tmp_path, depth, moves, workers):
    if depth > 1 and (workers or moves):
        pytest.skip("one depth is enough with workers, or moves")
    settings = {
        "wrap": lambda loader: Ahead(loader, depth), "to": lambda batch: batch, "moves": moves,
        "epochs": 5, "pin_memory": True, "num_workers": workers,
    }  # fmt: skip
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].hits > 48


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_pinned_batches_copied_beside_the_host(tmp_path, non_blocking, workers):
    pinned = []

    def to(batch):
        pinned.extend(part.is_pinned() for part in batch if not hasattr(part, "_meta"))
        return moved(batch, non_blocking=non_blocking)

    settings = {"to": to, "pin_memory": True, "num_workers": workers}
    cached = run(tmp_path / "a", gate="always", **settings)
    assert all(pinned)  # of the misses, and the labels of the hits
    assert len(pinned) == 6 * 2 + 12
    assert_same(cached, plain(**settings))
    assert cached[2].hits == 48 * 2


class Spread(Net):
    """Its front on one device, the rest on another."""

    def spread(self, first):
        names = ["stem", "layer1", "layer2", "layer3", "head"]
        for i, name in enumerate(names):
            getattr(self, name).to(f"{DEVICE}:{0 if i < first else 1}")
        self.names, self.first = names, first
        return self

    def to(self, *args, **kwargs):
        return self

    def forward(self, x):
        def at(i, x):
            return x.to(f"{DEVICE}:{0 if i < self.first else 1}")

        x = F.relu(self.stem(at(0, x)))
        x = F.relu(self.layer1(at(1, x)))
        x = self.layer3(at(3, self.layer2(at(2, x))))
        return self.head(at(4, F.relu(x).mean(dim=(2, 3))))


@pytest.mark.parametrize(("first", "boundary"), [(1, "stem"), (1, "layer2"), (2, "layer1")])
def test_a_model_spread_over_two_devices(tmp_path, first, boundary):
    def make():
        torch.manual_seed(0)
        return Spread().spread(first)

    settings = {
        "make": make, "boundary": boundary,
        "to": lambda batch: [batch[0].to(f"{DEVICE}:0"), batch[1].to(f"{DEVICE}:1")],
    }  # fmt: skip
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].hits == 48 * 2


def test_a_cut_of_tensors_on_two_devices(tmp_path):
    """What crosses the boundary lies on both: rows come with their batch, each to its device."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(1, 3, 3)
            self.layer1 = nn.Conv2d(3, 3, 3)
            self.head = nn.Linear(6, 5)
            self.layer1.to(f"{DEVICE}:1")
            self.stem.to(f"{DEVICE}:0")
            self.head.to(f"{DEVICE}:1")

        def to(self, *args, **kwargs):
            return self

        def forward(self, x):
            a = self.stem(x.to(f"{DEVICE}:0"))
            b = self.layer1(a.to(f"{DEVICE}:1"))
            a = a.to(f"{DEVICE}:1")
            return self.head(torch.cat([a.mean((2, 3)), b.mean((2, 3))], 1))

    def freezes(model, boundary):
        model.stem.requires_grad_(False)
        model.layer1.requires_grad_(False)

    settings = {
        "make": lambda: (torch.manual_seed(0), Two())[1], "freezes": freezes, "epochs": 4,
        "to": lambda batch: [batch[0].to(f"{DEVICE}:0"), batch[1].to(f"{DEVICE}:1")],
    }  # fmt: skip
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].why_not is None
    assert cached[2].hits == 48 * 3


def test_a_device_that_is_not_the_first(tmp_path):
    there = f"{DEVICE}:1"
    settings = {
        "make": lambda: Elsewhere.of(make_net(), there),
        "to": lambda batch: moved(batch, there),
    }
    before = counts(all_threads=True).across
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].hits == 48 * 2
    assert counts(all_threads=True).across == before


class Elsewhere(Net):
    @staticmethod
    def of(net, device):
        net.__class__ = Elsewhere
        return nn.Module.to(net, device)

    def to(self, *args, **kwargs):
        return self


@pytest.mark.parametrize("block", ["layer2", "layer3", "layer1"])
def test_a_compiled_block(tmp_path, block):
    def make():
        model = make_net()
        model.get_submodule(block).compile(backend="eager")
        return model

    cached = run(tmp_path / "a", gate="always", make=make)
    assert_same(cached, plain(make=make))
    assert cached[2].hits == 48 * 2


@pytest.mark.parametrize("ring_batches", [1, 2, 9])
def test_any_size_of_the_ring(tmp_path, ring_batches):
    settings = {"cache_kwargs": {"ring_batches": ring_batches}, "epochs": 4}
    cached = run(tmp_path / "a", gate="always", **settings)
    assert_same(cached, plain(**settings))
    assert cached[2].hits == 48 * 3
