"""The data set, or the model, becomes another between two runs that share a directory.

What tells data sets and collate functions apart, kind by kind: `samples/test_fingerprint.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from tests.hostile.harness import hostile
from tests.hostile.nets import Collate, Net, Pairs, Scale, inputs, labels, net, rows

LONG = 48
SAMPLED = np.unique(np.linspace(0, LONG - 1, 32).astype(int)).tolist()
HIDDEN = [i for i in range(LONG) if i not in SAMPLED]
"""Samples that a glance at 32 of the 48 does not meet."""


def session(run, dataset, *, make=Net, epochs=3, order=None, **kwargs):
    """Train a model from the same seed: what another process would do."""
    torch.manual_seed(7)
    model = run.freeze(make())
    if order is not None:
        kwargs["batch_sampler"] = order
    run.fit(model, run.loader(dataset, **kwargs), epochs)
    run.flush()


FIRST_HALF, WHOLE = ([[*range(i, i + 8)] for i in range(start, LONG, 8)] for start in (8, 0))


def two_runs(run, one, other, *, collates=(None, None), interrupted=True, make=(Net, Net)):
    """Train twice in one directory. Interrupted: the second run's first batch is new to it."""
    session(
        run, one, order=FIRST_HALF if interrupted else WHOLE, collate_fn=collates[0], make=make[0]
    )
    run.turn()
    session(run, other, order=WHOLE, collate_fn=collates[1], make=make[1])


class Hidden(Pairs):
    """Only samples that a glance does not meet are transformed."""

    def __init__(self, transform):
        super().__init__(LONG)
        self.transform = transform

    def __getitem__(self, index):
        return (self.transform if index in HIDDEN else lambda x: x)(self.x[index]), self.y[index]


def scale_by(factor):
    return lambda x: x * factor


class Arrays(Dataset):
    """Data as people keep it: arrays, lists, tables, files."""

    def __init__(self, y, files=None):
        self.x, self.y, self.files = inputs(LONG), y, files

    def __len__(self):
        return LONG

    def __getitem__(self, index):
        y = self.y[index] if self.files is None else int(Path(self.files[index]).stem)
        return self.x[index], torch.as_tensor(y)


class HuggingFace(Dataset):
    """As `datasets.Dataset`: a table out of sight, and a fingerprint with a leading underscore."""

    __slots__ = ("_fingerprint", "row")

    def __init__(self, y, fingerprint):
        self._fingerprint, x = fingerprint, inputs(LONG)
        self.row = {i: (x[i], y[i]) for i in range(LONG)}.__getitem__

    def __len__(self):
        return LONG

    def __getitem__(self, index):
        return self.row(index)


class Printed(Arrays):
    """Has a fingerprint of its own, that is long."""

    def __init__(self, y):
        super().__init__(y)
        self.print_of = torch.zeros(5000, dtype=torch.long)
        self.print_of[2500 : 2500 + LONG] = y

    def fingerprint(self):
        return self.print_of


def relabelled():
    y = labels(LONG)
    y[HIDDEN] = (y[HIDDEN] + 1) % 3
    return y


def of_labels(make):
    return lambda: (make(labels(LONG)), make(relabelled()))


def files_of(y):
    return Arrays(None, [f"data/{i}/{label}.txt" for i, label in enumerate(y)])


OTHERS = {
    "a transform's setting": lambda: (Hidden(Scale(1.0)), Hidden(Scale(2.0))),
    "a transform's closure": lambda: (Hidden(scale_by(1.0)), Hidden(scale_by(2.0))),
    "a module as a transform": lambda: (
        Hidden(nn.LeakyReLU(0.1)), Hidden(nn.LeakyReLU(0.9)),
    ),
    "weights of a transform": lambda: (
        Hidden(nn.Linear(6, 6).requires_grad_(False)), Hidden(nn.Linear(6, 6).requires_grad_(False))
    ),
    "labels in a tensor": of_labels(Arrays),
    "labels in a list": of_labels(lambda y: Arrays(y.tolist())),
    "labels in names of files": of_labels(files_of),
    "labels of a TensorDataset": of_labels(lambda y: TensorDataset(inputs(LONG), y)),
    "a long fingerprint": of_labels(Printed),
    "a table with a fingerprint": lambda: (
        HuggingFace(labels(LONG), "a1"), HuggingFace(relabelled(), "b2"),
    ),
    "indices": lambda: [
        Subset(rows(96), [i + shift if i in HIDDEN else i for i in range(48)]) for shift in (0, 48)
    ],
}  # fmt: skip


@hostile
@pytest.mark.cases(4)
@pytest.mark.parametrize("what", OTHERS)
def test_other_data_in_a_second_run_are_other_data(run, what):
    two_runs(run, *OTHERS[what]())


@hostile
@pytest.mark.parametrize("make", [Collate, lambda scale: Collate(torch.full((6,), scale)).__call__])
def test_another_collate_function_in_a_second_run_gives_other_data(run, make):
    data = Pairs(LONG)
    two_runs(run, data, data, collates=(make(1.0), make(2.0)))


# ---- the model between two runs ---------------------------------------------------------------


def doubled_hook(model):
    model.early.register_forward_hook(lambda m, a, out: out * 2)


def own_forward(model):
    model.early.forward = lambda x: F.linear(x, 2 * model.early.weight)


def with_early(make):
    def change(model):
        model.early = make()
        model.early.scale = 1.0

    return change


def strided(stride):
    return lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3, stride=stride), nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
    )  # fmt: skip


def normed(eps):
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, eps=eps))


FRONTS = {
    "forward": (
        None, lambda m: setattr(type(m.early), "forward", lambda s, x: -F.linear(x, s.weight)),
    ),
    "around": (
        None, lambda m: setattr(type(m), "front", lambda s, x: s.middle(torch.relu(s.early(x)))),
    ),
    "attribute": (None, lambda m: setattr(m.early, "scale", 2.0)),
    "attribute around": (None, lambda m: setattr(m, "offset", 1.0)),
    "class attribute": (None, lambda m: setattr(type(m.early), "scale", 2.0)),
    "hook": (None, doubled_hook),
    "instance forward": (None, own_forward),
    "eps": (with_early(normed(0.1)), with_early(normed(1.1))),
    "stride": (with_early(strided(1)), with_early(strided(2))),
}  # fmt: skip


def changed_by(change):
    """Return what makes a model whose code has one name, whatever becomes of it."""

    def make():
        early = type("Early", (nn.Linear,), {"forward": lambda s, x: F.linear(x, s.weight)})
        early.scale = 1.0
        front = lambda m, x: m.middle(torch.tanh(m.early(x) * m.early.scale) + m.offset)  # noqa: E731
        model = net(front=front, early=early(6, 8), offset=0.0)
        if change is not None:
            change(model)
        return model

    return make


@hostile
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("where", "interrupted"), [*((where, True) for where in FRONTS), ("forward", False)]
)
def test_a_front_that_changed_between_two_runs_is_another(run, where, interrupted):
    make = tuple(changed_by(change) for change in FRONTS[where])
    two_runs(run, rows(LONG), rows(LONG), interrupted=interrupted, make=make)


# ---- and what is the same is found again ------------------------------------------------------

SAME = {
    "tensors": lambda: {"dataset": rows(LONG)},
    "a subset": lambda: {"dataset": Subset(rows(LONG), [*range(LONG)])},
    "a transform": lambda: {"dataset": Pairs(LONG, Scale(2.0))},
    "a collate function": lambda: {"dataset": Pairs(LONG), "collate_fn": Collate(2.0)},
}


@hostile(served=True)
@pytest.mark.parametrize("kind", SAME)
def test_a_second_run_over_the_same_is_served_at_once(run, kind):
    session(run, **SAME[kind]())
    session(run, **SAME[kind](), epochs=1)


@hostile(served=True)
def test_a_run_that_was_interrupted_goes_on_with_what_it_stored(run):
    session(run, rows(LONG), order=FIRST_HALF, epochs=1)
    session(run, rows(LONG), order=WHOLE, epochs=1)
