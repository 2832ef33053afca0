"""Batches whose memory is used again, whose structure acts, or whose rows are chosen."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from tests.hostile.harness import hostile
from tests.hostile.loops import numbered, trained
from tests.hostile.nets import NUM_SAMPLES, Net, inputs, labels, rows

# ---- buffers that are used again --------------------------------------------------------------


class Buffered:
    """A collate function that fills the same memory for every batch."""

    def __init__(self, through_numpy=False):
        self.x, self.y = torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)
        self.through_numpy = through_numpy

    def __call__(self, samples):
        for i, (x, y) in enumerate(samples):
            if self.through_numpy:
                self.x.numpy()[i], self.y.numpy()[i] = x.numpy(), y.item()
            else:
                self.x[i], self.y[i] = x, y
        return self.x[: len(samples)], self.y[: len(samples)]


@hostile
@pytest.mark.parametrize("through_numpy", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_collate_function_may_use_its_buffer_again(run, through_numpy, shuffle):
    trained(
        run, lambda m, b: F.cross_entropy(m(b[0]), b[1]), collate_fn=Buffered(through_numpy),
        shuffle=shuffle,
    )  # fmt: skip


@hostile
def test_a_collate_function_may_give_the_same_dict_every_time(run):
    shell = {}

    def collate(samples):
        shell["x"], shell["y"] = default_collate(samples)
        return shell

    trained(run, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), collate_fn=collate)


@hostile
def test_a_shared_dict_may_be_added_to_by_the_loop(run):
    shell = {"meta": {"seen": 0}}

    def collate(samples):
        shell["x"], shell["y"] = default_collate(samples)
        return shell

    def loss(model, batch):
        batch["meta"]["seen"] += 1
        run.see(batch["meta"]["seen"])
        return F.cross_entropy(model(batch["x"]), batch["y"])

    trained(run, loss, collate_fn=collate)


@hostile
def test_a_data_set_may_give_views_of_one_buffer(run):
    class Views(Dataset):
        def __init__(self):
            self.buffer = torch.zeros(6)

        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, index):
            self.buffer.copy_(inputs()[index])
            return self.buffer.clone(), labels()[index]

    trained(run, lambda m, b: F.cross_entropy(m(b[0]), b[1]), data=Views())


# ---- structures whose constructors act --------------------------------------------------------


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor
    y: torch.Tensor
    num_made: int = 0

    def __post_init__(self):
        self.x = self.x * 2
        self.num_made += 1


class Doubling(NamedTuple("Doubling", [("x", torch.Tensor), ("y", torch.Tensor)])):
    def __new__(cls, x, y):
        return super().__new__(cls, x * 2, y)


class Dropping(collections.UserDict):
    """A mapping that changes what is put into it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2 if key == "x" else value)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    extra: str = dataclasses.field(init=False, default="")

    def __post_init__(self):
        object.__setattr__(self, "extra", "made")


@dataclasses.dataclass
class Keyed:
    x: torch.Tensor
    y: torch.Tensor
    where: dataclasses.InitVar[int] = 3

    def __post_init__(self, where):
        self.x = self.x + where


class Attributed(dict):
    """A mapping with attributes beside its items."""

    def __init__(self, **items):
        super().__init__(items)
        self.size = len(items["y"])

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


@hostile
@pytest.mark.parametrize(
    "kind", [Scaled, Doubling, Frozen, Keyed, Attributed], ids=lambda kind: kind.__name__
)
def test_a_structure_is_made_once(run, kind):
    def collate(samples):
        x, y = default_collate(samples)
        return kind(x=x, y=y)

    def loss(model, batch):
        assert type(batch) is kind
        run.see(getattr(batch, "num_made", 0))
        run.see(getattr(batch, "extra", "none"))
        return F.cross_entropy(model(batch.x), batch.y)

    trained(run, loss, collate_fn=collate)


@hostile
def test_a_mapping_that_changes_what_it_is_given_does_so_once(run):
    def collate(samples):
        x, y = default_collate(samples)
        return Dropping(x=x, y=y)

    trained(run, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), collate_fn=collate)


@hostile
def test_a_default_dict_stays_one(run):
    def collate(samples):
        x, y = default_collate(samples)
        return collections.defaultdict(lambda: torch.ones(()), x=x, y=y)

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"]) * batch["weight"]

    trained(run, loss, collate_fn=collate)


@hostile
def test_two_leaves_that_share_their_memory_go_on_sharing_it(run):
    def collate(samples):
        x, y = default_collate(samples)
        return {"x": x, "same": x, "y": y}

    def loss(model, batch):
        batch["same"].mul_(2)
        return F.cross_entropy(model(batch["x"]), batch["y"])

    trained(run, loss, collate_fn=collate)


@hostile
def test_a_batch_kept_and_used_again_is_what_it_was(run):
    """The first batch is kept, and trained on once more in every epoch."""
    kept = []

    def loss(model, batch):
        if not kept:
            kept.append(batch)
        return F.cross_entropy(model(batch[0]), batch[1]) + F.cross_entropy(
            model(kept[0][0]), kept[0][1]
        )

    trained(run, loss)


@hostile
def test_a_whole_epoch_of_batches_kept_is_what_it_was(run):
    model = run.freeze(Net())
    loader = run.loader(rows())
    for _ in range(3):
        batches = list(loader)
        run.fit(model, batches, 2)


@hostile
def test_rows_dropped_from_a_batch_are_dropped(run):
    """Only the samples that are hard are trained on."""

    def loss(model, x, y, step):
        keep = x[:, 0] > 0
        return F.cross_entropy(model(x[keep]), y[keep])

    trained(run, numbered(loss))


@hostile
def test_rows_in_another_order_are_in_that_order(run):
    def loss(model, x, y, step):
        order = torch.randperm(len(x))
        return F.cross_entropy(model(x[order]), y[order])

    trained(run, numbered(loss))


@hostile
def test_two_batches_joined_are_both(run):
    model = run.freeze(Net())
    loader = run.loader(rows())

    def pairs():
        iterator = iter(loader)
        for a, b in zip(iterator, iterator, strict=False):
            yield torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])

    for _ in range(3):
        run.fit(model, list(pairs()), 1)


@hostile
def test_inputs_and_labels_of_two_loaders_are_each_their_own(run):
    """Semi-supervised: one model, two loaders in step, joined in one call."""
    model = run.freeze(Net())
    labelled, other = run.loader(rows()), run.loader(rows(seed=9))
    for _ in range(3):
        batches = zip(labelled, other, strict=True)
        run.fit(model, [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in batches], 1)
