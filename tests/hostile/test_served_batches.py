"""Batches and labels of any kind are served."""

from __future__ import annotations

import collections
import dataclasses
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import StackDataset, TensorDataset, default_collate

from tests.hostile.harness import hostile
from tests.hostile.loops import trained
from tests.hostile.nets import (
    Net,
    Pairs,
    Tokens,
    inputs,
    labels,
    sentences,
)

# ---- what the loop does to its inputs ---------------------------------------------------------


# ---- kinds of batches -------------------------------------------------------------------------


class Encoding(collections.UserDict):
    """As `transformers.BatchEncoding`: a mapping with attributes, and a `to`."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, *args, **kwargs):
        self.data = {key: value.to(*args, **kwargs) for key, value in self.data.items()}
        return self


class Holder:
    """A batch that is an object of no particular kind, as PyG's."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return Holder(self.x.to(device), self.y.to(device))


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


Point = collections.namedtuple("Point", "x y")

KINDS = {
    "mapping": lambda x, y: Encoding({"x": x, "y": y}),
    "object": Holder,
    "dataclass": Example,
    "named tuple": Point,
    "namespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "list": lambda x, y: [x, y],
    "nested": lambda x, y: {"inputs": {"x": x}, "targets": (y, [y])},
}


def read(batch):
    if isinstance(batch, dict) and "inputs" in batch:
        return batch["inputs"]["x"], batch["targets"][0]
    if isinstance(batch, list):
        return batch
    if isinstance(batch, collections.OrderedDict):
        return batch["x"], batch["y"]
    return batch.x, batch.y


@hostile(served=True)
@pytest.mark.parametrize("whole", [False, True], ids=["taken apart", "given whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_kind_are_served(run, kind, whole):
    class Whole(Net):
        def forward(self, batch):
            return super().forward(read(batch)[0] if whole else batch)

    def collate(samples):
        return KINDS[kind](*default_collate(samples))

    def loss(model, batch):
        x, y = read(batch)
        return F.cross_entropy(model(batch if whole else x), y)

    trained(run, loss, model=Whole(), collate_fn=collate)


@hostile(served=True)
@pytest.mark.parametrize("how", ["to", "unpacked"])
def test_an_encoding_is_moved_and_unpacked(run, how):
    class Keywords(Net):
        def forward(self, x, y=None):
            out = super().forward(x)
            return F.cross_entropy(out, y)

    def loss(model, batch):
        return model(**(batch.to("cpu") if how == "to" else batch))

    trained(
        run, loss, model=Keywords(),
        collate_fn=lambda s: Encoding(dict(zip("xy", default_collate(s), strict=True))),
    )  # fmt: skip


def put(batch, name, value):
    if isinstance(batch, Holder | types.SimpleNamespace):
        setattr(batch, name, value)
    else:
        batch[name] = value


def put_in(batch, name, value):
    put(batch, name, value)
    return batch


CHANGING = {
    "returned": lambda batch, front, out: put_in(batch, "out", out),
    "left behind": lambda batch, front, out: put(batch, "out", out),
    "an input replaced": lambda batch, front, out: put_in(put_in(batch, "x", out * 2), "out", out),
    "what is skipped": lambda batch, front, out: put_in(put_in(batch, "front", front), "out", out),
    "in another container": lambda batch, front, out: (put_in(batch, "out", out), {"again": batch}),
    "an inner list": lambda batch, front, out: put(batch, "out", [out, [out]]),
}


@hostile(served=True)
@pytest.mark.parametrize("kind", ["dict", "mapping", "object", "namespace"])
@pytest.mark.parametrize("how", CHANGING)
def test_a_model_may_leave_its_results_in_the_batch(run, how, kind):
    """As sentence encoders do: each part reads the batch, and puts what it makes into it."""

    class Whole(Net):
        def forward(self, batch):
            x = batch["x"] if kind in ("dict", "mapping") else batch.x
            front = self.front(x)
            return CHANGING[how](batch, front, self.back(front))

    def collate(samples):
        x, y = default_collate(samples)
        return {"x": x, "y": y} if kind == "dict" else KINDS[kind](x, y)

    def loss(model, batch):
        returned = model(batch)
        found = batch if kind == "dict" else vars(batch).get("data", vars(batch))
        run.see(sorted(found))
        run.see(returned is batch)
        out = found["out"][1][0] if how == "an inner list" else found["out"]
        for name in ("front", "x"):
            run.see(found.get(name, out).detach().clone())
        return F.cross_entropy(out, found["y"])

    trained(run, loss, model=Whole(), collate_fn=collate)


EXTRA = {
    "count": len,
    "number": lambda s: 0.5,
    "scalar tensor": lambda s: torch.tensor(len(s)),
    "text": lambda s: "train",
    "None": lambda s: None,
    "class weights": lambda s: torch.tensor([0.1, 0.2, 0.3]),
    "nested": lambda s: {"epoch": 1, "names": ["a"] * len(s)},
    "names": lambda s: [f"row {i}" for i in range(len(s))],
    "positions": lambda s: torch.arange(len(s)),
}


def with_extra(run, kind, whole):
    class Whole(Net):
        def forward(self, batch):
            return super().forward(batch["x"] if whole else batch)

    def collate(samples):
        x, y = default_collate(samples)
        return {"x": x, "y": y, "extra": EXTRA[kind](samples)}

    def loss(model, batch):
        if not isinstance(batch["extra"], dict | list):
            run.see(batch["extra"])
        return F.cross_entropy(model(batch if whole else batch["x"]), batch["y"])

    trained(run, loss, model=Whole(), collate_fn=collate)


@hostile(served=True)
@pytest.mark.parametrize("kind", [*EXTRA][:-2])
def test_a_batch_may_hold_more_than_rows(run, kind):
    with_extra(run, kind, whole=False)


@hostile(served=True)
@pytest.mark.parametrize("kind", ["count", "text", "nested"])
def test_a_batch_given_whole_may_hold_more_than_rows(run, kind):
    with_extra(run, kind, whole=True)


@hostile
@pytest.mark.parametrize("kind", ["names", "positions"])
def test_what_counts_the_places_of_a_batch_is_served_or_told(run, kind):
    with_extra(run, kind, whole=False)


@hostile(served=True)
def test_names_from_the_data_set_are_strings_of_the_batch(run):
    class Named(Pairs):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"x": x, "y": y, "name": f"image {index}"}

    def loss(model, batch):
        run.see(batch["name"][0])
        return F.cross_entropy(model(batch["x"]), batch["y"])

    trained(run, loss, data=Named())


class Sequences(nn.Module):
    """Time first, as recurrent networks have it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.GRU(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        return self.head(h.mean(0))


@hostile(served=True)
@pytest.mark.parametrize("how", ["collate", "loop"])
@pytest.mark.parametrize("boundary", ["embed", "rnn"])
def test_batches_with_time_first_are_served(run, how, boundary):
    def collate(samples):
        x, y = default_collate(samples)
        return (x.t().contiguous() if how == "collate" else x), y

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x if how == "collate" else x.t()), y)

    trained(run, loss, model=Sequences(), data=sentences(), boundary=boundary, collate_fn=collate)


@hostile(served=True)
@pytest.mark.parametrize("where", ["collate", "model"])
def test_masks_of_padded_sentences_are_served(run, where):
    masked(run, where)


@hostile
def test_masks_of_padded_sentences_made_by_the_loop_are_served_or_told(run):
    masked(run, "loop")


def masked(run, where):
    class Masking(Tokens):
        def forward(self, tokens, mask=None):
            return super().forward(tokens, (tokens == 0) if where == "model" else mask)

    def collate(samples):
        x, y = default_collate(samples)
        return {"tokens": x, "y": y, **({"mask": x == 0} if where == "collate" else {})}

    def loss(model, batch):
        mask = batch["tokens"] == 0 if where == "loop" else batch.get("mask")
        return F.cross_entropy(model(batch["tokens"], mask), batch["y"])

    tokens, y = sentences().tensors
    tokens[:, 0] = 1 + tokens[:, 0] % 10
    trained(
        run, loss, model=Masking(), data=TensorDataset(tokens, y), boundary="block",
        collate_fn=collate,
    )  # fmt: skip


# ---- labels -----------------------------------------------------------------------------------


@hostile(served=True)
@pytest.mark.parametrize(
    "relabel",
    [
        lambda y: y - 1,
        lambda y: y.sub_(1),
        lambda y: y.clone().add_(0) - 1,
        lambda y: F.one_hot(y - 1, 3).float() * 0.9 + 0.1 / 3,
        lambda y: (y - 1).long(),
        lambda y: torch.where(y > 1, y - 1, 0),
        lambda y: (y - 1)[:, None].squeeze(1),
    ],
    ids=["shifted", "in place", "cloned", "smoothed", "cast", "where", "reshaped"],
)
def test_labels_prepared_by_the_loop_are_served(run, relabel):
    trained(
        run, lambda m, b: F.cross_entropy(m(b[0]), relabel(b[1])),
        data=TensorDataset(inputs(), labels() + 1),
    )  # fmt: skip


@hostile(served=True)
def test_several_targets_are_served(run):
    data = StackDataset(x=inputs(), y=labels(), z=inputs(seed=5), weight=labels(seed=6) + 1.0)

    def loss(model, batch):
        out = model(batch["x"])
        each = F.cross_entropy(out, batch["y"], reduction="none") * batch["weight"]
        return each.mean() + F.mse_loss(out, batch["z"][:, :3])

    trained(run, loss, data=data)


@hostile(served=True)
def test_input_and_target_of_an_autoencoder_are_one_tensor(run):
    class Auto(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 6)

    trained(run, lambda m, x: F.mse_loss(m(x[0]), x[0]), model=Auto(), data=TensorDataset(inputs()))
