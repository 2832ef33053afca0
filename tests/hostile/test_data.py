"""The data set becomes another: in the middle of a run, and between two that share a directory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    default_collate,
)

from tests.hostile.harness import hostile
from tests.hostile.nets import Collate, Net, Pairs, Scale, inputs, labels, rows, seeded

# ---- in the middle of a run -------------------------------------------------------------------


def changing(run, dataset, change, *, epochs=3, at=1, **kwargs):
    """Train, and do something to the data set before one of the epochs."""
    model = run.freeze(Net())
    loader = run.loader(dataset, **kwargs)

    def each_epoch(epoch):
        if epoch == at:
            run.turn()
            change(loader)

    run.fit(model, loader, epochs, each_epoch=each_epoch)


def half():
    return Subset(rows(48), [*range(24)])


class Epochal(Pairs):
    """Data that hang on the epoch, as samplers' and curricula's do."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (1 + self.epoch), y


@hostile
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Pairs, lambda d: setattr(d, "transform", Scale(2))),
        (lambda: Pairs(transform=Scale()), lambda d: setattr(d, "transform", None)),
        (lambda: Pairs(transform=Scale()), lambda d: setattr(d, "transform", Scale(2))),
        (lambda: Pairs(transform=Scale()), lambda d: setattr(d.transform, "factor", 2.0)),
        (lambda: Pairs(transform=nn.Sequential()), lambda d: d.transform.append(nn.ReLU())),
        (Epochal, lambda d: d.set_epoch(1)),
        (Pairs, lambda d: setattr(d, "y", (d.y + 1) % 3)),
        (Pairs, lambda d: d.y.add_(1).remainder_(3)),
        (Pairs, lambda d: d.y.numpy().__setitem__(slice(0, 8), 0)),
        (Pairs, lambda d: d.x.mul_(2)),
        (Pairs, lambda d: setattr(d, "x", d.x * 2)),
        (rows, lambda d: setattr(d, "tensors", (d.tensors[0] * 2, d.tensors[1]))),
        (rows, lambda d: d.tensors[0].data.mul_(2)),
        (half, lambda d: setattr(d, "indices", [*range(24, 48)])),
        (half, lambda d: random.shuffle(d.indices)),
        (
            lambda: Subset(Pairs(), [*range(24)]),
            lambda d: setattr(d.dataset, "transform", Scale(2)),
        ),
        (
            lambda: ConcatDataset([Pairs(), Pairs()]),
            lambda d: setattr(d.datasets[1], "transform", Scale(2)),
        ),
        (
            lambda: ConcatDataset([rows(12), rows(12, 5)]),
            lambda d: d.datasets.__setitem__(1, rows(12, 7)),
        ),
        (lambda: StackDataset(inputs(), labels()), lambda d: d.datasets[0].mul_(2)),
    ],
    ids=[
        "a transform comes", "a transform goes", "another transform", "a transform's setting",
        "a module as a transform", "set_epoch", "labels replaced", "labels in place",
        "some labels through NumPy", "inputs in place", "inputs replaced", "tensors replaced",
        "tensors past their version", "indices replaced", "indices shuffled", "transform below",
        "transform of a part", "another part", "stacked",
    ],
)  # fmt: skip
def test_a_data_set_that_changes_between_epochs_is_read_again(run, make, change):
    changing(run, make(), lambda loader: change(loader.dataset))


@hostile
def test_set_epoch_before_every_epoch_gives_every_epochs_data(run):
    model = run.freeze(Net())
    loader = run.loader(Epochal())
    run.fit(model, loader, 4, each_epoch=lambda epoch: loader.dataset.set_epoch(epoch))


@hostile
def test_indices_drawn_anew_every_epoch_are_those_of_the_epoch(run):
    model = run.freeze(Net())
    data = Subset(rows(48), [*range(24)])
    loader = run.loader(data)

    def each_epoch(epoch):
        data.indices = torch.randperm(48, generator=seeded(epoch))[:24].tolist()

    run.fit(model, loader, 5, each_epoch=each_epoch)


@hostile
def test_pseudo_labels_made_anew_every_epoch_are_used(run):
    model = run.freeze(Net())
    data = Pairs()
    loader = run.loader(data)

    def relabel(epoch):
        model.eval()
        with torch.no_grad():
            data.y = model(data.x).argmax(1) if epoch else data.y

    run.fit(model, loader, 4, each_epoch=relabel)


@hostile
@pytest.mark.parametrize("what", ["labels", "inputs", "transform"])
def test_a_data_set_that_changes_in_the_middle_of_an_epoch_is_read_again(run, what):
    """From the next epoch on at the latest."""
    model = run.freeze(Net())
    data = Pairs(transform=Scale())
    loader = run.loader(data)

    def each_epoch(epoch):
        if epoch == 3:
            run.turn()

    def each_step(step):
        if step == 8:  # the last batch of the third epoch has been loaded
            if what == "labels":
                data.y = (data.y + 1) % 3
            elif what == "inputs":
                data.x.neg_()
            else:
                data.transform.factor = 2.0

    run.fit(model, loader, 5, each_step=each_step, each_epoch=each_epoch)


@hostile
def test_a_setting_of_the_collate_function_is_obeyed(run):
    collate = Collate()
    changing(run, rows(), lambda loader: setattr(collate, "scale", 2.0), collate_fn=collate)


@hostile
def test_another_collate_function_is_obeyed(run):
    def change(loader):
        loader.collate_fn = Collate(2.0)

    changing(run, rows(), change, collate_fn=Collate())


@hostile
def test_a_closure_of_the_collate_function_is_obeyed(run):
    scale = 1.0

    def collate(samples):
        x, y = default_collate(samples)
        return x * scale, y

    def change(loader):
        nonlocal scale
        scale = 2.0

    changing(run, rows(), change, collate_fn=collate)


@hostile
def test_difficulty_that_grows_with_each_epoch_is_that_of_the_epoch(run):
    class Noisy(Pairs):
        level = 0.0

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + self.level * torch.sin(torch.arange(6.0) + index), y

    model = run.freeze(Net())
    data = Noisy()
    run.fit(
        model, run.loader(data), 4, each_epoch=lambda epoch: setattr(data, "level", float(epoch))
    )
