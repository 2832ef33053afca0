"""Structures of batches: taken apart, merged, and rebuilt as they were."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from egeria_cache.batch.batch import flatten, is_faithful, is_rows, merge_rows, take_rows

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    image: torch.Tensor
    name: list


class Encoding(UserDict):
    """A mapping with an attribute of its own."""


class Acting(NamedTuple("Acting", [("left", torch.Tensor), ("right", torch.Tensor)])):
    """Its constructor adds one."""

    def __new__(cls, left, right):
        return super().__new__(cls, left + 1, right)


@dataclass(frozen=True)
class Derived:
    """Its constructor derives a field, and changes another."""

    image: torch.Tensor
    total: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "image", self.image * 2)
        object.__setattr__(self, "total", self.image.sum(1))


class Slotted:
    __slots__ = ("image", "names")

    def __init__(self, image, names):
        self.image, self.names = image + 1, names

    def __str__(self):
        return f"{self.image} {self.names}"


class Guarded(dict):
    def __init__(self, x):
        super().__init__(x=x)

    def __setitem__(self, key, value):
        raise TypeError("read only")


class Nested:
    def __init__(self, x):
        self.inner = {"x": [x], "more": SimpleNamespace(y=x)}
        self.n = 5

    def __str__(self):
        return str(self.inner)


def batches():
    x = torch.arange(6.0).view(3, 2)
    encoding = Encoding({"ids": x})
    encoding.source = "tokenizer"
    return [
        x, [x, x + 1], (x, ["a", "b", "c"]),
        {"x": x, "names": ("a", "b", "c"), "deep": {"y": [x]}}, OrderedDict(b=x, a=x),
        Pair(x, x), Record(x, ["a", "b", "c"]), encoding, Acting(x, x), Derived(x),
        Slotted(x, ("a", "b", "c")), Guarded(x), defaultdict(list, x=x), SimpleNamespace(x=x),
        Nested(x),
    ]  # fmt: skip


@pytest.mark.parametrize("batch", batches(), ids=lambda b: type(b).__name__)
def test_a_batch_is_rebuilt_as_it_was(batch):
    structure, leaves = flatten(batch, 3)
    assert structure.paths == tuple(leaves)
    assert {path for path, leaf in leaves.items() if not is_rows(leaf, 3)} <= {".source", ".n"}
    assert is_faithful(structure, batch, leaves, 3)
    again = structure.rebuild(leaves)
    assert type(again) is type(batch)
    assert flatten(again, 3)[1].keys() == leaves.keys()
    assert str(again) == str(batch)
    assert getattr(again, "source", None) == getattr(batch, "source", None)
    doubled = structure.rebuild({p: x * 2 if torch.is_tensor(x) else x for p, x in leaves.items()})
    assert str(doubled) != str(batch)


class Shared(Mapping):
    """Copies of it share what they hold."""

    def __init__(self, inside):
        self.inside = inside

    def __getitem__(self, key):
        return self.inside[key]

    def __setitem__(self, key, value):
        self.inside[key] = value

    def __iter__(self):
        return iter(self.inside)

    def __len__(self):
        return len(self.inside)


def test_taking_a_batch_apart_leaves_it_as_it_is():
    x = torch.zeros(3, 2)
    inside = {"x": x}
    structure, leaves = flatten(Shared(inside), 3)
    again = structure.rebuild({path: leaf + 1 for path, leaf in leaves.items()})
    assert inside["x"] is x
    assert again["x"] is not x
    assert is_faithful(structure, Shared(inside), leaves, 3)


def test_a_batch_that_holds_itself_is_not_followed_for_ever():
    ring = SimpleNamespace(x=torch.zeros(3, 2))
    ring.me = ring
    structure, _ = flatten(ring, 3)
    assert set(structure.paths) == {".x", ".me"}


OTHERS = {
    "sparse": torch.zeros(3, 2).to_sparse(), "subclass": torch.nn.Parameter(torch.zeros(3, 2)),
    "nested": torch.nested.nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged),
    "meta": torch.zeros(3, 2, device="meta"),
}  # fmt: skip


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS)
def test_tensors_of_other_kinds_are_no_rows(tensor):
    _, leaves = flatten({"x": tensor}, 3)
    assert leaves["['x']"] is tensor
    assert not is_rows(tensor, 3)


def test_what_is_not_one_value_per_sample_is_no_row():
    others = torch.tensor(3.0), torch.zeros(2, 3), ["a", "b"], [[1], [2], [3]], 7
    assert not any(is_rows(one, 3) for one in others)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_merging_undoes_taking(hits):
    mask = np.array(hits)
    tensor = torch.randn(len(hits), 3)
    values = [str(i) for i in range(len(hits))]
    for rows in (tensor, values, tuple(values)):
        merged = merge_rows(mask, take_rows(rows, mask), take_rows(rows, ~mask))
        assert type(merged) is type(rows)
        assert torch.equal(merged, rows) if torch.is_tensor(rows) else merged == rows
