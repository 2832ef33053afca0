"""Structures of batches: taken apart, merged, and rebuilt as they were."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from egeria_cache.batch.structure import flatten, is_rows, merge_rows, take_rows

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    image: torch.Tensor
    name: list


class Encoding(UserDict):
    """A mapping with an attribute of its own."""


def batches():
    x = torch.arange(6.0).view(3, 2)
    encoding = Encoding({"ids": x})
    encoding.source = "tokenizer"
    return [
        x,
        [x, x + 1],
        (x, ["a", "b", "c"]),
        {"x": x, "names": ("a", "b", "c"), "deep": {"y": [x]}},
        OrderedDict(b=x, a=x),
        Pair(x, x),
        Record(x, ["a", "b", "c"]),
        encoding,
    ]


@pytest.mark.parametrize("batch", batches(), ids=lambda b: type(b).__name__)
def test_a_batch_is_rebuilt_as_it_was(batch):
    structure, leaves = flatten(batch, 3)
    assert structure.paths == tuple(leaves)
    assert all(is_rows(leaf, 3) for leaf in leaves.values())
    again = structure.rebuild(leaves)
    assert type(again) is type(batch)
    assert flatten(again, 3)[1].keys() == leaves.keys()
    assert str(again) == str(batch)
    assert getattr(again, "source", None) == getattr(batch, "source", None)
    doubled = structure.rebuild({p: x * 2 if torch.is_tensor(x) else x for p, x in leaves.items()})
    assert str(doubled) != str(batch)


def test_what_is_not_one_value_per_sample_is_no_row():
    assert not is_rows(torch.tensor(3.0), 3)
    assert not is_rows(torch.zeros(2, 3), 3)
    assert not is_rows(["a", "b"], 3)
    assert not is_rows([[1], [2], [3]], 3)
    assert not is_rows(7, 3)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_merging_undoes_taking(hits):
    mask = np.array(hits)
    tensor = torch.randn(len(hits), 3)
    values = [str(i) for i in range(len(hits))]
    for rows in (tensor, values, tuple(values)):
        merged = merge_rows(mask, take_rows(rows, mask), take_rows(rows, ~mask))
        assert type(merged) is type(rows)
        assert torch.equal(merged, rows) if torch.is_tensor(rows) else merged == rows
