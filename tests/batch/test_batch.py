"""Batch tensors: they keep their samples through moves, and never lie about their values."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from egeria_cache import ActivationCache
from egeria_cache.batch import forget_trials
from egeria_cache.batch.batch import Batch
from egeria_cache.batch.tensor import BatchTensor, batch_tensors, unwrap, without_data

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
    batch = Batch(ids=range(4), draws=np.zeros(4, np.int64), loader_name="t", leaves=leaves,
                  load_rows=load_rows, planned_entry=entry)  # fmt: skip
    if hit is None:
        return BatchTensor.wrap(RAW.clone(), batch, "x"), loads
    misses = None if all(hit) else RAW[~torch.tensor(hit)]
    return without_data(RAW.to("meta"), batch, "x", misses), loads


ALL, SOME = [True] * 4, [True, False, False, True]
KINDS = pytest.mark.parametrize("hit", [None, ALL, SOME], ids=["loaded", "absent", "partial"])


@KINDS
@pytest.mark.parametrize("how", ["float", "type", "to", "contiguous", "cpu"])
def test_a_cast_to_what_a_leaf_is_gives_the_leaf(hit, how):
    """As everywhere in PyTorch; prefetchers then change it in place."""
    x, loads = make_batch(hit)
    args = {"type": (torch.float32,), "to": ("cpu", torch.float32)}.get(how, ())
    assert getattr(x, how)(*args) is x
    assert x.to("cpu", copy=True) is not x
    x.sub_(0.5).div_(2)
    assert not loads
    assert torch.equal(x.full(), (RAW - 0.5) / 2)


@KINDS
def test_looking_at_shape_dtype_and_device_loads_nothing(hit):
    x, loads = make_batch(hit)
    assert x.shape == (4, 3, 2)
    assert len(x) == x.size(0) == 4
    assert x.dtype == torch.float32
    assert x.device.type == "cpu"
    assert not x.is_cuda
    assert x.dim() == x.ndim == 3
    assert loads == []


@KINDS
@pytest.mark.parametrize(
    "op",
    [
        lambda x: x + torch.ones(4, 3, 2), lambda x: x.mean(), lambda x: torch.cat([x, RAW]),
        lambda x: torch.stack([x, x]), lambda x: torch.cat([x, x])[:4], lambda x: x[1],
        lambda x: x[x > 3], lambda x: x.roll(1), lambda x: x.flip(0, 1), lambda x: x.cumsum(0),
        lambda x: x[[0, 1], [1, 2]], lambda x: x - x[:1], lambda x: x + torch.ones(4, 1, 1),
        lambda x: x.sum(0), lambda x: F.dropout(x, 0.0001), lambda x: x.flatten(1).triu(-2),
        lambda x: x.renorm(2, 1, 100.0), lambda x: x.data, lambda x: x @ x.flatten(1)[:, :2].T,
        lambda x: torch.zeros(1, 3, 2).copy_(x[:1]),
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
    ],
)  # fmt: skip
def test_any_other_function_sees_plain_data(hit, op):
    x, _ = make_batch(hit)
    y = op(x)
    assert type(y) is Tensor
    assert torch.equal(y, op(RAW))


@KINDS
@pytest.mark.parametrize("op", [lambda x: x.transpose(0, 2), lambda x: x.permute(2, 0, 1)])
def test_rows_that_stand_elsewhere_are_those_of_no_sample(hit, op):
    x, _ = make_batch(hit)
    y = op(x)
    assert not y.intact
    assert torch.equal(y + 0, op(RAW))
    y += 1  # through the view, as in PyTorch
    assert torch.equal(op(x) + 0, op(RAW) + 1)


ZERO = torch.tensor([0])
MEAN, STD = torch.tensor([0.5, 1.5]), torch.tensor([[2.0], [3.0], [4.0]])
BY_ROW = {
    "normalised": lambda x: (x - MEAN) / STD,
    "from the left": lambda x: MEAN - 2 * x,
    "one row for all": lambda x: x + torch.ones(1, 3, 2),
    "view": lambda x: x.view(len(x), -1),
    "flatten": lambda x: x.flatten(1),
    "transposed": lambda x: x.transpose(1, -1).contiguous(),
    "columns": lambda x: x[:, 1:, 0],
    "clamped": lambda x: x.clamp(2, 9).sqrt(),
    "padded": lambda x: F.pad(x, (1, 1)),
    "one hot": lambda x: F.one_hot((x[:, 0, 0] % 5).long(), 5),
    "a mask": lambda x: x != 3,
    "of its own mean": lambda x: (x - x.mean((1, 2), keepdim=True)) / x.std((1, 2), keepdim=True),
    "chosen by itself": lambda x: torch.where(x > 3, x, 0) * (x < 9),
    "with a constant": lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1),
    "convolved": lambda x: F.conv1d(x, torch.ones(5, 3, 1)),
    "partly written": lambda x: x.clone().index_fill_(1, torch.tensor([1]), 0).clip_(2, 9),
    "by its number": lambda x: torch.broadcast_to(x[:, :1], (4, 3, 2)),
    "time first": lambda x: x.transpose(0, 1).amax(0),
}


@KINDS
@pytest.mark.parametrize("how", BY_ROW)
def test_what_is_done_row_by_row_is_recorded(hit, how):
    x, loads = make_batch(hit)
    y, expected = BY_ROW[how](x), BY_ROW[how](RAW)
    assert isinstance(y, BatchTensor)
    assert y.intact
    assert y.batch is x.batch
    assert (y.shape, y.dtype, y.stride()) == (expected.shape, expected.dtype, expected.stride())
    if hit == SOME:
        assert torch.equal(y.misses(), expected[[1, 2]])
    assert loads == []
    mask = np.array([True, False, False, True])
    assert torch.equal(y.rows(mask, {"x": RAW[[0, 3]]}), expected[[0, 3]])
    assert torch.equal(y.full(), expected)


TOGETHER = {
    "one behind the other": (lambda x: torch.cat([x, 2 * x.flip(-1), x]), (3, 1)),
    "side by side": (lambda x: torch.concat([x, x + 1], dim=-1), (1, 1)),
    "vertically": (lambda x: torch.vstack([x, x + 1]), (2, 1)),
    "horizontally": (lambda x: torch.hstack([x, x + 1]), (1, 1)),
    "stacked": (lambda x: torch.stack([x, -x], 1), (1, 1)),
    "in two levels": (lambda x: torch.cat([torch.cat([x, -x]), x]), (3, 1)),
    "each twice": (lambda x: x.repeat_interleave(2, 0), (1, 2)),
    "stacked and flattened": (lambda x: torch.stack([x, -x], dim=1).flatten(0, 1), (1, 2)),
    "of views of their own": (lambda x: x.reshape(-1, 2), (1, 3)),
    "both": (lambda x: torch.cat([x.view(-1, 2), 3 * x.view(-1, 2)]).float() / 2, (2, 3)),
}


@KINDS
@pytest.mark.parametrize("how", TOGETHER)
def test_several_rows_of_a_sample_stay_its_own(hit, how):
    op, fold = TOGETHER[how]
    (x, loads), expected = make_batch(hit), op(RAW)
    y = op(x)
    assert isinstance(y, BatchTensor)
    assert y.intact
    assert (y.fold, loads) == (fold, [])
    assert (y.shape, y.dtype, y.stride()) == (expected.shape, expected.dtype, expected.stride())
    for rows in ([True, False, False, True], [False, True, True, False]):
        mask = np.array(rows)
        assert torch.equal(y.rows(mask, {"x": RAW[mask]}), op(RAW[mask]))
    if hit == SOME:
        assert torch.equal(y.misses(), op(RAW[[1, 2]]))
    assert torch.equal(y.full(), expected)


def test_what_is_put_together_is_what_its_parts_were_then():
    (x, _), (other, _) = make_batch(ALL), make_batch(ALL)
    y = torch.cat([x, x + 1])
    x *= 3
    assert torch.equal(y.full(), torch.cat([RAW, RAW + 1]))
    assert type(torch.cat([x, other])) is Tensor


@KINDS
@pytest.mark.parametrize(
    "view", [lambda x: x.view(4, -1), lambda x: x[:, 1:], lambda x: x[1:3], lambda x: x.flatten(2)]
)
def test_a_view_is_not_its_samples_once_its_base_was_written_to(hit, view):
    (x, _), raw = make_batch(hit), RAW.clone()
    seen, expected = view(x), view(raw)
    x.mul_(2)
    raw.mul_(2)
    assert not getattr(seen, "intact", False) or seen is x
    assert torch.equal(seen + 0, expected)


def test_constants_are_told_apart_by_content_and_kept_from_changes():
    x, _ = make_batch(ALL)
    mean = torch.tensor([1.0, 2.0])
    one, other = x - mean, x - torch.tensor([1.0, 3.0])
    assert one.chain_key == (x - mean.clone()).chain_key != other.chain_key
    mean += 1
    assert torch.equal(one.full(), RAW - torch.tensor([1.0, 2.0]))
    assert not isinstance(x - mean.requires_grad_(), BatchTensor)


SELECTED = {
    "a slice": lambda x: x[1:3],
    "backwards": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "a permutation": lambda x: x[torch.tensor([2, 0, 3, 1])],
    "a list": lambda x: x[[3, 1, 1]],
    "a mask": lambda x: x[torch.tensor([True, False, True, False])],
    "index_select": lambda x: torch.index_select(x, 0, torch.tensor([3, 0])),
    "tensor_split": lambda x: x.tensor_split(3)[0],
    "with columns": lambda x: x[1:3, :, 0],
    "of a slice": lambda x: x[1:][[2, 0]],
    "then computed": lambda x: (x[2:] - MEAN).flatten(1),
    "computed before": lambda x: (x - MEAN)[[0, 3]],
    "only misses": lambda x: x[1:3],
    "only hits": lambda x: x[[0, 3]],
}


@KINDS
@pytest.mark.parametrize("how", SELECTED)
def test_rows_of_a_batch_are_a_batch(hit, how):
    x, loads = make_batch(hit)
    y, expected = SELECTED[how](x), SELECTED[how](RAW)
    assert isinstance(y, BatchTensor)
    assert y.intact
    assert y.batch.size == len(y) == len(expected)
    rows = SELECTED[how](torch.arange(4.0).view(4, 1, 1).expand(4, 3, 2).clone() + 0)
    if not {"comput"} & {how[:6], how[5:11]}:
        assert list(y.batch.ids) == rows.flatten(1)[:, 0].tolist()
    if hit is not None and y.batch.absent is not None:
        assert y.batch.entry.hit.tolist() == [hit[i] for i in y.batch.ids]
    if hit == ALL:
        assert loads == []
    assert torch.equal(y.full(), expected)
    assert torch.equal(unwrap(x), RAW)


@pytest.mark.parametrize("hit", [ALL, SOME])
def test_stored_rows_of_a_part_are_those_of_its_samples(hit):
    x, _ = make_batch(hit)
    entry, loaded = x.batch.entry, []

    def load():
        loaded.append(True)
        return {"a": torch.tensor([float(i) for i in range(4) if hit[i]])}

    entry.load = load
    for _ in range(2):
        for rows in ([2, 0, 3, 1], [3, 3, 0], [0]):
            part = x[rows].batch
            expected = [i for i in rows if hit[i]]
            found = part.entry.load()["a"]
            assert found.tolist() == expected
            found.zero_()
    assert loaded == [True]
    entry.alive = False
    with pytest.raises(LookupError):
        x.batch.select(np.array([0])).planned_entry.load()


def test_what_is_written_to_a_view_shows_in_the_whole_and_back():
    x, _ = make_batch(ALL)
    x[1:3].mul_(2)
    expected = RAW.clone()
    expected[1:3] *= 2
    assert torch.equal(unwrap(x), expected)
    assert not isinstance(x, BatchTensor) or not x.intact
    y, _ = make_batch(ALL)
    copy_of_rows = y[[0, 1]]
    y[0] = 7.0
    assert torch.equal(copy_of_rows.full(), RAW[:2])


ALIASES = {
    "numpy": lambda x: x.numpy().__imul__(2),
    "asarray": lambda x: np.asarray(x).__imul__(2),
    "one element": lambda x: x.numpy().__setitem__((3, 2, 1), -1),
    "dlpack": lambda x: torch.from_dlpack(x).mul_(2),
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


IN_PLACE = {
    "columns": (lambda x: x.__setitem__((slice(None), 0), 5), lambda x: x.index_fill(1, ZERO, 5)),
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
    draws = np.zeros(4, np.int64)
    batch = Batch(ids=range(4), draws=draws, loader_name="t", leaves={"x": raw}, load_rows=dict)
    assert batch.rows_of("x", None) is raw
    raw.numpy()[3, 7] = 1
    assert batch.rows_of("x", None) is None


def test_a_voided_entry_is_gone_and_the_data_can_still_be_had():
    x, _ = make_batch(SOME)
    x.batch.planned_entry.alive = False
    assert x.batch.entry is None
    assert torch.equal(x.full(), RAW)


@KINDS
def test_copies_and_pickles_are_plain_tensors(hit):
    x, _ = make_batch(hit)
    assert type(copy.deepcopy(x)) is Tensor
    assert torch.equal(copy.deepcopy(x), RAW)
    assert torch.equal(pickle.loads(pickle.dumps(x)), RAW)


def test_what_is_given_another_float_each_time_is_followed_no_more_until_another_cache(tmp_path):
    """Each trial takes a while; what mixes samples draws its numbers anew for each batch."""
    forget_trials()
    x, _ = make_batch(None)
    followed = [isinstance(x * (number / 64), BatchTensor) for number in range(2, 18)]
    assert followed == [True] * 8 + [False] * 8
    assert all(isinstance(x * number, BatchTensor) for number in range(2, 18))
    with ActivationCache(nn.Linear(2, 2), tmp_path):
        assert isinstance(x * (2 / 3), BatchTensor)
