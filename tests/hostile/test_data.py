"""The data set becomes another in the middle of a run."""

import contextvars
import copy
import io
import math
import os
import types
import weakref
from itertools import chain, count, cycle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, RandomSampler, Subset, TensorDataset, default_collate

from tests.hostile.harness import cross_entropy, hostile
from tests.hostile.loops import one_ahead, trained
from tests.hostile.nets import Collate, Net, Pairs, Scale, inputs, labels, made, net, rows, seeded
from tests.hostile.places import COUNTERS, Words


def changing(run, dataset, change, *, at=1, model=None, **kwargs):
    """Train, and do something to the loader before one of the epochs."""
    model = run.freeze(*((Net(), "middle") if model is None else (model, "block")))
    loader = run.loader(dataset, **kwargs)

    def each_epoch(epoch):
        if epoch == at:
            run.turn()
            change(loader)

    run.fit(model, loader, each_epoch=each_epoch)


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


def keeping():
    """Return a data set that keeps what it has loaded."""

    def get(data, i):
        if i not in data.kept:
            data.kept[i] = data.x[i] * data.strength, data.y[i]
        return data.kept[i]

    return made(get, kept={}, strength=1.0)


def reading_outside():
    """Return a data set with a strength in a shared object, of one sample that is seldom asked."""
    shared = Words(strength=1.0)
    return made(
        lambda data, i: (data.x[i] * (data.read() if i == 101 else 1), data.y[i]), 200,
        shared=shared, read=lambda: shared.strength,
    )  # fmt: skip


def tabular():
    """Return a data set whose labels stand in a table."""
    table = pytest.importorskip("pandas").DataFrame({"y": labels().numpy()})
    return made(lambda data, i: (data.x[i], int(data.table.y.iloc[i])), table=table)


class Flipped(Pairs):
    def __getitem__(self, i):
        return -self.x[i], self.y[i]


def relabel(data):
    data.y[:] = [(y + 1) % 3 for y in data.y]


def one_label(data):
    data.y[5] = (data.y[5] + 1) % 3


def cleared(data):
    data.kept.clear()
    data.strength = 2.0


DATA = {
    "a transform comes": (Pairs, lambda d: setattr(d, "transform", Scale(2))),
    "a transform's setting": (scaled, lambda d: setattr(d.transform, "factor", 2.0)),
    "a module as a transform": (
        lambda: Pairs(transform=nn.Sequential()), lambda d: d.transform.append(nn.ReLU()),
    ),
    "set_epoch": (Epochal, lambda d: d.set_epoch(1)),
    "labels replaced": (Pairs, lambda d: setattr(d, "y", (d.y + 1) % 3)),
    "labels in place": (Pairs, lambda d: d.y.add_(1).remainder_(3)),
    "labels in a list": (lambda: made(Pairs.__getitem__, y=labels().tolist()), relabel),
    "one label": (Pairs, one_label),
    "some labels through NumPy": (Pairs, lambda d: d.y.numpy().__setitem__(slice(0, 8), 0)),
    "inputs in place": (Pairs, lambda d: d.x.mul_(2)),
    "one element by data": (Pairs, lambda d: d.x.data[9].__setitem__(3, 4.0)),
    "tensors past their version": (rows, lambda d: d.tensors[0].data.mul_(2)),
    "indices replaced": (half, lambda d: setattr(d, "indices", [*range(24, 48)])),
    "transform below": (
        lambda: Subset(Pairs(), [*range(24)]),
        lambda d: setattr(d.dataset, "transform", Scale(2)),
    ),
    "transform of a part": (
        lambda: ConcatDataset([Pairs(), scaled()]),
        lambda d: setattr(d.datasets[1].transform, "factor", 2),
    ),
    "kept and cleared": (keeping, cleared),
    "a strength in a shared table": (reading_outside, lambda d: d.shared.update(strength=2.0)),
    "class swapped": (Pairs, lambda d: setattr(d, "__class__", Flipped)),
    "code patched": (
        lambda: made(Pairs.__getitem__),
        lambda d: setattr(type(d), "__getitem__", Flipped.__getitem__),
    ),
    "a cell of a table": (tabular, lambda d: d.table.iloc.__setitem__((9, 0), 2)),
    "a sparse tensor": (
        lambda: made(
            lambda d, i: (d.sparse[i].to_dense(), d.y[i]), sparse=inputs().relu().to_sparse()
        ),
        lambda d: d.sparse._values().neg_(),
    ),
}  # fmt: skip


@hostile(over=DATA, cases=8)
def test_a_data_set_that_changes_between_epochs_is_read_again(run, make, change):
    changing(run, make(), lambda loader: change(loader.dataset))


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


@hostile(over=COLLATES)
def test_what_the_collate_function_does_is_obeyed(run, make):
    collate, change = make()
    changing(run, rows(), change, collate_fn=collate)


STAYING = {"num_workers": 1, "persistent_workers": True}


@hostile(served=True)
def test_persistent_workers_see_what_is_written_to_shared_memory(run):
    data = Pairs()
    data.x.share_memory_()
    changing(run, data, lambda loader: loader.dataset.x.mul_(2), **STAYING)


@hostile(over={"before a pass": ("each_epoch", 1), "in a pass": ("each_step", 4)})
def test_persistent_workers_do_not_see_what_takes_the_place_of_memory(run, each, when):
    data, model = Pairs(), run.freeze(Net(), "middle")
    data.x.share_memory_()
    x = torch.cat([data.x[:9], 2 * data.x[9:10], data.x[10:]]).share_memory_()
    change = {each: lambda number: number != when or setattr(data, "x", x)}
    run.fit(model, run.loader(data, **STAYING), **change)
    run.fit(model, run.loader(data))


@hostile
def test_what_a_data_set_has_kept_is_written(run):
    changing(run, keeping(), lambda loader: loader.dataset.kept[5][0].mul_(-2), at=2)


def drawn_anew(data, model, epoch):
    data.indices = torch.randperm(48, generator=seeded(epoch))[:24].tolist()


def labelled_by_the_model(data, model, epoch):
    model.eval()
    with torch.no_grad():
        data.y = model(data.x).argmax(1) if epoch else data.y


EACH_EPOCH = {
    "set_epoch": (Epochal, lambda data, model, epoch: data.set_epoch(epoch)),
    "indices drawn anew": (half, drawn_anew),
    "pseudo labels made anew": (Pairs, labelled_by_the_model),
}


@hostile(over=EACH_EPOCH, cases=3)
def test_a_data_set_that_is_another_in_every_epoch_is_that_of_the_epoch(run, make, change):
    data = make()
    trained(run, data=data, each_epoch=lambda m, epoch: change(data, m, epoch), epochs=5)


ANEW = {
    "grows": lambda epoch: Subset(Pairs(40), [*range(16 + 2 * epoch)]),
    "a curriculum": lambda epoch: Subset(Pairs(), [*range(8 * (epoch % 3 + 1))]),
    "other labels": lambda epoch: TensorDataset(inputs(), labels(seed=2 + epoch // 2)),
}


@hostile(over=ANEW, cases=3)
def test_another_data_set_for_each_epoch(run, data):
    model, optimizer = run.freeze(Net()), None
    for epoch in range(10):
        if epoch == 8:
            run.turn()
        optimizer = run.fit(model, run.loader(data(epoch)), 1, optimizer=optimizer)


# ---- in mid-pass ------------------------------------------------------------------------------

STRENGTH = contextvars.ContextVar("strength")
TABLE = {"factor": 1.0}
MIDWAY = {
    "list": (list, relabel),
    "transform": (list, lambda data: setattr(data, "transform", Scale(2.0))),
    "what a function closes over": (list, lambda data: setattr(data.strength, "factor", 2.0)),
    "environment": (list, lambda data: os.environ.update(HOSTILE_STRENGTH="2")),
    "context": (list, lambda data: STRENGTH.set(2.0)),
    "weak reference": (list, lambda data: setattr(data.kept, "factor", 2.0)),
    "bytes": (bytearray, one_label),
    "a view of a table": (list, lambda data: TABLE.update(factor=2.0)),
    "bytes in memory": (list, lambda data: data.text.getbuffer().__setitem__(0, ord("2"))),
}


def strengths(held_in):
    """Return a data set whose transform has a setting of each kind."""
    strength, kept = types.SimpleNamespace(factor=1.0), Scale(1.0)
    STRENGTH.set(1.0)
    os.environ["HOSTILE_STRENGTH"] = "1"
    weak, view, text = weakref.ref(kept), types.MappingProxyType(TABLE), io.BytesIO(b"1")
    TABLE.update(factor=1.0)
    factors = [
        lambda: strength.factor, lambda: float(os.environ["HOSTILE_STRENGTH"]), STRENGTH.get,
        lambda: weak().factor, lambda: view["factor"], lambda: float(text.getvalue()),
    ]  # fmt: skip
    transform = lambda x: x * math.prod(factor() for factor in factors)  # noqa: E731
    y = held_in(labels().tolist())
    state = {"strength": strength, "kept": kept, "text": text, "transform": transform}
    return made(Pairs.__getitem__, y=y, **state)


@pytest.fixture
def _looked_at_with_each_batch(monkeypatch):
    monkeypatch.setattr("egeria_cache.samples.fingerprint.FREE_S", 60.0)


@pytest.fixture
def _looked_at_rarely(monkeypatch):
    monkeypatch.setattr("egeria_cache.samples.fingerprint.FREE_S", 0.0)
    monkeypatch.setattr("egeria_cache.samples.fingerprint.MAX_SHARE", 1e-9)


@pytest.mark.usefixtures("_looked_at_with_each_batch")
@hostile(over=MIDWAY)
@pytest.mark.parametrize(
    ("passes", "at"),
    [("one ahead", 2), ("several", 10), ("one ahead", 10), ("one that is endless", 10)],
)
def test_data_that_change_in_the_middle_of_a_pass(run, held_in, change, passes, at):
    data, model = strengths(held_in), run.freeze(Net())
    is_endless = passes == "one that is endless"
    endless = RandomSampler(data, replacement=True, num_samples=160, generator=seeded(3))

    def batches():
        step = 0
        for _ in range(1 if is_endless else 6):
            loader = run.loader(data, sampler=endless if is_endless else None)
            for batch in one_ahead(loader) if passes == "one ahead" else loader:
                step += 1
                if step == at:
                    change(data)
                yield batch

    run.fit(model, batches(), 1)


# ---- counts of loads --------------------------------------------------------------------------


@hostile
def test_a_data_set_of_which_each_sample_counts_its_loads(run):
    def get(data, index):
        data.loads += 1
        return data.x[index] + 0.01 * data.loads, data.y[index]

    trained(run, data=made(get, loads=0))


TICKS = 0


def reset():
    global TICKS
    TICKS = 0


def in_a_global(_):
    global TICKS
    TICKS += 1
    return TICKS


COUNTS = COUNTERS | {"a global": (reset, in_a_global)}


def by_count(data, i):
    return data.x[i] * (1.0 if data.tick(data.held) <= 48 else data.to), data.y[i]


def ticking(kind, to=1.5):
    """Return a data set that counts its loads, the same in two epochs and another in the third."""
    make, tick = COUNTS[kind]
    return made(by_count, tick=tick, held=make(), to=to)


def by_a_transform(kind, to=1.5):
    """Return one whose transform counts, two objects below it."""
    transform = types.SimpleNamespace(data=ticking(kind, to))
    return made(lambda data, i: data.transforms[-1].data[i], transforms=[abs, transform])


def by_sample(kind, to=1.5):
    """Return one that counts how often it loaded each sample, and gives another at that load."""

    def get(data, index):
        data.times[index] += 1
        return data.x[index] * (data.times[index] < int(kind)), data.y[index]

    return made(get, times=dict.fromkeys(range(24), 0))


def ticking_collate(kind, to=1.5):
    """Return a collate function that counts its batches."""
    make, tick = COUNTS[kind]
    held = make()

    def collate(samples):
        x, y = default_collate(samples)
        return x * (1.0 if tick(held) <= 6 else to), y

    return collate


TICKING = (
    "a list", "deep in tables", "an array", "a tensor", "an object", "slots", "a closure",
    "a class", "a global", "an iterator", "a deque", "a list that grows", "a set",
    "bytes that grow", "a byte", "an array of the standard library",
)  # fmt: skip
DECIDING = {
    **{kind: (ticking, kind) for kind in TICKING},
    "by a transform": (by_a_transform, "an object"),
    "for each sample": (by_sample, "4"),
}


@hostile(over=DECIDING, told="decides what a sample is")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_decides_by_a_count_of_its_loads(run, make, kind, workers):
    trained(run, data=make(kind), num_workers=workers, epochs=6)


@hostile(over=dict(zip(TICKING, TICKING, strict=True)), told="decides what a sample is")
def test_a_collate_function_that_decides_by_a_count_of_its_calls(run, kind):
    trained(run, collate_fn=ticking_collate(kind), epochs=5)


@hostile(over=dict(zip(TICKING, TICKING, strict=True)), served=True)
def test_what_counts_loads_in_any_way_and_decides_nothing_is_served(run, kind):
    data, collate = ticking(kind, 1.0), ticking_collate(kind, 1.0)
    trained(run, data=data, collate_fn=collate, epochs=4)


@hostile(over={"here": 0, "by workers": 2}, served=True)
def test_a_number_told_in_mid_epoch_that_decides_few_samples(run, workers):
    """Workers have the one before until their pass ends."""
    data = made(lambda d, i: (d.x[i] * 2 ** (i in (4, 9) and i < 5 * d.epoch), d.y[i]), 40, epoch=0)
    told = lambda m, step: data.set_epoch(step // 10)  # noqa: E731
    trained(run, data=data, num_workers=workers, batch_size=4, each_step=told, epochs=6)


NUMBERS = {
    "a generator that runs": lambda: (1.0 + (i >= 48) for i in range(1000)),
    "in turns": lambda: cycle([1.0, 1.5]),
    "mapped": lambda: map(float, cycle([1.0, 1.5])),
    "chained": lambda: chain([1.0] * 48, [2.0] * 2000),
    "beside a generator": lambda: map(max, [1.0] * 999, (i / 99 for i in count())),
    "called for": lambda: iter([1.0 + i / 99 for i in range(999)].pop, None),
}


@hostile(over=NUMBERS, told="data set.numbers")
def test_a_data_set_that_uses_up_what_it_holds(run, numbers):
    get = lambda data, i: (data.x[i] * next(data.numbers), data.y[i])  # noqa: E731
    trained(run, data=made(get, numbers=numbers()), epochs=5)


def by_its_own_generator(data, index):
    return torch.randn(6, generator=seeded(index)), data.y[index]


def remembering(data, index):
    """Remember what it had last, and give the same all the same."""
    data.seen.append(index)
    if index // 4 != data.last:
        data.last, data.of_last = index // 4, data.x[index // 4 * 4 :][:4]
    return data.of_last[index % 4], data.y[index]


def forgetful(data, index):
    """Keep the last few samples."""
    if index not in data.kept:
        data.kept[index] = (data.x[index] * 2, data.y[index])
    sample = data.kept[index]
    while len(data.kept) > 5:
        del data.kept[next(iter(data.kept))]
    return sample


def ringed(data, index):
    """Give out memory of its own in turns, and throw dice for nothing."""
    data.turn += 1
    data.log.append((index, data.dice.random()))
    return data.ring[data.turn % 8].copy_(data.x[index]), data.y[index]


class Closing(Pairs):
    """Closes what it holds when it goes, and has a function of any other name."""

    def __init__(self):
        super().__init__()
        self.open = [True]

    def __getitem__(self, index):
        assert self.open[0], "the file is closed"
        return super().__getitem__(index)

    def __getattr__(self, name):
        return super().__getattribute__(name) if name.startswith("__") else print

    def __del__(self):
        self.open[0] = False


DECIDING_NOTHING = {
    "what it had last": lambda: made(remembering, seen=[], last=-1),
    "the last few samples": lambda: made(forgetful, kept={}),
    "a generator for each sample": lambda: made(by_its_own_generator),
    "a file that it closes": Closing,
    "a ring of memory": lambda: made(
        ringed, ring=torch.zeros(8, 6), turn=0, log=[], dice=np.random.default_rng(0)
    ),
}


@hostile(over=DECIDING_NOTHING, cases=3, silent=True)
def test_a_data_set_with_a_state_that_decides_nothing_is_served(run, make):
    trained(run, data=make(), epochs=4, shuffle=True)


TELLING = {
    "its class": lambda data, epoch: setattr(type(data), "epoch", epoch),
    "a table": lambda data, epoch: TABLE.update(factor=1.0, epoch=epoch),
    "the data set": lambda data, epoch: data.set_epoch(epoch),
}


@hostile(over=TELLING, silent=True)
def test_an_epoch_that_a_data_set_is_told_and_does_not_read_changes_nothing(run, tell):
    data = made(lambda d, i: (d.x[i] * TABLE["factor"], d.y[i]))
    trained(run, data=data, epochs=4, each_epoch=lambda model, epoch: tell(data, epoch))


class Labelled(Pairs):
    """Labels its samples by a model."""

    model = None

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        with torch.no_grad():
            return (x, y) if self.model is None else (x, self.model(x[None])[0].argmax())


class Labelling:
    """Collates, and labels by a model."""

    def __init__(self, model, labels):
        self.model, self.labels = model, labels

    def __call__(self, samples):
        x, y = default_collate(samples)
        with torch.no_grad():
            return x, self.model(x).argmax(1) if self.labels else y


@pytest.mark.usefixtures("_looked_at_rarely")
@hostile(cases=2)
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("where", ["data set", "collate_fn"])
def test_labels_by_a_model_that_trains_are_those_of_now(run, where, follows):
    """By the very model, or by a copy that moves late."""
    model = run.freeze(Net())
    teacher, data = copy.deepcopy(model) if follows else model, Labelled()
    data.model = teacher if where == "data set" else None
    kwargs = {} if data.model else {"collate_fn": Labelling(teacher, True)}
    late = lambda n: follows and n > 18 and nn.init.normal_(teacher.head.weight)  # noqa: E731
    run.fit(model, run.loader(data, **kwargs), 8, each_step=late)


@hostile(silent=True)
@pytest.mark.parametrize("where", ["data set", "collate_fn"])
def test_a_model_that_trains_and_labels_nothing_is_no_data(run, where):
    model, data = run.freeze(Net()), Pairs()
    data.model = model if where == "data set" else None
    run.fit(model, run.loader(data, collate_fn=Labelling(model, False)), 5)


def padded(value):
    """Return a net whose head leaves out zeros, and a collate function that pads with a value."""
    seen = lambda m, x: m.back((m.front(x) * (x != 0)).sum(1) / (x != 0).sum(1))  # noqa: E731

    def collate(samples):
        x, *others = zip(*samples, strict=True)
        x = nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=value[0])
        return x, *map(torch.stack, others)

    return {"model": net(early=nn.Linear(1, 8), forward=seen), "collate_fn": collate}


@hostile(served=True)
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("workers", "midway", "pads"), [(0, 0, True), (0, 0, False), (2, 0, False), (0, 1, False)]
)
def test_what_the_front_does_not_read_may_change_in_every_epoch(run, workers, midway, pads):
    x = lambda d, i: d.x[i, : 3 + i % 4, None] if pads else d.x[i]  # noqa: E731
    data = made(lambda d, i: (x(d, i), d.y[i], d.weights[i]), weights=torch.ones(24))

    def loss(model, batch):
        value = cross_entropy(model, batch[:2]) * batch[2].mean()
        data.weights.mul_(0.9 if midway else 1.0)
        return value

    each_epoch = lambda model, epoch: data.weights.mul_(1.0 if midway else 0.9)  # noqa: E731
    kwargs = padded([0.0]) if pads else {"num_workers": workers}
    trained(run, loss, data=data, epochs=8, each_epoch=each_epoch, **kwargs)


@hostile
def test_another_value_that_pads_is_another_padding(run):
    value, data = [0.0], made(lambda d, i: (d.x[i, : 3 + i % 4, None], d.y[i]))
    each_epoch = lambda model, epoch: value.__setitem__(0, float(epoch > 3))  # noqa: E731
    trained(run, data=data, epochs=8, each_epoch=each_epoch, **padded(value))


@hostile(told="changes again and again")
def test_a_setting_out_of_the_data_set_may_change_in_every_epoch(run):
    setting = Scale()
    model, data = run.freeze(Net()), made(lambda d, i: (d.x[i] * setting.factor, d.y[i]))
    each_epoch = lambda epoch: setattr(setting, "factor", 1.0 + max(0, epoch - 1))  # noqa: E731
    run.fit(model, run.loader(data), 8, each_epoch=each_epoch)
