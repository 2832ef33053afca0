"""Whether an operation keeps samples apart: tried out on made-up ones, once for its arguments.

The batch that is made up is as large as the loop's, and as small as five; all of it, its halves in
another order and single samples must agree. Neither may the function draw random numbers, write to
anything but its first leaf, or give on a description of the leaf alone another shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from egeria_cache.attempt import Attempt, in_turns, without_modes
from egeria_cache.batch import chain
from egeria_cache.batch.batch import Func, Kwargs, geometry, is_dense
from egeria_cache.pystate import RandomState

_UNTRIED = {
    torch.empty_like, Tensor.new_empty, Tensor.new_empty_strided, Tensor.as_subclass,
    Tensor.share_memory_, Tensor.data.__get__,  # type: ignore[attr-defined]
}  # fmt: skip
"""What they give, or do, is told by no trial."""

_MOST_TRIALS, _MOST_FLOATS = 64, 8
"""Of one function for one leaf: one that is given other numbers in each batch is not followed, and
what mixes samples is given other floats each time. A trial of large images takes 10 ms."""

_MOST_BYTES = 1 << 22
"""Of a large batch no more is made up: what tells rows by their number has small ones."""

_SMALL = 5
_RANGES = (0.0, 1.0), (0.2, 0.4), (0.4, 0.6), (0.0, 0.5), (0.6, 0.2)
"""(least number, range) of made-up samples, in turns."""


Kind = Callable[[Sequence[Any]], Any] | None
"""Makes the tuple that an operation gives; None where that is a tensor."""
Found = tuple[tuple[chain.Op, ...], Kind]

_TRIED: dict[Any, dict[str, Found | None]] = {}


def operation(
    func: Func, args: Sequence[Any], kwargs: Kwargs, tensors: Sequence[Any], size: int
) -> Found | None:
    """Return the operation, one for each tensor that it gives; None if it may not be repeated.

    Args:
        func: What is called.
        args: Its arguments, with a `Slot` for each leaf.
        kwargs: Its keyword arguments.
        tensors: The leaves, of one batch.
        size: How many samples that has.
    """
    leaves = list(map(chain.Leaf, tensors))
    first = leaves[0]
    is_first = bool(args) and isinstance(args[0], chain.Slot) and args[0] == 0
    move = chain.moved(func, args, kwargs) if is_first and len(leaves) == 1 else None
    if move is not None:
        move.fold = first.fold
        return ((move,), None) if first.has_rows_first else None
    if not _is_of_torch(func) or kwargs.get("out") is not None:
        return None
    texts = [chain.text_of(value, leaves) for value in args]
    named = {name: chain.text_of(value, leaves) for name, value in sorted(kwargs.items())}
    if None in (*texts, *named.values()):
        return None
    texts = texts[1:] if is_first else texts
    inside = ", ".join(map(str, texts)) + ("," if len(texts) == 1 else "")
    key = f"{chain.name_of(func)}({inside}){named or ''}"
    kind = first.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    ways = tuple([leaf.way for leaf in leaves])
    known = _TRIED.setdefault((func, ways, first.num_rows, size, precision), {})
    if key not in known:
        values = tree_leaves((args, kwargs))
        most = _MOST_FLOATS if any(type(one) is float for one in values) else _MOST_TRIALS
        if len(known) >= most:
            return None
        if len(_TRIED) > 4096:
            _TRIED.clear()
        own = {name: _own(value) for name, value in kwargs.items()}
        known[key] = _try(chain.Op(func, _own(args), own, key, leaves[1:]), leaves, size)
    return known[key]


def forget_trials() -> None:
    """Another cache is made: what loops before it have done is not counted against its own."""
    _TRIED.clear()


def _own(value: Any, num_rows: int | None = None) -> Any:
    """Return an argument that nobody else can change, with `ROWS` for the number of rows."""
    if isinstance(value, list | tuple):
        return tuple(_own(item, num_rows) for item in value)
    if isinstance(value, Tensor):
        return value.clone()
    return chain.ROWS if type(value) is int and value == num_rows else value


def _try(op: chain.Op, leaves: Sequence[chain.Leaf], size: int) -> Found | None:
    num_rows, tried = leaves[0].num_rows, []
    candidates = [op]
    if any(type(value) is int and value == num_rows for value in tree_leaves(op.args)):
        candidates.append(replace(op, args=_own(op.args, num_rows), key=f"{op.key} of B"))
    for candidate in candidates:
        with _unseen() as has_drawn:
            with Attempt():
                tried.append(_Trial(candidate, leaves, size).found())
            if has_drawn():
                return None
    found = [one for one in tried if one is not None]
    apart = (one for one in found if not one[0][0].opens)
    return next(apart, found[0] if found else None)


_IGNORE: Any = ("ignore", None, Warning, None, 0)


@contextmanager
def _unseen() -> Iterator[Callable[[], bool]]:
    """Try without any mode of the loop's, and put the random generators back behind it."""
    before = RandomState.now()
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters.insert(0, _IGNORE)
    with in_turns(), without_modes():
        yield lambda: not RandomState.now().equals(before)
        filters.remove(_IGNORE)
        before.restore()


class _Trial:
    """One operation on made-up samples."""

    def __init__(self, op: chain.Op, leaves: Sequence[chain.Leaf], size: int) -> None:
        self._op, self._leaves = op, leaves
        self._raws = {name: raw for leaf in leaves for name, raw in leaf.raws.items()}
        row_bytes = sum(raw[0][1:].numel() * raw[2].itemsize for raw in self._raws.values())
        self._sizes = sorted({5, 7, max(2, min(size, _MOST_BYTES // max(row_bytes, 1)))})
        self._blocks = {name: _made_up(raw, self._sizes[-1]) for name, raw in self._raws.items()}
        self._kind: Kind = None

    def found(self) -> Found | None:
        """Return what it shows; None if samples are not kept apart."""
        folds: list[chain.Fold | None] = []
        has_floats = any(raw[2].is_floating_point for raw in self._raws.values())
        for scale in (1.0, -1000.0) if has_floats else (1.0,):
            for size in self._sizes:
                whole = self._run(range(size), scale)
                small = size <= _SMALL
                half = size // 2
                halves = [[size - 1], list(range(half, size))[::-1], list(range(half))]
                parts = [[i] for i in range(size)] if small else halves
                each = [self._run(part, scale) for part in parts]
                if whole is None or None in each or any(len(e) != len(whole) for e in each):  # type: ignore[arg-type]
                    return None
                for i, tensor in enumerate(whole):
                    own = [e[i] for e in each]  # type: ignore[index]
                    if len(folds) <= i:
                        folds.append(_fold(tensor, own, size))
                    fold = folds[i]
                    if fold is None:
                        if not self._is_other_view(tensor, size):
                            return None
                    elif not all(map(partial(_agree, fold, tensor, size), own, parts)):
                        return None
                if size == self._sizes[-1] and not self._can_be_described(whole, size):
                    return None
        ops = (replace(self._op, fold=fold or chain.PLAIN, opens=fold is None) for fold in folds)
        if self._kind is not None:
            ops = (replace(op, item=i, key=f"{op.key}[{i}]") for i, op in enumerate(ops))
        return tuple(ops), self._kind

    def _run(self, rows: Sequence[int], scale: float) -> list[Tensor] | None:
        given = self._given(rows, scale)
        arguments = tree_leaves((self._op.args, self._op.kwargs))
        fixed = [*given[1:], *(value for value in arguments if isinstance(value, Tensor))]
        before = [_state(tensor) for tensor in (given[0], *fixed)]
        result = self._op.call(given)
        writes, *others = (
            _state(tensor) != was for tensor, was in zip((given[0], *fixed), before, strict=True)
        )
        if any(others) or (writes and _state(given[0])[1:] != before[0][1:]):
            return None
        self._op.writes = writes
        if writes:
            returned = None if self._op.func is Tensor.__setitem__ else given[0]
            return [given[0]] if result is returned else None
        is_one = isinstance(result, Tensor)
        tensors = [result] if is_one else list(result)
        self._kind = None if is_one else type(result)
        are_plain = all(is_dense(one) and one.dim() and not one.requires_grad for one in tensors)
        is_apart = len(given) == 1 or not any(tensor._is_view() for tensor in tensors)
        return tensors if are_plain and is_apart else None

    def _given(self, rows: Sequence[int], scale: float) -> list[Tensor]:
        loaded = {}
        for name, raw in self._raws.items():
            block = self._blocks[name][list(rows)]
            if scale != 1 and block.is_floating_point():
                block = (block - 0.5) * scale
            loaded[name] = _strided(raw, len(rows), block.device).copy_(block)
        return [chain.derived(leaf.leaf, leaf.chain, loaded, leaf.device) for leaf in self._leaves]

    def _is_other_view(self, result: Tensor, size: int) -> bool:
        """Whether it shows all of its leaf, which another view may put into rows again."""
        (base,) = self._given(range(size), 1.0) if len(self._leaves) == 1 else (result,)
        is_all = result._is_view() and result.numel() == base.numel()
        return is_all and not self._op.writes and self._kind is None and result.shape != base.shape

    def _can_be_described(self, whole: Sequence[Tensor], size: int) -> bool:
        """Whether the same comes out where there are no data."""
        there = torch.device("meta")
        metas = {name: _strided(raw, size, there) for name, raw in self._raws.items()}
        given = [chain.derived(leaf.leaf, leaf.chain, metas, there) for leaf in self._leaves]
        result = self._op.call(given)
        is_one = self._op.writes or self._kind is None
        described = [given[0] if self._op.writes else result] if is_one else list(result)
        return [*map(geometry, described)] == [*map(geometry, whole)]


def _fold(whole: Tensor, singles: Sequence[Tensor], size: int) -> chain.Fold | None:
    """Return which rows are a sample's; None if it is none of what can be told."""
    each = singles[0].shape[0]
    for outer in range(1, each + 1):
        fold = chain.Fold(outer, each // outer)
        agree = (_agree(fold, whole, size, one, [i]) for i, one in enumerate(singles))
        if each % outer == 0 and all(agree):
            return fold
    return None


def _agree(fold: chain.Fold, whole: Tensor, size: int, part: Tensor, rows: Sequence[int]) -> bool:
    """Whether a part has these of the samples, as they are in the whole."""
    each = fold.outer * fold.inner
    if not each or (len(whole), len(part)) != (size * each, len(rows) * each):
        return False
    return _same(fold.apart(whole)[list(rows)], fold.apart(part))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, but for rounding: kernels sum in another order for other numbers of
    rows."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    is_equal = torch.equal(one, other)
    if is_equal or not (one.is_floating_point() or one.is_complex()):
        return is_equal
    off = min(64 * torch.finfo(one.dtype).eps, 0.05)
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=off * scale, equal_nan=True)


def _made_up(raw: chain.Raw, size: int) -> Tensor:
    """Return rows of a leaf that differ, also in extremes, in numbers that models are given."""
    shape, _, dtype = raw
    numbers = torch.rand((size, *shape[1:]), generator=torch.Generator().manual_seed(size))
    lows, ranges = torch.tensor(_RANGES)[torch.arange(size) % len(_RANGES)].unbind(1)
    row = (-1, *[1] * (numbers.dim() - 1))
    numbers = lows.view(row) + numbers * ranges.view(row)
    if dtype == torch.bool:
        return numbers > 0.5
    return (numbers if dtype.is_floating_point or dtype.is_complex else numbers * 5).to(dtype)


def _strided(raw: chain.Raw, size: int, device: torch.device) -> Tensor:
    shape, stride, dtype = raw
    used = [step for step, length in zip(stride[1:], shape[1:], strict=True) if length > 1]
    if not used or (0 not in used and stride[0] >= shape[1:].numel()):
        return torch.empty_strided((size, *shape[1:]), stride, dtype=dtype, device=device)
    return torch.empty((size, *shape[1:]), dtype=dtype, device=device)


def _state(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.data_ptr(), *geometry(tensor)


@lru_cache(maxsize=1024)
def _is_of_torch(func: Func) -> bool:
    """Whether it is a function of PyTorch's own, which keeps nothing of its calls."""
    if func in _UNTRIED or isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return False
    return torch.overrides.resolve_name(func) is not None
