"""The data set becomes another in the middle of a run."""

from __future__ import annotations

import array
import contextvars
import functools
import math
import os
import threading
import types
import weakref
from collections import deque
from itertools import count, cycle
from queue import SimpleQueue
from time import perf_counter, sleep

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from tests.hostile.harness import cross_entropy, hostile, sgd
from tests.hostile.loops import trained
from tests.hostile.nets import Collate, Net, Pairs, Scale, Tokens, inputs, labels, rows, seeded


def changing(run, dataset, change, *, epochs=3, at=1, model=None, **kwargs):
    """Train, and do something to the data set before one of the epochs."""
    model, boundary = (Net(), "middle") if model is None else (model, "block")
    model = run.freeze(model, boundary)
    loader = run.loader(dataset, **kwargs)

    def each_epoch(epoch):
        if epoch == at:
            run.turn()
            change(loader)

    run.fit(model, loader, epochs, each_epoch=each_epoch)


def half():
    return Subset(rows(48), [*range(24)])


def scaled():
    return Pairs(transform=Scale())


class Epochal(Pairs):
    """Data that hang on the epoch, as samplers' and curricula's do."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (1 + self.epoch), y


class Cached(Pairs):
    """Keeps what it has loaded."""

    def __init__(self):
        super().__init__()
        self.kept, self.strength = {}, 1.0

    def __getitem__(self, i):
        if i not in self.kept:
            x, y = super().__getitem__(i)
            self.kept[i] = x * self.strength, y
        return self.kept[i]


class Outside(Pairs):
    """Its strength is in a shared object."""

    def __init__(self):
        super().__init__()
        self.shared = {"strength": 1.0}
        self.read = lambda: self.shared["strength"]

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * self.read(), y


class Flipped(Pairs):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return -x, y


class Listed(Pairs):
    """Labels in a list."""

    def __init__(self):
        super().__init__()
        self.y = self.y.tolist()


class Tabular(Pairs):
    """Labels that stand in a table."""

    def __init__(self):
        super().__init__()
        self.table = pytest.importorskip("pandas").DataFrame({"y": self.y.numpy()})

    def __getitem__(self, i):
        return self.x[i], int(self.table.y.iloc[i])


class Sparse(Pairs):
    def __init__(self):
        super().__init__()
        self.sparse = self.x.relu().to_sparse()

    def __getitem__(self, i):
        return self.sparse[i].to_dense(), self.y[i]


class Words(Pairs):
    """Tokens by a vocabulary."""

    def __init__(self):
        super().__init__()
        self.vocabulary = {str(i): i for i in range(11)}
        self.texts = [str(10**9 + 7919 * i**3)[-5:] for i in range(24)]

    def __getitem__(self, i):
        return torch.tensor([self.vocabulary[c] for c in self.texts[i]]), self.y[i]


def relabel(data):
    data.y[:] = [(y + 1) % 3 for y in data.y]


def relabel_each(data):
    for i, y in enumerate(data.y):
        data.y[i] = (y + 1) % 3


def one_label(data):
    data.y[5] = (data.y[5] + 1) % 3


def cleared(data):
    data.kept.clear()
    data.strength = 2.0


DATA = {
    "a transform comes": (Pairs, lambda d: setattr(d, "transform", Scale(2))),
    "a transform goes": (scaled, lambda d: setattr(d, "transform", None)),
    "another transform": (scaled, lambda d: setattr(d, "transform", Scale(2))),
    "a transform's setting": (scaled, lambda d: setattr(d.transform, "factor", 2.0)),
    "a module as a transform": (
        lambda: Pairs(transform=nn.Sequential()), lambda d: d.transform.append(nn.ReLU()),
    ),
    "set_epoch": (Epochal, lambda d: d.set_epoch(1)),
    "labels replaced": (Pairs, lambda d: setattr(d, "y", (d.y + 1) % 3)),
    "labels in place": (Pairs, lambda d: d.y.add_(1).remainder_(3)),
    "labels in a list": (Listed, relabel),
    "one label": (Pairs, one_label),
    "some labels through NumPy": (Pairs, lambda d: d.y.numpy().__setitem__(slice(0, 8), 0)),
    "inputs in place": (Pairs, lambda d: d.x.mul_(2)),
    "inputs replaced": (Pairs, lambda d: setattr(d, "x", d.x * 2)),
    "one element": (Pairs, lambda d: d.x[9].__setitem__(3, 4.0)),
    "one element by data": (Pairs, lambda d: d.x.data[9].__setitem__(3, 4.0)),
    "tensors replaced": (
        rows, lambda d: setattr(d, "tensors", (d.tensors[0] * 2, d.tensors[1])),
    ),
    "tensors past their version": (rows, lambda d: d.tensors[0].data.mul_(2)),
    "indices replaced": (half, lambda d: setattr(d, "indices", [*range(24, 48)])),
    "indices reversed": (half, lambda d: d.indices.reverse()),
    "the data of a subset": (half, lambda d: setattr(d, "dataset", rows(48, seed=9))),
    "transform below": (
        lambda: Subset(Pairs(), [*range(24)]),
        lambda d: setattr(d.dataset, "transform", Scale(2)),
    ),
    "transform of a part": (
        lambda: ConcatDataset([Pairs(), scaled()]),
        lambda d: setattr(d.datasets[1].transform, "factor", 2),
    ),
    "another part": (
        lambda: ConcatDataset([rows(12), rows(12, 5)]),
        lambda d: d.datasets.__setitem__(1, rows(12, 7)),
    ),
    "parts in another order": (
        lambda: ConcatDataset([Pairs(12), Pairs(12, Scale(2.0))]), lambda d: d.datasets.reverse(),
    ),
    "stacked": (lambda: StackDataset(inputs(), labels()), lambda d: d.datasets[0].mul_(2)),
    "kept and cleared": (Cached, cleared),
    "a strength in a shared dict": (Outside, lambda d: d.shared.update(strength=2.0)),
    "class swapped": (Pairs, lambda d: setattr(d, "__class__", Flipped)),
    "code patched": (
        lambda: type("Own", (Pairs,), {})(),
        lambda d: setattr(type(d), "__getitem__", lambda self, i: (-self.x[i], self.y[i])),
    ),
    "all of it": (Pairs, lambda d: d.__dict__.update(vars(Pairs(transform=Scale(2.0))))),
    "a column of a table": (Tabular, lambda d: d.table.__setitem__("y", (d.table.y + 1) % 3)),
    "a cell of a table": (Tabular, lambda d: d.table.iloc.__setitem__((9, 0), 2)),
    "a sparse tensor": (Sparse, lambda d: d.sparse._values().neg_()),
}  # fmt: skip


@hostile
@pytest.mark.cases(8)
@pytest.mark.parametrize("what", DATA)
def test_a_data_set_that_changes_between_epochs_is_read_again(run, what):
    make, change = DATA[what]
    changing(run, make(), lambda loader: change(loader.dataset))


@hostile
def test_a_vocabulary_that_changes_is_another_one(run):
    change = lambda loader: loader.dataset.vocabulary.update({"3": 7, "7": 10})  # noqa: E731
    changing(run, Words(), change, model=Tokens())


def closed_over():
    scale = 1.0

    def collate(samples):
        x, y = default_collate(samples)
        return x * scale, y

    def change(loader):
        nonlocal scale
        scale = 2.0

    return collate, change


COLLATES = {
    "its setting": lambda: (Collate(), lambda loader: setattr(loader.collate_fn, "scale", 2.0)),
    "another one": lambda: (
        Collate(), lambda loader: setattr(loader, "collate_fn", Collate(2.0)),
    ),
    "its closure": closed_over,
}  # fmt: skip


@hostile
@pytest.mark.parametrize("what", COLLATES)
def test_what_the_collate_function_does_is_obeyed(run, what):
    collate, change = COLLATES[what]()
    changing(run, rows(), change, collate_fn=collate)


@hostile(limit="What loading itself moves (counters, caches, open files) does not count")
def test_what_a_data_set_has_kept_is_written(run):
    def change(loader):
        for x, _ in loader.dataset.kept.values():
            x.mul_(-2)

    changing(run, Cached(), change, at=2)


@hostile
def test_set_epoch_before_every_epoch_gives_every_epochs_data(run):
    data = Epochal()
    trained(run, data=data, each_epoch=lambda model, epoch: data.set_epoch(epoch), epochs=4)


@hostile
def test_indices_drawn_anew_every_epoch_are_those_of_the_epoch(run):
    data = half()

    def each_epoch(model, epoch):
        data.indices = torch.randperm(48, generator=seeded(epoch))[:24].tolist()

    trained(run, data=data, each_epoch=each_epoch, epochs=5)


@hostile
def test_pseudo_labels_made_anew_every_epoch_are_used(run):
    data = Pairs()

    def each_epoch(model, epoch):
        model.eval()
        with torch.no_grad():
            data.y = model(data.x).argmax(1) if epoch else data.y

    trained(run, data=data, each_epoch=each_epoch, epochs=4)


@hostile
@pytest.mark.parametrize("kind", ["grows", "a curriculum"])
def test_another_data_set_for_each_epoch(run, kind):
    model, data, optimizer = run.freeze(Net()), Pairs(), None
    for epoch in range(4):
        size = 16 + 2 * epoch if kind == "grows" else 8 * (epoch % 3 + 1)
        optimizer = run.fit(
            model, run.loader(Subset(data, [*range(size)])), 1, optimizer=optimizer
        )  # fmt: skip


@hostile
def test_a_loader_for_other_labels_of_the_same_rows(run):
    model = run.freeze(Net())
    one, two = (run.loader(TensorDataset(inputs(), labels(seed=seed))) for seed in (2, 5))
    optimizer = run.fit(model, one, 2)
    run.fit(model, two, 2, optimizer=optimizer)


# ---- in mid-pass ------------------------------------------------------------------------------

MIDWAY = {
    "list": relabel,
    "one of a list": lambda data: [data.y.__setitem__(i, (data.y[i] + 1) % 3) for i in (1, 9, 17)],
    "another list": lambda data: setattr(data, "y", [(y + 1) % 3 for y in data.y]),
    "tensor": lambda data: data.x.add_(0.5),
    "transform": lambda data: setattr(data, "transform", Scale(2.0)),
    "what a function closes over": lambda data: setattr(data.strength, "factor", 2.0),
    "environment": lambda data: os.environ.update(HOSTILE_STRENGTH="2"),
    "context": lambda data: STRENGTH.set(2.0),
    "weak reference": lambda data: setattr(data.kept, "factor", 2.0),
    "bytes": relabel_each,
    "an array": relabel_each,
}
HELD_IN = {"bytes": bytearray, "an array": functools.partial(array.array, "q")}
STRENGTH = contextvars.ContextVar("strength")


def strengths(data):
    """Have a transform of each kind of setting."""
    data.strength, data.kept = strength, kept = types.SimpleNamespace(factor=1.0), Scale(1.0)
    STRENGTH.set(1.0)
    os.environ["HOSTILE_STRENGTH"] = "1"
    weak = weakref.ref(kept)
    factors = [
        lambda: strength.factor, lambda: float(os.environ["HOSTILE_STRENGTH"]), STRENGTH.get,
        lambda: weak().factor,
    ]  # fmt: skip
    data.transform = lambda x: x * math.prod(factor() for factor in factors)
    return data


@pytest.fixture
def _looked_at_with_each_batch(monkeypatch):
    monkeypatch.setattr("egeria_cache.samples.fingerprint.FREE_S", 60.0)


def one_ahead(loader):
    """Yield batches when the next one was asked for."""
    batches = iter(loader)
    for batch in batches:
        for following in batches:
            yield batch
            batch = following
        yield batch


@pytest.mark.usefixtures("_looked_at_with_each_batch")
@pytest.mark.parametrize("kind", list(MIDWAY))
@pytest.mark.parametrize("passes", ["several", "several, one ahead", "one that is endless"])
@hostile
def test_data_that_change_in_the_middle_of_a_pass(run, kind, passes):
    data, model, step = strengths(Listed()), run.freeze(Net()), 0
    data.y = HELD_IN.get(kind, list)(data.y)
    endless = RandomSampler(data, replacement=True, num_samples=160, generator=seeded(3))
    optimizer = sgd(model)
    for _ in range(1 if passes == "one that is endless" else 6):
        loader = run.loader(data, sampler=endless if passes == "one that is endless" else None)
        for batch in one_ahead(loader) if passes == "several, one ahead" else loader:
            step += 1
            if step == 10:
                MIDWAY[kind](data)
            run.step(cross_entropy(model, batch), optimizer)
    run.see(model)


@hostile
@pytest.mark.parametrize("what", ["labels", "inputs", "transform"])
def test_a_data_set_that_changes_behind_the_last_batch_is_read_again(run, what):
    """From the next epoch on at the latest."""
    data = scaled()
    change = {
        "labels": lambda d: setattr(d, "y", (d.y + 1) % 3),
        "inputs": lambda d: d.x.neg_(),
        "transform": lambda d: setattr(d.transform, "factor", 2.0),
    }[what]  # fmt: skip

    def each_step(model, step):
        if step == 8:  # the last batch of the third epoch has been loaded
            change(data)
        if step == 9:
            run.turn()

    trained(run, data=data, each_step=each_step, epochs=5)


# ---- counts of loads --------------------------------------------------------------------------


class CountingLoads(Dataset):
    """How often it was asked is part of what it gives."""

    def __init__(self):
        self.x, self.y, self.loads = inputs(), labels(), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.loads += 1
        return self.x[index] + 0.01 * self.loads, self.y[index]


@hostile
def test_a_data_set_that_counts_its_loads(run):
    trained(run, data=CountingLoads())


class CountingLate(CountingLoads):
    """The same from some load on, in many ways to count."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.seen, self.times = kind, [], dict.fromkeys(range(24), 0)

    def __getitem__(self, index):
        self.loads += 1
        self.seen.append(index)
        self.times[index] += 1
        so_far = {"number": self.loads // 24, "list": len(self.seen) // 24}
        return self.x[index] * (so_far.get(self.kind, self.times[index]) < 4), self.y[index]


class Transformed(Pairs):
    """Whose transforms count, by its side or within each other."""

    def __init__(self, kind):
        super().__init__()
        self.transforms = [abs, CountingLate(kind)]

    def __getitem__(self, index):
        return self.transforms[-1][index][0], self.y[index]


def fading(x):
    fading.calls += 1
    return x * (fading.calls < 100)


class Mapped(Pairs):
    """Whose transform counts in an attribute of its own."""

    def __init__(self, kind):
        super().__init__()
        fading.calls, self.transform = 0, fading

    def __getitem__(self, index):
        return self.transform(self.x[index]), self.y[index]


COUNTING = {
    "itself": CountingLate,
    "wrapped": lambda kind: Subset(CountingLate(kind), range(24)),
    "transforms": Transformed,
    "function": Mapped,
}


@pytest.mark.parametrize("kind", ["number", "list", "dictionary"])
@pytest.mark.parametrize("where", list(COUNTING))
@pytest.mark.parametrize("workers", [0, 1])
@hostile(told="decides what a sample is")
def test_a_data_set_that_decides_by_a_count_of_its_loads(run, kind, where, workers):
    trained(run, data=COUNTING[where](kind), num_workers=workers, epochs=6)


class Ticking:
    """Counts what it is asked, in one of many ways."""

    shared = 0

    def __init__(self, kind):
        Ticking.shared = 0
        self.kind, self.number, self.text = kind, np.int64(0), ""
        self.held = HELD[kind]() if kind in HELD else None
        self.tick = {
            "number": self._number, "text": self._text, "class": self._shared,
            "closure": closed(), "global": in_a_global, **COUNTED,
        }[kind]  # fmt: skip
        in_a_global(back=True)

    def _number(self, _):
        self.number = self.number + 1
        return self.number

    def _text(self, _):
        self.text += "x"
        return len(self.text)

    def _shared(self, _):
        Ticking.shared += 1
        return Ticking.shared


HELD = {
    "iterator": lambda: count(1),
    "array": lambda: np.zeros(1),
    "tensor": lambda: torch.zeros(1),
    "deque": deque,
    "set": set,
    "bytes": bytearray,
    "list of one": lambda: [0],
    "nested": lambda: {"a": [{"n": 0}]},
    "slots": lambda: Slotted(0.0),
}
COUNTED = {
    "iterator": next,
    "array": lambda held: held.__iadd__(1).item(),
    "tensor": lambda held: held.add_(1).item(),
    "deque": lambda held: held.append(0) or len(held),
    "set": lambda held: held.add(len(held)) or len(held),
    "bytes": lambda held: held.append(0) or len(held),
    "list of one": lambda held: held.append(held.pop() + 1) or held[0],
    "nested": lambda held: held["a"][0].update(n=held["a"][0]["n"] + 1) or held["a"][0]["n"],
    "slots": lambda held: setattr(held, "n", held.n + 1.0) or held.n,
}


class Slotted:
    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n


TICKS = 0


def in_a_global(_=None, *, back=False):
    global TICKS
    TICKS = 0 if back else TICKS + 1
    return TICKS


def closed():
    ticks = 0

    def tick(_):
        nonlocal ticks
        ticks += 1
        return ticks

    return tick


class TickingData(Pairs):
    """The same in two epochs, and other samples in the third."""

    def __init__(self, kind, to=1.5):
        super().__init__()
        self.ticking, self.to = Ticking(kind), to

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (1.0 if self.ticking.tick(self.ticking.held) <= 48 else self.to), y


def ticking(kind, to=1.5):
    """A collate function that counts its batches."""
    ticks = Ticking(kind)

    def collate(samples):
        x, y = default_collate(samples)
        return x * (1.0 if ticks.tick(ticks.held) <= 6 else to), y

    return collate


TICKING = ["number", "text", "class", "closure", "global", *HELD]


@pytest.mark.parametrize("kind", TICKING)
@hostile(told="decides what a sample is")
def test_what_counts_loads_in_any_way_and_decides(run, kind):
    trained(run, data=TickingData(kind), epochs=5)


@pytest.mark.parametrize("kind", TICKING)
@hostile(told="decides what a sample is")
def test_a_collate_function_that_counts_in_any_way_and_decides(run, kind):
    trained(run, collate_fn=ticking(kind), epochs=5)


@pytest.mark.parametrize("kind", TICKING)
@hostile(served=True)
def test_what_counts_loads_in_any_way_and_decides_nothing_is_served(run, kind):
    data, collate = TickingData(kind, 1.0), ticking(kind, 1.0)
    trained(run, data=data, collate_fn=collate, epochs=4)


class Generated(Pairs):
    """Takes a number for each sample from a generator that runs."""

    def __init__(self):
        super().__init__()
        self.numbers = (1.0 + (i >= 48) for i in range(1000))

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * next(self.numbers), y


class Alternating(Generated):
    """Every other sample of all that were loaded is another one."""

    def __init__(self):
        super().__init__()
        self.numbers = cycle([1.0, 1.5])


@pytest.mark.parametrize("make", [Generated, Alternating])
@hostile(told="data set.numbers")
def test_a_data_set_that_uses_up_what_it_holds(run, make):
    trained(run, data=make(), epochs=5)


class CountingForNothing(CountingLoads):
    """Counts, remembers what it had last, and gives the same all the same."""

    def __init__(self):
        super().__init__()
        self.seen, self.times, self.last, self.of_last = [], {}, -1, None

    def __getitem__(self, index):
        self.loads += 1
        self.seen.append(index)
        self.times[index] = self.times.get(index, 0) + 1
        if index // 4 != self.last:
            self.last, self.of_last = index // 4, self.x[index // 4 * 4 :][:4]
        return self.of_last[index % 4], self.y[index]


class Noisy(Pairs):
    """Draws from a generator of its own for each sample: the same every time."""

    def __getitem__(self, index):
        return torch.randn(6, generator=seeded(index)), self.y[index]


class Closing(Pairs):
    """Closes what it holds when it goes."""

    def __init__(self):
        super().__init__()
        self.open = [True]

    def __getitem__(self, index):
        assert self.open[0], "the file is closed"
        return super().__getitem__(index)

    def __del__(self):
        self.open[0] = False


class Ringed(Pairs):
    """Gives out memory of its own in turns, times its loads, and throws dice for nothing."""

    def __init__(self):
        super().__init__()
        self.ring, self.turn, self.log = torch.zeros(8, 6), 0, []
        self.dice = np.random.default_rng(0)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        self.turn += 1
        self.log.append((index, perf_counter(), self.dice.random()))
        return self.ring[self.turn % 8].copy_(x), y


class Threaded(Pairs):
    """A thread of its own reads ahead."""

    def __init__(self):
        super().__init__()
        self.ready, self.asked, self.thread = {}, SimpleQueue(), None

    def read(self):
        while True:
            index = self.asked.get()
            self.ready[index] = super().__getitem__(index)

    def __getitem__(self, index):
        if self.thread is None:
            self.thread = threading.Thread(target=self.read, daemon=True)
            self.thread.start()
        for ahead in range(index, min(index + 3, 24)):
            if ahead not in self.ready:
                self.asked.put(ahead)
        while index not in self.ready:
            sleep(1e-4)
        return self.ready[index]


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (CountingForNothing, 0), (CountingForNothing, 1), (Noisy, 0), (Closing, 0), (Ringed, 0),
        (Threaded, 0),
    ],
)  # fmt: skip
@hostile(served=True)
def test_a_data_set_with_a_state_that_decides_nothing_is_served(run, make, workers):
    trained(run, data=make(), num_workers=workers, epochs=4)
