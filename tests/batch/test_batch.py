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
    assert type(x) is Tensor
    expected = RAW.clone()
    expected[0] = 7.0
    assert torch.equal(x, expected)


ALIASES = {
    "numpy": lambda x: x.numpy().__imul__(2),
    "asarray": lambda x: np.asarray(x).__imul__(2),
    "data": lambda x: x.data.mul_(2),
    "one element": lambda x: x.numpy().__setitem__((3, 2, 1), -1),
    "dlpack": lambda x: torch.from_dlpack(x).mul_(2),
    "detached and numpy": lambda x: x.detach().numpy().__imul__(2),
    "a flat view": lambda x: x.view(-1).numpy().__imul__(2),
    "an alias in place": lambda x: x.detach().mul_(2),
    "storage": lambda x: torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()).zero_(),
}


@KINDS
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("first", [lambda x: x, lambda x: x.double(), lambda x: x / 2])
def test_writes_through_another_name_are_seen(hit, alias, first):
    x, _ = make_batch(hit)
    x, plain = first(x), first(RAW.clone())
    assert x.intact
    ALIASES[alias](x)
    ALIASES[alias](plain)
    assert not x.intact
    assert batch_tensors([x]) == []
    assert torch.equal(unwrap(x), plain)
    later = x.to("cpu").float()
    assert not isinstance(later, BatchTensor)
    assert torch.equal(unwrap(later), plain.float())


@KINDS
def test_looking_at_the_data_through_another_name_changes_nothing(hit):
    x, _ = make_batch(hit)
    assert x.numpy().sum() == RAW.sum()
    assert float(x.data.sum()) == RAW.sum()
    assert x.intact


SHAPES = {
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "transpose_": lambda x: x.transpose_(1, 2),
    "squeeze_": lambda x: x.unsqueeze_(1).squeeze_(1),
    "resize_": lambda x: x.resize_(4, 6),
    "data": lambda x: setattr(x, "data", torch.zeros(4, 3, 2)),
}


@KINDS
@pytest.mark.parametrize("kind", SHAPES)
def test_statements_that_change_a_shape_change_that_very_tensor(hit, kind):
    x, _ = make_batch(hit)
    held, plain = [x], RAW.clone()
    SHAPES[kind](x)
    SHAPES[kind](plain)
    assert torch.equal(x, plain)
    assert torch.equal(held[0], plain)
    assert type(x) is Tensor


@KINDS
def test_a_gradient_by_an_input_can_be_had(hit):
    x, _ = make_batch(hit)
    x.requires_grad_()
    (x * x).sum().backward()
    assert torch.equal(x.grad, 2 * RAW)
    y, _ = make_batch(hit)
    y.requires_grad = True
    assert torch.equal(torch.autograd.grad((y * y).sum(), y)[0], 2 * RAW)


IN_PLACE = {
    "-=": (lambda x: x.__isub__(1), lambda x: x.sub(1)),
    "add_": (lambda x: x.add_(2), lambda x: x + 2),
    "/=": (lambda x: x.__itruediv__(255), lambda x: x / 255),
    "mul_": (lambda x: x.mul_(3).sub_(1), lambda x: x * 3 - 1),
}


@KINDS
@pytest.mark.parametrize("kind", IN_PLACE)
def test_arithmetic_in_place_is_recorded(hit, kind):
    x, loads = make_batch(hit)
    change, same = IN_PLACE[kind]
    held = [x]
    change(x)
    assert isinstance(x, BatchTensor)
    assert x.intact
    assert x.chain_key
    assert loads == []
    assert torch.equal(held[0].full(), same(RAW))
    if hit == SOME:
        assert torch.equal(x.misses(), same(RAW)[[1, 2]])
        mask = np.array([True, False, False, False])
        assert torch.equal(x.rows(mask, {"x": RAW[:1]}), same(RAW)[:1])


def test_what_the_loop_does_in_place_is_not_done_to_what_is_kept():
    x, _ = make_batch(None)
    x -= 1
    assert torch.equal(x.batch.rows_of("x", None), RAW)


def test_large_leaves_that_were_written_to_are_not_given_as_they_were():
    raw = torch.zeros(4, 1 << 18)
    batch = Batch(ids=range(4), variant=0, loader_name="t", leaves={"x": raw}, load_rows=dict)
    assert batch.rows_of("x", None) is raw
    raw.numpy()[3, 7] = 1
    assert batch.rows_of("x", None) is None


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
