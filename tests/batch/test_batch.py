"""Batch tensors: they keep their samples through moves, and never lie about their values."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from egeria_cache.batch.tensor import Batch, BatchTensor, batch_tensors, unwrap

RAW = torch.arange(24, dtype=torch.float32).view(4, 3, 2) + 1


class FakeEntry:
    cut = None

    def __init__(self, hit):
        self.hit = np.array(hit)
        self.alive = True

    def load(self):
        raise LookupError


def make_batch(hit):
    entry = None if hit is None else FakeEntry(hit)
    loads = []

    def load_rows(mask):
        loads.append(mask)
        return {"x": RAW[torch.from_numpy(mask)]}

    leaves = {"x": RAW if hit is None else RAW[~torch.tensor(hit)]}
    batch = Batch(ids=range(4), variant=0, loader_name="t", leaves=leaves, load_rows=load_rows,
                  entry=entry)  # fmt: skip
    if hit is None:
        return BatchTensor.wrap(RAW.clone(), batch, "x"), loads
    misses = None if all(hit) else RAW[~torch.tensor(hit)]
    return BatchTensor.without_data(RAW.to("meta"), batch, "x", misses), loads


ALL, SOME = [True] * 4, [True, False, False, True]
KINDS = pytest.mark.parametrize("hit", [None, ALL, SOME], ids=["loaded", "absent", "partial"])


@KINDS
def test_looking_at_shape_dtype_and_device_loads_nothing(hit):
    x, loads = make_batch(hit)
    assert x.shape == (4, 3, 2)
    assert len(x) == x.size(0) == 4
    assert x.dtype == torch.float32
    assert x.device.type == "cpu"
    assert not x.is_cuda
    assert x.dim() == x.ndim == 3
    repr(x) if hit == ALL else None
    assert loads == []


@KINDS
@pytest.mark.parametrize(
    ("op", "key"),
    [
        (lambda x: x.to("cpu"), ""),
        (lambda x: x.to("cpu", non_blocking=True).contiguous().detach().clone(), ""),
        (lambda x: x.double(), "double()"),
        (lambda x: x.to(torch.float16), "to(torch.float16)"),
        (lambda x: x / 255, "__truediv__(255,)"),
        (lambda x: (x.float() * 2).sub(1), "float();__mul__(2,);sub(1,)"),
    ],
)
def test_recorded_operations_keep_the_samples_and_give_the_same_values(hit, op, key):
    x, loads = make_batch(hit)
    y = op(x)
    assert isinstance(y, BatchTensor)
    assert y.batch is x.batch
    assert y.chain_key.replace("__truediv__", "div").replace("__mul__", "mul") == key.replace(
        "__truediv__", "div"
    ).replace("__mul__", "mul")
    assert loads == []
    assert y.dtype == op(RAW).dtype
    assert torch.equal(y.full(), op(RAW))
    if hit == SOME:
        assert torch.equal(y.misses(), op(RAW)[[1, 2]])


@KINDS
@pytest.mark.parametrize(
    "op",
    [
        lambda x: x + torch.ones(4, 3, 2),
        lambda x: x.mean(),
        lambda x: F.relu(x - x.mean()),
        lambda x: x[1:3],
        lambda x: torch.cat([x, x]),
        lambda x: x.flip(0),
        lambda x: F.dropout(x, 0.0),
    ],
)
def test_any_other_function_sees_plain_data(hit, op):
    x, _ = make_batch(hit)
    y = op(x)
    assert type(y) is Tensor
    assert torch.equal(y, op(RAW))


@KINDS
def test_numpy_list_and_iteration_see_plain_data(hit):
    x, _ = make_batch(hit)
    assert np.array_equal(np.asarray(x), RAW.numpy())
    assert x.tolist() == RAW.tolist()
    assert torch.equal(torch.stack(list(x)), RAW)


@KINDS
def test_a_batch_changed_in_place_is_an_ordinary_tensor_with_the_change(hit):
    x, _ = make_batch(hit)
    x[0] = 7.0
    assert not x.intact
    assert batch_tensors([x]) == []
    expected = RAW.clone()
    expected[0] = 7.0
    assert torch.equal(unwrap(x), expected)
    y = x.to("cpu")
    assert not isinstance(y, BatchTensor) or not y.intact
    assert torch.equal(unwrap(y), expected)


def test_absent_rows_are_loaded_once():
    x, loads = make_batch(SOME)
    assert torch.equal(x.double().full(), RAW.double())
    assert torch.equal(x.full(), RAW)
    assert len(loads) == 1
    assert loads[0].tolist() == SOME


def test_channels_last_is_kept_on_absent_data():
    raw = torch.randn(4, 3, 5, 5)
    batch = Batch(ids=range(4), variant=0, loader_name="t", leaves={},
                  load_rows=lambda mask: {"x": raw}, entry=FakeEntry(ALL))  # fmt: skip
    x = BatchTensor.without_data(raw.to("meta"), batch, "x")
    y = x.to(memory_format=torch.channels_last)
    assert y.full().is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y.full(), raw)
    assert "channels_last" in y.chain_key


def test_a_voided_entry_is_gone_and_the_data_can_still_be_had():
    x, _ = make_batch(SOME)
    x.batch._planned_entry.alive = False
    assert x.batch.entry is None
    assert torch.equal(x.full(), RAW)


@KINDS
def test_copies_and_pickles_are_plain_tensors(hit):
    x, _ = make_batch(hit)
    assert type(copy.deepcopy(x)) is Tensor
    assert torch.equal(copy.deepcopy(x), RAW)
    assert torch.equal(pickle.loads(pickle.dumps(x)), RAW)


def test_rows_are_given_without_loading_where_they_are_there():
    x, loads = make_batch(SOME)
    assert torch.equal(x.batch.rows_of("x", np.array([False, True, False, False])), RAW[[1]])
    assert x.batch.rows_of("x", None) is None
    assert x.batch.rows_of("nothing", None) is None
    assert loads == []
