"""The data set, or the model, becomes another between two runs that share a directory.

What tells data sets and collate functions apart, kind by kind: `samples/test_fingerprint.py`.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from tests.hostile.harness import hostile
from tests.hostile.nets import Collate, Net, Pairs, Scale, inputs, labels, made, net, rows

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


def two_runs(run, one, other, *, interrupted=True, make=(Net, Net)):
    """Train twice in one directory. Interrupted: the second run's first batch is new to it."""
    order = FIRST_HALF if interrupted else WHOLE
    session(run, one, order=order, make=make[0])
    run.turn()
    session(run, other, order=WHOLE, make=make[1])


def hidden(transform):
    """Return a data set of which only samples that a glance does not meet are transformed."""
    get = lambda d, i: (d.transform(d.x[i]) if i in HIDDEN else d.x[i], d.y[i])  # noqa: E731
    return made(get, LONG, transform=transform)


def relabelled():
    y = labels(LONG)
    y[HIDDEN] = (y[HIDDEN] + 1) % 3
    return y


OTHERS = {
    "a transform's setting": lambda: (hidden(Scale(1.0)), hidden(Scale(2.0))),
    "a module as a transform": lambda: (
        hidden(nn.LeakyReLU(0.1)), hidden(nn.LeakyReLU(0.9)),
    ),
    "weights of a transform": lambda: (
        hidden(nn.Linear(6, 6).requires_grad_(False)), hidden(nn.Linear(6, 6).requires_grad_(False))
    ),
    "labels": lambda: [TensorDataset(inputs(LONG), y) for y in (labels(LONG), relabelled())],
    "indices": lambda: [
        Subset(rows(96), [i + shift if i in HIDDEN else i for i in range(48)]) for shift in (0, 48)
    ],
}  # fmt: skip


@hostile(over=OTHERS, cases=4)
def test_other_data_in_a_second_run_are_other_data(run, make):
    two_runs(run, *make())


# ---- the model between two runs ---------------------------------------------------------------


def doubled_hook(model):
    model.early.register_forward_hook(lambda m, a, out: out * 2)


def with_early(make):
    def change(model):
        model.early = make()
        model.early.scale = 1.0

    return change


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
    "class attribute": (None, lambda m: setattr(type(m.early), "scale", 2.0)),
    "hook": (None, doubled_hook),
    "eps": (with_early(normed(0.1)), with_early(normed(1.1))),
}  # fmt: skip


def changed_by(change):
    """Return what makes a model whose code has one name, whatever becomes of it."""

    def make():
        early = type("Early", (nn.Linear,), {"forward": lambda s, x: F.linear(x, s.weight)})
        early.scale = 1.0
        front = lambda m, x: m.middle(torch.tanh(m.early(x) * m.early.scale))  # noqa: E731
        model = net(front=front, early=early(6, 8))
        if change is not None:
            change(model)
        return model

    return make


INTERRUPTED = {where: (*changes, True) for where, changes in FRONTS.items()}


@hostile(over=INTERRUPTED | {"forward, in a whole run": (*FRONTS["forward"], False)}, cases=4)
def test_a_front_that_changed_between_two_runs_is_another(run, one, other, interrupted):
    make = changed_by(one), changed_by(other)
    two_runs(run, rows(LONG), rows(LONG), interrupted=interrupted, make=make)


# ---- and what is the same is found again ------------------------------------------------------

SAME = {
    "tensors": lambda: {"dataset": rows(LONG)},
    "a subset": lambda: {"dataset": Subset(rows(LONG), [*range(LONG)])},
    "a transform": lambda: {"dataset": Pairs(LONG, Scale(2.0))},
    "a collate function": lambda: {"dataset": Pairs(LONG), "collate_fn": Collate(2.0)},
}


@hostile(over=SAME, served=True)
def test_a_second_run_over_the_same_is_served_at_once(run, make):
    session(run, **make())
    session(run, **make(), epochs=1)


@hostile(served=True)
def test_a_run_that_was_interrupted_goes_on_with_what_it_stored(run):
    session(run, rows(LONG), order=FIRST_HALF, epochs=1)
    session(run, rows(LONG), order=WHOLE, epochs=1)
