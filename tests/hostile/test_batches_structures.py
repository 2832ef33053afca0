"""Batches of any kind, whatever collates and holds them, pass as under plain PyTorch."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import logging
import pickle
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.hostile.harness import hostile
from tests.hostile.loops import ce, trained
from tests.hostile.nets import NUM_SAMPLES, Net, Pairs, labels, made, net, rows, saved
from tests.hostile.nets import sentences as token_rows

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
    name: str = ""


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


class Attributed(dict):
    """A mapping with attributes beside its items."""

    def __init__(self, **items):
        super().__init__(items)
        self.size = len(items["y"])

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


Point = collections.namedtuple("Point", "x y")

KINDS = {
    "mapping": lambda x, y: Encoding({"x": x, "y": y}),
    "object": Holder,
    "dataclass": Example,
    "slots": Slots,
    "attributed": lambda x, y: Attributed(x=x, y=y),
    "named tuple": Point,
    "namespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "nested": lambda x, y: {"inputs": {"x": x}, "targets": (y, [y])},
}


def read(batch):
    if isinstance(batch, dict) and "inputs" in batch:
        return batch["inputs"]["x"], batch["targets"][0]
    return batch.x, batch.y


def collating(make):
    """Return a collate function that makes something of the inputs and the labels."""
    return lambda samples: make(*default_collate(samples))


@hostile(over=KINDS, cases=5, served=True)
@pytest.mark.parametrize("whole", [False, True], ids=["taken apart", "given whole"])
def test_batches_of_any_kind_are_served(run, make, whole):
    model = net(forward=lambda m, batch: Net.forward(m, read(batch)[0] if whole else batch))

    def loss(model, batch):
        x, y = read(batch)
        return F.cross_entropy(model(batch if whole else x), y)

    trained(run, loss, model=model, collate_fn=collating(make))


def put(batch, name, value):
    if isinstance(batch, Holder | types.SimpleNamespace):
        setattr(batch, name, value)
    else:
        batch[name] = value
    return batch


CHANGING = {
    "left behind": lambda batch, front, out: put(batch, "out", out) and None,
    "an input replaced": lambda batch, front, out: put(put(batch, "x", out * 2), "out", out),
    "what is skipped": lambda batch, front, out: put(put(batch, "front", front), "out", out),
    "an inner list": lambda batch, front, out: put(batch, "out", [out, [out]]) and None,
}


@hostile(over=CHANGING, cases=3, served=True)
@pytest.mark.parametrize("kind", ["dict", "mapping", "object", "namespace"])
def test_a_model_may_leave_its_results_in_the_batch(run, change, kind):
    """As sentence encoders do: each part reads the batch, and puts what it makes into it."""

    def forward(model, batch):
        front = model.front(batch["x"] if kind in ("dict", "mapping") else batch.x)
        return change(batch, front, model.back(front))

    def loss(model, batch):
        returned = model(batch)
        found = batch if kind == "dict" else vars(batch).get("data", vars(batch))
        run.see(sorted(found))
        run.see(returned is batch)
        out = found["out"][1][0] if isinstance(found["out"], list) else found["out"]
        for name in ("front", "x"):
            run.see(found.get(name, out).detach().clone())
        return F.cross_entropy(out, found["y"])

    make = KINDS.get(kind, lambda x, y: {"x": x, "y": y})
    trained(run, loss, model=net(forward=forward), collate_fn=collating(make))


EXTRA = {
    "count": len,
    "number": lambda s: 0.5,
    "scalar tensor": lambda s: torch.tensor(len(s)),
    "text": lambda s: "train",
    "None": lambda s: None,
    "class weights": lambda s: torch.tensor([0.1, 0.2, 0.3]),
    "nested": lambda s: {"epoch": 1, "names": ["a"] * len(s)},
}
ODD = {
    "names": lambda s: [f"row {i}" for i in range(len(s))],
    "positions": lambda s: torch.arange(len(s)),
    "array": lambda s: np.ones(len(s)),
    "ragged": lambda s: [list(range(i % 3)) for i in range(len(s))],
    "set": lambda s: {1, 2},
}


def with_extra(run, extra, whole):
    model = net(forward=lambda m, batch: Net.forward(m, batch["x"] if whole else batch))

    def collate(samples):
        x, y = default_collate(samples)
        return {"x": x, "y": y, "extra": extra(samples)}

    def loss(model, batch):
        if not isinstance(batch["extra"], dict | list | set):
            run.see(batch["extra"])
        return F.cross_entropy(model(batch if whole else batch["x"]), batch["y"])

    trained(run, loss, model=model, collate_fn=collate)


@hostile(over=EXTRA, cases=3, served=True)
@pytest.mark.parametrize("whole", [False, True])
def test_a_batch_may_hold_more_than_rows(run, extra, whole):
    with_extra(run, extra, whole)


@hostile(over=ODD)
def test_odd_companions_of_a_batch_are_served_or_told(run, extra):
    with_extra(run, extra, whole=False)


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
    collate = collating(lambda x, y: (x.t().contiguous() if how == "collate" else x, y))
    loss = lambda m, b: ce(m, b[0] if how == "collate" else b[0].t(), b[1])  # noqa: E731
    model, data = Sequences(), token_rows()
    trained(run, loss, model=model, data=data, boundary=boundary, collate_fn=collate)


# ---- collate functions ------------------------------------------------------------------------


class Buffered:
    """A collate function that fills the same memory for every batch, more than is copied."""

    def __init__(self):
        self.memory, self.y = torch.zeros(8, 1 << 18), torch.zeros(8, dtype=torch.long)
        self.x = self.memory[:, :6]

    def __call__(self, samples):
        for i, (x, y) in enumerate(samples):
            self.x[i], self.y[i] = x, y
        return self.x[: len(samples)], self.y[: len(samples)]


def shell():
    """Return a collate function that gives the same dict every time."""
    kept = {"meta": {"seen": 0}}

    def collate(samples):
        kept["x"], kept["y"] = default_collate(samples)
        return kept

    return collate


class Counting:
    """A collate function that counts its calls; what it gives may depend on that, late."""

    def __init__(self, decide):
        self.calls, self.decide = 0, decide

    def __call__(self, samples):
        self.calls += 1
        x, y = default_collate(samples)
        return x + self.decide(self), y, self.calls


def weighted(x, y):
    """A weight for each place in the batch, not for each sample."""
    return x, y, torch.linspace(0, 1, len(y))


def weighted_loss(m, b):
    return (F.cross_entropy(m(b[0]), b[1], reduction="none") * b[2]).sum()


def mixed_loss(m, b):
    out = m(b[0])
    return 0.5 * F.cross_entropy(out, b[1]) + 0.5 * F.cross_entropy(out, b[2])


def shell_loss(m, b):
    b["meta"]["seen"] += 1
    return ce(m, b["x"], b["y"]) + b["meta"]["seen"]


def array_loss(m, b):
    x, y, w = b
    w /= w.sum()
    return (F.cross_entropy(m(x), y, reduction="none") * torch.from_numpy(w)).sum().float()


def list_loss(m, b):
    b[2].append(len(b[2]))
    return ce(m, b[0], b[1]) + len(b[2])


def shared_loss(m, b):
    b["same"].mul_(2)
    return ce(m, b["x"], b["y"])


def first_two(m, b):
    return ce(m, b[0], b[1])


LEADS = types.SimpleNamespace(log=logging.getLogger("egeria"), data=rows())
"""To all other loggers, and to other samples."""
COLLATES = {
    "a buffer": (Buffered, first_two),
    "one dict": (shell, shell_loss),
    "a count that decides late": (lambda: Counting(lambda c: 0.01 * (c.calls > 4)), first_two),
    **{
        kind: (functools.partial(collating, make), loss)
        for kind, make, loss in (
            ("weights by place", weighted, weighted_loss),
            ("an array", lambda x, y: (x, y, np.arange(1.0, 1 + len(y))), array_loss),
            ("a list", lambda x, y: (x, y, []), list_loss),
            ("an object that leads on", lambda x, y: (x, y, LEADS), first_two),
            ("one memory twice", lambda x, y: {"x": x, "same": x, "y": y}, shared_loss),
            ("normalised over the batch",
             lambda x, y: ((x - x.mean(0)) / (x.std(0) + 1), y), first_two),
            ("mixup", lambda x, y: (0.5 * x + 0.5 * x.flip(0), y, y.flip(0)), mixed_loss),
        )
    },
}  # fmt: skip


@hostile(over=COLLATES, cases=8)
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_a_collate_function_of_any_kind_is_right(run, make, loss, shuffle):
    trained(run, loss, collate_fn=make(), shuffle=shuffle, epochs=4)


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor
    y: torch.Tensor
    num_made: int = 0

    def __post_init__(self):
        self.x = self.x * 2
        self.num_made += 1


class Doubling(Point):
    def __new__(cls, x, y):
        return super().__new__(cls, x * 2, y)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    extra: str = dataclasses.field(init=False, default="")

    def __post_init__(self):
        object.__setattr__(self, "extra", "made")


class Dropping(Encoding):
    """A mapping that changes what is put into it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2 if key == "x" else value)


STRUCTURES = (Scaled, Doubling, Frozen, Attributed, Dropping)


@hostile(over={kind.__name__: kind for kind in STRUCTURES})
def test_a_structure_is_made_once(run, kind):
    def loss(model, batch):
        assert type(batch) is kind
        run.see(getattr(batch, "num_made", 0))
        run.see(getattr(batch, "extra", "none"))
        return ce(model, batch.x, batch.y)

    trained(run, loss, collate_fn=collating(lambda x, y: kind(x=x, y=y)))


# ---- unusual tensors, samples and keys --------------------------------------------------------


class Labelled(torch.Tensor):
    """A subclass, as torchvision's `tv_tensors` are."""


def jagged(samples):
    x = torch.nested.nested_tensor([s[0] for s in samples], layout=torch.jagged)
    return x, torch.stack([s[1] for s in samples])


def quietly(make):
    def collate(x, y):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(x), y

    return collating(collate)


TENSORS = {
    "subclassed": quietly(lambda x: x.as_subclass(Labelled)),
    "jagged": jagged,
    "sparse": quietly(lambda x: x.relu().to_sparse()),
    "csr": quietly(lambda x: x.relu().to_sparse_csr()),
    "quantised": quietly(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    "half": quietly(lambda x: x.bfloat16()),
    "complex": quietly(lambda x: torch.complex(x, -x)),
}


def to_dense(x):
    if x.is_nested:
        return torch.nested.to_padded_tensor(x, 0.0)
    if x.is_quantized:
        return x.dequantize()
    if x.is_complex():
        return x.real * 2 + x.imag
    return (x.to_dense() if x.layout != torch.strided else x).float()


@hostile(over=TENSORS, cases=4)
@pytest.mark.parametrize("where", ["loop", "model"])
def test_tensors_of_any_kind_pass(run, collate, where):
    model = net(forward=lambda m, x: Net.forward(m, to_dense(x) if where == "model" else x))

    def loss(model, batch):
        x, y = batch
        run.see(isinstance(x, Labelled))
        return ce(model, x if where == "model" else to_dense(x), y)

    trained(run, loss, model=model, collate_fn=collate)


@hostile
@pytest.mark.parametrize("value", ["mine", 7, ["a"] * NUM_SAMPLES, property(lambda self: "mine")])
def test_an_attribute_named_sample_id_is_the_data_sets_own(run, value):
    named = type("Named", (Pairs,), {"sample_id": value, "sample_version": value})
    trained(run, data=named())


@dataclasses.dataclass
class Key:
    index: int


KEYS = {
    "floats": (lambda i: (float(i), 0.5), lambda key: int(key[0])),
    "path": (lambda i: f"rows/{i}.txt", lambda key: int(key[5:-4])),
    "set": (lambda i: frozenset([i]), lambda key: next(iter(key))),
    "slice": (lambda i: slice(i, i + 1), lambda key: key.start),
    "dict": (lambda i: {"index": i}, lambda key: key["index"]),
    "int64": (np.int64, int),
    "tensor": (torch.tensor, int),
    "list": (lambda i: [i, 0], lambda key: key[0]),
    "object": (Key, lambda key: key.index),
    "float": (float, int),
}


@hostile(over=KEYS, cases=3)
def test_a_sampler_may_give_items_of_any_kind(run, make, number):
    data = made(lambda data, key: (data.x[number(key)], data.y[number(key)]))
    trained(run, data=data, sampler=[make(i) for i in range(NUM_SAMPLES)])


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
    loss = lambda m, b: ce(m, b[0].reshape(-1, 6), torch.as_tensor(b[1]).reshape(-1))  # noqa: E731
    trained(run, loss, batch_size=size, data=rows(6))


# ---- what people do to a tensor of the batch --------------------------------------------------


class Negate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


OPERATIONS = {
    "numpy": lambda x, y: float(x.numpy().sum()),
    "item": lambda x, y: y[0].item(),
    "iteration": lambda x, y: torch.stack([row.sum() for row in x]),
    "index": lambda x, y: torch.eye(3)[y],
    "assignment": lambda x, y: torch.zeros(len(x), 6).copy_(x),
    "cat": lambda x, y: torch.cat([x, x]),
    "einsum": lambda x, y: torch.einsum("bi,bj->ij", x, x),
    "deepcopy": lambda x, y: copy.deepcopy((x, y))[0].sum(),
    "pickle": lambda x, y: pickle.loads(pickle.dumps(x)).sum(),
    "save": lambda x, y: torch.load(saved(x)).sum(),
    "as_tensor": lambda x, y: torch.as_tensor(x).sum(),
    "vmap": lambda x, y: torch.func.vmap(lambda row: row.sum())(x),
    "grad": lambda x, y: torch.func.grad(lambda t: t.square().sum())(x),
    "custom function": lambda x, y: Negate.apply(x),
    "dlpack": lambda x, y: torch.from_dlpack(x).sum(),
    "map": lambda x, y: x.clone().apply_(lambda v: v + 1),
    "hash": lambda x, y: len({x: 1}),
    "pad_sequence": lambda x, y: nn.utils.rnn.pad_sequence(list(x), batch_first=True),
}


@hostile(error="`type(x) is torch.Tensor` is false")
def test_a_batch_is_of_a_type_of_its_own(run):
    def loss(model, batch):
        run.see(type(batch[0]) is torch.Tensor)
        return ce(model, *batch)

    trained(run, loss)


@hostile
def test_a_parameter_can_be_made_of_a_batch(run):
    def loss(model, batch):
        added = nn.Parameter(batch[0].clone()).sum() + nn.Parameter(2 * batch[0]).mean()
        return ce(model, *batch) + added * nn.Parameter(batch[0]).abs().sum()

    trained(run, loss)


@hostile
@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("first", range(0, 18, 6))
def test_a_batch_can_be_looked_at_in_any_way(run, first, when):
    """Looking may give the memory away: what the model sees must still be vouched for."""
    names = [*OPERATIONS][first : first + 6]

    def look(batch):
        for name in names:
            run.see(OPERATIONS[name](*batch))

    def loss(model, batch):
        if when == "before":
            look(batch)
        value = ce(model, *batch)
        if when == "behind":
            look(batch)
        return value

    trained(run, loss)
