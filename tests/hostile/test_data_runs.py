"""The data set, or the model, becomes another between two runs that share a directory."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from tests.hostile.harness import hostile
from tests.hostile.nets import Collate, Net, Pairs, Scale, inputs, labels, rows

# ---- in the middle of a run -------------------------------------------------------------------


# ---- between two runs -------------------------------------------------------------------------

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

    def __init__(self, transform=None):
        super().__init__(LONG)
        self.hidden = HIDDEN
        self.transform = transform

    def __getitem__(self, index):
        x, y = self.x[index], self.y[index]
        if index in self.hidden and self.transform is not None:
            x = self.transform(x)
        return x, y


def partial_scale(factor):
    return functools.partial(scale_default, factor=factor)


class ArrayScale(Scale):
    def __call__(self, x):
        return x * torch.from_numpy(self.factor)


def double(x):
    return 2 * x


def scale_by(factor):
    return lambda x: x * factor


def scale_default(x, factor=1.0):
    return x * factor


def scale_default_two(x, factor=2.0):
    return x * factor


scale_default_two.__code__ = scale_default.__code__


@hostile
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, double),
        (Scale(1.0), Scale(2.0)),
        (scale_by(1.0), scale_by(2.0)),
        (scale_default, scale_default_two),
        (partial_scale(1.0), partial_scale(2.0)),
        ([Scale(1.0)], [Scale(2.0)]),
        (nn.Sequential(nn.Identity()), nn.Sequential(nn.ReLU())),
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.9)),
        (nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6).requires_grad_(False)),
        (Scale(torch.ones(6)), Scale(torch.zeros(6))),
        (ArrayScale(np.ones(6, np.float32)), ArrayScale(np.zeros(6, np.float32))),
    ],
    ids=["none", "object", "closure", "defaults", "partial", "list", "modules", "slope", "weights",
         "tensor", "array"],
)  # fmt: skip
def test_another_transform_in_a_second_run_is_other_data(run, one, other):
    def composed(transforms):
        if not isinstance(transforms, list):
            return transforms
        compose = Compose()
        compose.transforms = transforms
        return compose

    two_runs(run, Hidden(composed(one)), Hidden(composed(other)))


class Compose:
    transforms = ()

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


def relabelled(y):
    y = y.clone()
    y[HIDDEN] = (y[HIDDEN] + 1) % 3
    return y


class Arrays(Dataset):
    """Data as people keep it: arrays, lists, tables, files."""

    def __init__(self, y, files=None):
        self.x, self.y, self.files = inputs(LONG), y, files

    def __len__(self):
        return LONG

    def __getitem__(self, index):
        y = self.y[index] if self.files is None else int(Path(self.files[index]).stem)
        return self.x[index], torch.as_tensor(y)


@hostile
@pytest.mark.parametrize(
    "kind", ["tensor", "array", "list", "dict", "files", "tuple", "TensorDataset"]
)
def test_labels_corrected_between_two_runs_are_the_corrected_ones(run, kind):
    make = {
        "tensor": Arrays,
        "array": lambda y: Arrays(y.numpy()),
        "list": lambda y: Arrays(y.tolist()),
        "tuple": lambda y: Arrays(tuple(y.tolist())),
        "dict": lambda y: Arrays(dict(enumerate(y.tolist()))),
        "files": lambda y: Arrays(None, [f"data/{i}/{label}.txt" for i, label in enumerate(y)]),
        "TensorDataset": lambda y: TensorDataset(inputs(LONG), y),
    }[kind]
    two_runs(run, make(labels(LONG)), make(relabelled(labels(LONG))))


class HuggingFace(Dataset):
    """As `datasets.Dataset`: a table out of sight, and a fingerprint with a leading underscore."""

    __slots__ = ("_data", "_fingerprint")

    def __init__(self, y, fingerprint):
        self._fingerprint = fingerprint
        self._data = Table(y)

    def __len__(self):
        return LONG

    def __getitem__(self, index):
        return self._data.row(index)


class Table:
    """Stands for an Arrow table: nothing of it can be read from outside."""

    __slots__ = ("row",)

    def __init__(self, y):
        x = inputs(LONG)
        self.row = {i: (x[i], y[i]) for i in range(LONG)}.__getitem__


@hostile
def test_a_table_with_another_fingerprint_is_another(run):
    two_runs(run, HuggingFace(labels(LONG), "a1"), HuggingFace(relabelled(labels(LONG)), "b2"))


@hostile
@pytest.mark.parametrize("kind", ["tensor", "array", "list", "method", "dict"])
def test_a_fingerprint_of_any_kind_is_read_whole(run, kind):
    class Printed(Arrays):
        def __init__(self, y):
            super().__init__(y)
            print_of = torch.zeros(5000, dtype=torch.long)
            print_of[2500 : 2500 + LONG] = y
            self.fingerprint = {
                "tensor": lambda: print_of,
                "array": print_of.numpy,
                "list": print_of.tolist,
                "method": lambda: lambda: print_of,
                "dict": lambda: {"labels": print_of},
            }[kind]()

    two_runs(run, Printed(labels(LONG)), Printed(relabelled(labels(LONG))))


@hostile
@pytest.mark.parametrize("kind", ["Subset", "ConcatDataset", "nested", "array", "own"])
def test_other_indices_in_a_second_run_are_other_data(run, kind):
    """The same samples at the places that a glance meets, others between them."""

    class Own(Dataset):
        def __init__(self, data, chosen):
            self.data, self.chosen = data, chosen

        def __len__(self):
            return len(self.chosen)

        def __getitem__(self, index):
            return self.data[self.chosen[index]]

    data = rows(96)
    others = [i + 48 if i in HIDDEN else i for i in range(48)]

    def made(indices):
        return {
            "Subset": lambda: Subset(data, indices),
            "ConcatDataset": lambda: ConcatDataset(
                [Subset(data, indices[:20]), Subset(data, indices[20:])]
            ),
            "nested": lambda: Subset(Subset(data, indices), [*range(48)]),
            "array": lambda: Subset(data, np.array(indices)),
            "own": lambda: Own(data, indices),
        }[kind]()

    two_runs(run, made([*range(48)]), made(others))


def collate_with(scale):
    def collate(samples):
        x, y = default_collate(samples)
        return x * scale, y

    return collate


def collate_default(samples, scale=1.0):
    x, y = default_collate(samples)
    return x * scale, y


def collate_keyword(samples, *, scale=1.0):
    x, y = default_collate(samples)
    return x * scale, y


def with_defaults(function, scale):
    copy = type(function)(
        function.__code__, function.__globals__, function.__name__, (scale,), function.__closure__
    )
    copy.__kwdefaults__ = {"scale": scale} if function.__kwdefaults__ else None
    copy.__defaults__ = None if function.__kwdefaults__ else (scale,)
    return copy


@hostile
@pytest.mark.parametrize(
    "make",
    [
        Collate,
        collate_with,
        lambda scale: functools.partial(collate_default, scale=scale),
        lambda scale: with_defaults(collate_default, scale),
        lambda scale: with_defaults(collate_keyword, scale),
        lambda scale: Collate(scale).__call__,
        lambda scale: Collate(torch.full((6,), scale)),
        lambda scale: functools.partial(Compose2(), transforms=[Scale(scale)]),
    ],
    ids=["object", "closure", "partial", "defaults", "keywords", "method", "tensor", "nested"],
)
def test_another_collate_function_in_a_second_run_gives_other_data(run, make):
    data = Hidden()
    two_runs(run, data, data, collates=(make(1.0), make(2.0)))


class Compose2:
    def __call__(self, samples, transforms):
        x, y = default_collate(samples)
        for transform in transforms:
            x = transform(x)
        return x, y


@hostile
@pytest.mark.parametrize("where", ["__getitem__", "helper"])
def test_a_data_set_whose_code_changed_is_another(run, where):
    def made(version):
        class Coded(Hidden):
            def __getitem__(self, index):
                x, y = super().__getitem__(index)
                return (self.load(x) if index in self.hidden else x), y

            def load(self, x):
                return x

        if version == 2 and where == "helper":
            Coded.load = lambda self, x: x * 2
        elif version == 2:

            def getitem(self, index):
                x, y = Hidden.__getitem__(self, index)
                return (-x if index in self.hidden else x), y

            Coded.__getitem__ = getitem
        return Coded()

    two_runs(run, made(1), made(2))


# ---- the model between two runs ---------------------------------------------------------------


def coded(version, where):
    """Return a class of one name whose code is that of one version or another."""

    class Early(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x)

    class Coded(Net):
        def __init__(self):
            super().__init__()
            self.early = Early(6, 8)
            self.offset = 0.0

        def front(self, x):
            return self.middle(torch.tanh(self.early(x) * self.early.scale) + self.offset)

    def make():
        model = Coded()
        if version == 1:
            return model
        if where == "forward":
            Early.forward = lambda self, x: -F.linear(x, self.weight, self.bias)
        elif where == "around":
            Coded.front = lambda self, x: self.middle(torch.relu(self.early(x)))
        elif where == "attribute":
            model.early.scale = 2.0
        elif where == "attribute around":
            model.offset = 1.0
        elif where == "class attribute":
            Early.scale = 2.0
        elif where == "hook":
            model.early.register_forward_hook(lambda m, a, out: out * 2)
        elif where == "instance forward":
            model.early.forward = lambda x: F.linear(x, 2 * model.early.weight)
        return model

    return make


CODE = [
    "forward", "around", "attribute", "attribute around", "class attribute", "hook",
    "instance forward",
]  # fmt: skip


@hostile
@pytest.mark.parametrize(
    ("where", "interrupted"), [*((where, True) for where in CODE), ("forward", False)]
)
def test_a_front_whose_code_changed_between_two_runs_is_another(run, where, interrupted):
    data = rows(LONG)
    two_runs(run, data, data, interrupted=interrupted, make=(coded(1, where), coded(2, where)))


@hostile
@pytest.mark.parametrize("kind", ["Threshold", "eps", "stride"])
def test_a_front_of_other_settings_in_a_second_run_is_another(run, kind):
    def made(version):
        def make():
            model = Net()
            model.early = {
                "Threshold": lambda: nn.Sequential(nn.Linear(6, 8), nn.Threshold(0.1, version)),
                "eps": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, eps=version - 0.9)),
                "stride": lambda: nn.Sequential(
                    nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3, stride=version),
                    nn.AdaptiveAvgPool1d(4), nn.Flatten(),
                ),
            }[kind]()  # fmt: skip
            return model

        return make

    data = rows(LONG)
    two_runs(run, data, data, make=(made(1), made(2)))


# ---- and what is the same is found again ------------------------------------------------------


@hostile(served=True)
@pytest.mark.parametrize("kind", ["tensors", "pairs", "subset", "transform", "collate"])
def test_a_second_run_over_the_same_is_served_at_once(run, kind):
    def made():
        return {
            "tensors": lambda: rows(LONG),
            "pairs": lambda: Pairs(LONG),
            "subset": lambda: Subset(rows(LONG), [*range(LONG)]),
            "transform": lambda: Pairs(LONG, Scale(2.0)),
            "collate": lambda: rows(LONG),
        }[kind]()

    collate = (lambda: Collate(2.0)) if kind == "collate" else (lambda: None)
    session(run, made(), collate_fn=collate())
    session(run, made(), epochs=1, collate_fn=collate())


@hostile(served=True)
def test_a_run_that_was_interrupted_goes_on_with_what_it_stored(run):
    session(run, rows(LONG), order=FIRST_HALF, epochs=1)
    session(run, rows(LONG), order=WHOLE, epochs=1)
