"""Batches of any kind, and whatever is done to them, pass as under plain PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from tests.hostile.harness import hostile
from tests.hostile.loops import trained
from tests.hostile.nets import NUM_SAMPLES, Net, Pairs, inputs, labels, rows, saved

# ---- gradients by the input -------------------------------------------------------------------


# ---- unusual batches --------------------------------------------------------------------------


class Labelled(torch.Tensor):
    """A subclass, as torchvision's `tv_tensors` are."""


def subclassed(samples):
    x, y = default_collate(samples)
    return x.as_subclass(Labelled), y


def jagged(samples):
    x = torch.nested.nested_tensor([s[0] for s in samples], layout=torch.jagged)
    return x, torch.stack([s[1] for s in samples])


def sparse(samples):
    x, y = default_collate(samples)
    return x.relu().to_sparse(), y


def csr(samples):
    x, y = default_collate(samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.relu().to_sparse_csr(), y


def quantised(samples):
    x, y = default_collate(samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), y


def half(samples):
    x, y = default_collate(samples)
    return x.bfloat16(), y


def complicated(samples):
    x, y = default_collate(samples)
    return torch.complex(x, -x), y


def to_dense(x):
    if x.is_nested:
        return torch.nested.to_padded_tensor(x, 0.0)
    if x.is_quantized:
        return x.dequantize()
    if x.is_complex():
        return x.real * 2 + x.imag
    return (x.to_dense() if x.layout != torch.strided else x).float()


@hostile
@pytest.mark.parametrize(
    "collate", [subclassed, jagged, sparse, csr, quantised, half, complicated],
    ids=lambda collate: collate.__name__,
)  # fmt: skip
@pytest.mark.parametrize("where", ["loop", "model"])
def test_tensors_of_any_kind_pass(run, collate, where):
    class Dense(Net):
        def forward(self, x):
            return super().forward(to_dense(x) if where == "model" else x)

    def loss(model, batch):
        x, y = batch
        run.see(type(x).__name__ if collate is subclassed else "Tensor")
        return F.cross_entropy(model(x if where == "model" else to_dense(x)), y)

    trained(run, loss, model=Dense(), collate_fn=collate)


@hostile
def test_rows_padded_to_the_longest_of_their_batch_pass(run):
    class Ragged(Dataset):
        def __len__(self):
            return NUM_SAMPLES

        def __getitems__(self, indices):
            longest = max(2 + i % 4 for i in indices)
            return [
                (F.pad(inputs()[i, : 2 + i % 4], (0, longest - 2 - i % 4)), labels()[i])
                for i in indices
            ]

    class Padding(Net):
        def forward(self, x):
            return super().forward(F.pad(x, (0, 6 - x.shape[1])))

    trained(run, model=Padding(), data=Ragged(), shuffle=True)


@hostile
@pytest.mark.parametrize("kind", ["string", "number", "property", "list"])
def test_an_attribute_named_sample_id_is_the_data_sets_own(run, kind):
    class Named(Pairs):
        pass

    if kind == "property":
        Named.sample_id = property(lambda self: "mine")
        Named.sample_version = property(lambda self: 3)
    else:
        value = {"string": "mine", "number": 7, "list": ["a"] * NUM_SAMPLES}[kind]
        Named.sample_id = Named.sample_version = value
    trained(run, data=Named())


@hostile
@pytest.mark.parametrize(
    "key",
    [
        lambda i: (float(i), 0.5), lambda i: f"rows/{i}.txt", lambda i: (i, "left"),
        lambda i: frozenset([i]), lambda i: slice(i, i + 1), lambda i: {"index": i},
        lambda i: np.int64(i), lambda i: torch.tensor(i), lambda i: [i, 0],
        lambda i: Key(i), lambda i: float(i),
    ],
    ids=[
        "floats", "path", "tuple", "set", "slice", "dict", "int64", "tensor", "list", "object",
        "float",
    ],
)  # fmt: skip
def test_a_sampler_may_give_items_of_any_kind(run, key):
    class Keyed(Dataset):
        def __len__(self):
            return NUM_SAMPLES

        def __getitem__(self, key):
            i = number(key)
            return inputs()[i], labels()[i]

    trained(run, data=Keyed(), sampler=[key(i) for i in range(NUM_SAMPLES)])


@dataclasses.dataclass
class Key:
    index: int


def number(key):
    if isinstance(key, str):
        return int(key.partition("/")[2].partition(".")[0])
    if isinstance(key, Key):
        return key.index
    if isinstance(key, dict):
        return key["index"]
    if isinstance(key, slice):
        return key.start
    if isinstance(key, tuple | list | frozenset):
        return int(next(iter(key)))
    return int(key)


@hostile
def test_an_empty_batch_passes(run):
    def collate(samples):
        return default_collate(samples) if samples else (torch.zeros(0, 6), labels()[:0])

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 4

    trained(run, loss, collate_fn=collate, batch_sampler=[[0, 1, 2, 3], [], [4, 5, 6, 7]])


@hostile
@pytest.mark.parametrize("size", [None, 1])
def test_batches_of_none_and_of_one_pass(run, size):
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x.reshape(-1, 6)), torch.as_tensor(y).reshape(-1))

    trained(run, loss, batch_size=size, data=rows(6))


# ---- what people do to a tensor of the batch --------------------------------------------------

OPERATIONS = {
    "tolist": lambda x, y: sum(map(sum, x.tolist())),
    "numpy": lambda x, y: float(x.numpy().sum()),
    "asarray": lambda x, y: float(np.asarray(x).sum()),
    "item": lambda x, y: y[0].item(),
    "int": lambda x, y: int(y[1]),
    "range": lambda x, y: len(range(y[0] + 1)),
    "iteration": lambda x, y: torch.stack([row.sum() for row in x]),
    "repr": lambda x, y: len(repr(x.detach().clone())) > 0,
    "equality": lambda x, y: bool((x == x).all()),
    "index": lambda x, y: torch.eye(3)[y],
    "index into": lambda x, y: torch.zeros(3).index_add(0, y, x[:, 0]),
    "assignment": lambda x, y: torch.zeros(len(x), 6).copy_(x),
    "part of": lambda x, y: torch.zeros(9, 6).index_put((torch.arange(len(x)),), x),
    "cat": lambda x, y: torch.cat([x, x]),
    "einsum": lambda x, y: torch.einsum("bi,bj->ij", x, x),
    "deepcopy": lambda x, y: copy.deepcopy((x, y))[0].sum(),
    "pickle": lambda x, y: pickle.loads(pickle.dumps(x)).sum(),
    "save": lambda x, y: torch.load(saved(x)).sum(),
    "collate": lambda x, y: default_collate([x, x]),
    "new_zeros": lambda x, y: x.new_zeros(2).dtype == x.dtype,
    "empty_like": lambda x, y: torch.zeros_like(x).shape[1],
    "as_tensor": lambda x, y: torch.as_tensor(x).sum(),
    "type": lambda x, y: x.type(),
    "storage": lambda x, y: len(x.untyped_storage()) > 0,
    "bincount": lambda x, y: torch.bincount(y, minlength=3),
    "one_hot": lambda x, y: F.one_hot(y, 3),
    "vmap": lambda x, y: torch.func.vmap(lambda row: row.sum())(x),
    "grad": lambda x, y: torch.func.grad(lambda t: t.square().sum())(x),
    "custom function": lambda x, y: Negate.apply(x),
    "script": lambda x, y: scripted(x),
    "out": lambda x, y: torch.add(x, 1.0, out=torch.empty(len(x), 6)),
    "is": lambda x, y: type(x) is torch.Tensor,
    "set default": lambda x, y: torch.tensor(x.shape),
    "dlpack": lambda x, y: torch.from_dlpack(x).sum(),
    "share": lambda x, y: x.share_memory_().sum(),
    "map": lambda x, y: x.clone().apply_(lambda v: v + 1),
    "split by label": lambda x, y: next(x[y == c].sum() for c in range(3)),
    "hash": lambda x, y: len({x: 1}),
    "allclose": lambda x, y: torch.allclose(x, x),
    "parameter": lambda x, y: nn.Parameter(x.clone()).sum(),
    "buffer": lambda x, y: kept_as_buffer(x),
    "module list": lambda x, y: nn.utils.rnn.pad_sequence(list(x), batch_first=True),
}


class Negate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def kept_as_buffer(x):
    module = nn.Module()
    module.register_buffer("x", x)
    return module.state_dict()["x"].sum()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted = torch.jit.trace(lambda x: x * 2 + 1, torch.zeros(2, 6), check_trace=False)


def looking(run, names):
    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]), batch[1])
        for name in names:
            run.see(OPERATIONS[name](*batch))
        return value

    trained(run, loss)


USUAL = [name for name in OPERATIONS if name != "is"]


@hostile(error="`type(x) is torch.Tensor` is false")
def test_a_batch_is_of_a_type_of_its_own(run):
    looking(run, ["is"])


@hostile
@pytest.mark.parametrize("first", range(0, 41, 8))
def test_a_batch_can_be_looked_at_in_any_way(run, first):
    looking(run, USUAL[first : first + 8])


@hostile
@pytest.mark.parametrize("first", [0, 10, 20])
def test_a_batch_that_was_looked_at_can_be_trained_on(run, first):
    """Looking may give the memory away: what the model sees must still be vouched for."""
    names = USUAL[first : first + 10]

    def loss(model, batch):
        for name in names:
            run.see(OPERATIONS[name](*batch))
        return F.cross_entropy(model(batch[0]), batch[1])

    trained(run, loss)
