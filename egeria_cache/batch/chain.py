"""Operations on a leaf that the user's loop may do between the loader and the model.

Each is done row by row, so that it can be repeated on other rows: a move, a cast, a change of
layout, arithmetic with numbers or with tensors that are the same for all rows, and whatever else is
on a list of functions that neither draw random numbers nor look at what is beside a row. That the
rows are kept apart with these very arguments is tried out on a few made-up rows, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from egeria_cache.batch.fold import Fold
from egeria_cache.batch.structure import is_dense
from egeria_cache.batch.vouch import SMALL_BYTES, content_print
from egeria_cache.device import moved_to, uploaded

__all__ = ["IN_PLACE", "JOINS", "Join", "Op", "derived", "leaves_of", "outside_inference_mode"]


def outside_inference_mode() -> AbstractContextManager[None]:
    """Make ordinary tensors, also where inference mode is on: those have a version counter."""
    return _ordinary() if torch.is_inference_mode_enabled() else _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


_KEEPS_VALUES = {
    Tensor.cpu, Tensor.pin_memory, Tensor.contiguous, Tensor.clone, Tensor.detach,
}  # fmt: skip
_MOVES = _KEEPS_VALUES | {
    Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.long, Tensor.int,
}  # fmt: skip
_RETURNS_ITSELF = _MOVES - {Tensor.clone, Tensor.detach, Tensor.pin_memory}


def _named(text: str) -> set[Any]:
    """Return the functions of these names, as methods and as functions."""
    found = [getattr(home, name, None) for name in text.split() for home in (Tensor, torch, F)]
    return {function for function in found if function is not None}


_VIEWS = _named(
    "view reshape flatten unflatten unsqueeze squeeze permute transpose swapaxes swapdims movedim "
    "moveaxis t ravel narrow "
    "select expand __getitem__"
)
_BY_ROW = _VIEWS | _named(
    "add sub mul div true_divide floor_divide remainder pow neg abs clamp clip sqrt rsqrt exp log "
    "log1p sin cos tanh sigmoid relu round floor ceil square reciprocal sign nan_to_num eq ne lt "
    "le gt ge logical_not bitwise_not bool byte short flip roll index_select interpolate pad "
    "one_hot normalize __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ "
    "__rdiv__ __floordiv__ __mod__ __pow__ __rpow__ __neg__ __abs__ __invert__ __eq__ __ne__ "
    "__lt__ __le__ __gt__ __ge__ rsub"
) - {F.relu}  # it may be told to write in place
_HAS_DIMS = _named("narrow select flip roll index_select")
"""Their first or second argument after the tensor may be the batch's own dimension."""
_TAKES_SIZES = _named("view reshape expand")
IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__iadd__: Tensor.add, Tensor.add_: Tensor.add,
    Tensor.__isub__: Tensor.sub, Tensor.sub_: Tensor.sub,
    Tensor.__imul__: Tensor.mul, Tensor.mul_: Tensor.mul,
    Tensor.__itruediv__: Tensor.div, Tensor.div_: Tensor.div,
    Tensor.clamp_: Tensor.clamp, Tensor.neg_: Tensor.neg,
}  # fmt: skip
"""Operations that write to their tensor, and those that give the same values without."""


_STACKED = {torch.vstack: 0, torch.hstack: 1}
JOINS = _named("cat concat concatenate stack") | _STACKED.keys()
"""Functions that put tensors together."""


class _Rows:
    """Stands for the number of rows among an operation's arguments."""

    def __repr__(self) -> str:
        return "B"


ROWS = _Rows()


class Op:
    """One recorded operation on a leaf: row by row, and the same for all rows."""

    __slots__ = ("args", "at", "device", "fold", "func", "key", "kwargs", "leaves", "opens")

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        key: str,
        device: torch.device | None = None,
        at: int = 0,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.key, self.device, self.at = key, device, at
        self.opens = False
        """Whether rows no longer stand in the first dimension, so that another has to follow."""
        self.fold = Fold()
        """Which rows belong to a sample after it."""
        self.leaves: tuple[str, ...] = ()
        """Of the batch, which it puts beside the one that it is done to."""

    @classmethod
    def record(
        cls,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaf: Tensor,
        fold: Fold,
        at: int = 0,
        before: tuple[Tensor, Sequence[Op], Fold] | None = None,
    ) -> Op | None:
        """Return the operation, or None if it is not one that may be repeated on other rows.

        Args:
            func: What is called.
            args: Its arguments but the leaf.
            kwargs: Its keyword arguments.
            leaf: The leaf; only its shape, dtype and device are looked at.
            fold: Which of its rows belong to a sample.
            at: The leaf's place among the arguments.
            before: The leaf as it was when its rows stood apart last, what was done to it since,
                and its fold then; None if they do.
        """
        is_open = before is not None and before[1][-1].opens
        if is_open and func not in _VIEWS:
            return None
        if at == 0 and func is Tensor.type and args and isinstance(args[0], torch.dtype):
            func, args, kwargs = Tensor.to, args[:1], {}
        if at == 0 and (func in _MOVES or moved_to(func)):
            moved = cls._move(func, args, kwargs)
            if moved is not None:
                moved.fold = fold
            return moved
        if func not in _BY_ROW or not leaf.dim() or kwargs.get("out") is not None:
            return None
        if func in _TAKES_SIZES and args:
            args = _with_rows(args, leaf.shape[0])
        texts = [_text(value, leaf) for value in args]
        named = {name: _text(value, leaf) for name, value in sorted(kwargs.items())}
        is_mixed = is_open or _may_mix_rows(func, args, kwargs, leaf.dim())
        if None in (*texts, *named.values()) or (is_mixed and func not in _VIEWS):
            return None
        inside = ", ".join(map(str, texts)) + ("," if len(texts) == 1 else "")
        key = f"{func.__name__}({inside}){named or ''}"
        op = cls(
            func,
            tuple(_own(value) for value in args),
            {name: _own(value) for name, value in kwargs.items()},
            key=key if at == 0 else f"{key}@{at}",
            at=at,
        )
        tries = [before] if before is not None and func in _VIEWS else []
        tries += [] if is_mixed else [(leaf, (), fold)]
        for base, others, folded in tries:
            of_each = op._rows_of_each(base, others)
            if of_each:
                op.fold = Fold(folded.outer, folded.inner * of_each)
                return op
        op.opens = func in _VIEWS and op._is_another_view(leaf)
        return op if op.opens else None

    def _is_another_view(self, leaf: Tensor) -> bool:
        """Whether it shows all of the leaf, which another view may put into rows again."""
        meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        view = self.run(meta)
        return view._is_view() and view.numel() == meta.numel() and view.shape != meta.shape

    @classmethod
    def _move(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Op | None:
        kind = moved_to(func)
        if kind is not None:
            where = args[0] if args else kwargs.get("device")
            there = torch.device(kind, where) if isinstance(where, int) else where or kind
            others = {k: v for k, v in kwargs.items() if k != "device"}
            # As `to`: the method may be one that was added to `Tensor` from outside.
            return cls._move(Tensor.to, (torch.device(there), None, *args[1:2]), others)
        device: torch.device | None
        if func is not Tensor.to:
            device = torch.device("cpu") if func is Tensor.cpu else None
            text = f"{func.__name__}({kwargs.get('memory_format', '')})"
            key = "" if func in _KEEPS_VALUES and not kwargs.get("memory_format") else text
            return cls(func, tuple(args), kwargs, key=key, device=device)
        if any(
            type(value) is not Tensor and isinstance(value, Tensor)
            for value in (*args, *kwargs.values())
        ):
            return None
        other = {k: v for k, v in kwargs.items() if k not in ("copy", "other")}
        if "other" in kwargs:
            args = (kwargs["other"], *args)
        rest = args[:3] if len(args) > 3 else args
        device, dtype, _, memory_format = torch._C._nn._parse_to(*rest, **other)
        key = "".join(f"to({value})" for value in (dtype, memory_format) if value is not None)
        return cls(func, tuple(args), kwargs, key=key, device=device)

    def keeps_dtype(self, tensor: Tensor) -> bool:
        """Whether the result fits into the tensor it was made from."""
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        result = self.run(meta)
        return (result.dtype, result.shape) == (meta.dtype, meta.shape)

    def is_nothing(self, before: Tensor, after: Tensor) -> bool:
        """Whether PyTorch would give back the very tensor: a cast to what it is (metas of both)."""
        copies = self.kwargs.get("copy") or any(value is True for value in self.args[2:])
        return after is before and self.func in _RETURNS_ITSELF | _VIEWS and not copies

    def aliases(self, before: Tensor, after: Tensor) -> bool:
        """Whether the result may share the memory of what it is made from (metas of both)."""
        if self.func in _VIEWS:
            return after._is_view()
        if self.func is Tensor.clone or self.kwargs.get("copy"):
            return False
        return self.func in _MOVES and (before.dtype, before.stride()) == (
            after.dtype,
            after.stride(),
        )

    def run(self, data: Tensor, loaded: Mapping[str, Any] | None = None) -> Tensor:
        """Apply the operation to some rows (or, without moving it, to a meta tensor).

        `loaded` has the same rows of the batch's leaves, as they were loaded.
        """
        if data.is_meta and self.func in _MOVES:
            return self._run_meta(data)
        if self.func in _MOVES:  # `to(other)` goes where the other one is
            moved: Tensor = self.func(data, *self.args, **self.kwargs)
            return moved
        args = [_filled(value, data) for value in self.args]
        kwargs = {name: _filled(value, data) for name, value in self.kwargs.items()}
        result: Tensor = self.func(*args[: self.at], data, *args[self.at :], **kwargs)
        return result

    def _run_meta(self, meta: Tensor) -> Tensor:
        if self.func in (Tensor.contiguous, Tensor.clone):
            copy: Tensor = self.func(meta, *self.args, **self.kwargs)
            return copy
        if self.func in _KEEPS_VALUES:
            return meta
        if self.func is not Tensor.to:
            result: Tensor = self.func(meta, *self.args, **self.kwargs)
            return result
        kwargs = {k: v for k, v in self.kwargs.items() if k not in ("copy", "other")}
        args = (self.kwargs["other"], *self.args) if "other" in self.kwargs else self.args
        _, dtype, _, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
        meta = meta if dtype is None else meta.to(dtype)
        return meta if memory_format is None else meta.to(memory_format=memory_format)

    def _rows_of_each(self, leaf: Tensor, others: Sequence[Op] = ()) -> int:
        """Return how many rows come out of one, the same alone and among others, at two sizes of
        batches, where `others` were done before; 0 if they are not kept apart."""
        ops = (*others, self)
        known = (*((op.func, op.key) for op in ops), tuple(leaf.shape[1:]), leaf.dtype)
        if known not in _TRIED:
            if len(_TRIED) > 4096:
                _TRIED.clear()
            found = {_tried(ops, leaf, num_rows) for num_rows in (5, 7)}
            _TRIED[known] = found.pop() if len(found) == 1 else 0
        return _TRIED[known]


class Join(Op):
    """Several leaves of one batch put one behind the other, or side by side."""

    __slots__ = ("_others",)

    _others: Sequence[tuple[str, Sequence[Op]]]

    @classmethod
    def of(
        cls,
        func: Callable[..., Any],
        parts: Sequence[tuple[str, Sequence[Op], str]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_dims: int,
        fold: Fold,
    ) -> Join | None:
        """Return the operation; None if it is not one, or mixes rows.

        Args:
            func: What is called.
            parts: What is put together: the leaf, what was done to it, and that as text.
            args: The arguments behind the parts.
            kwargs: Keyword arguments.
            num_dims: How many dimensions each has.
            fold: Which rows of each belong to a sample.
        """
        dim = args[0] if args else kwargs.get("dim", kwargs.get("axis", 0))
        if func not in JOINS or len(args) > 1 or kwargs.keys() - {"dim", "axis"}:
            return None
        if func in _STACKED:
            func, dim = torch.cat, _STACKED[func] if num_dims > 1 else None
        if type(dim) is not int or (func is torch.stack and dim in (0, -num_dims - 1)):
            return None
        text = ", ".join(f"{leaf}:{chain}" for leaf, _, chain in parts[1:])
        op = cls(func, (dim,), {}, key=f"{func.__name__}({text}, dim={dim})")
        op._others = [(leaf, chain) for leaf, chain, _ in parts[1:]]
        op.leaves = tuple(name for leaf, chain in op._others for name in (leaf, *leaves_of(chain)))
        is_along = func is not torch.stack and dim in (0, -num_dims)
        op.fold = Fold(len(parts), fold.inner) if is_along else fold
        return op

    def run(self, data: Tensor, loaded: Mapping[str, Any] | None = None) -> Tensor:
        """Put the same rows of the other leaves beside these."""
        assert loaded is not None, "the others are needed"
        others = [derived(leaf, chain, loaded, data.device) for leaf, chain in self._others]
        return self.joined([data, *others])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Put these together."""
        result: Tensor = self.func(list(parts), *self.args)
        return result


def derived(
    leaf: str, chain: Sequence[Op], loaded: Mapping[str, Any], device: torch.device
) -> Tensor:
    """Return rows of a leaf after all that was done to it, from what was loaded of them."""
    rows: Tensor = uploaded(loaded[leaf], device)
    for op in chain:
        rows = op.run(rows, loaded)
    return rows


def leaves_of(chain: Sequence[Op]) -> list[str]:
    """Return the further leaves that operations bring in."""
    return [leaf for op in chain for leaf in op.leaves]


_TRIED: dict[Any, int] = {}


def _tried(ops: Sequence[Op], leaf: Tensor, num_rows: int) -> int:
    shape = (num_rows, *leaf.shape[1:])
    numbers = torch.arange(int(np.prod(shape)), dtype=torch.float64).mul(0.618).remainder(1)
    rows = (numbers if leaf.dtype.is_floating_point else numbers * 5).to(leaf.dtype).view(shape)
    whole, *single = (
        reduce(lambda data, op: op.run(data), ops, part)
        for part in (rows, *(rows[i : i + 1] for i in range(num_rows)))
    )
    if not whole.dim() or any(one.shape != single[0].shape for one in single):
        return 0
    together = torch.cat(single)
    is_same = together.shape == whole.shape and torch.equal(
        whole.nan_to_num(), together.nan_to_num()
    )
    return len(single[0]) if is_same else 0


def _with_rows(args: Sequence[Any], num_rows: int) -> tuple[Any, ...]:
    """Put `ROWS` where sizes begin with the number of rows."""
    if len(args) == 1 and isinstance(args[0], Sequence):
        return (_with_rows(args[0], num_rows),)
    return (ROWS if args[0] == num_rows else args[0], *args[1:])


def _text(value: Any, leaf: Tensor) -> str | None:
    """Return what tells an argument from others; None if it is not the same for all rows."""
    if isinstance(value, Tensor):
        return _constant_text(value, leaf)
    if isinstance(value, list | tuple):
        texts = [_text(item, leaf) for item in value]
        return None if None in texts else f"[{', '.join(map(str, texts))}]"
    plain = (bool, int, float, str, slice, type(None), type(...), np.number, torch.dtype, _Rows)
    return repr(value) if isinstance(value, (*plain, torch.memory_format)) else None


def _constant_text(value: Tensor, leaf: Tensor) -> str | None:
    alike = value.dim() < leaf.dim() or (value.dim() == leaf.dim() and value.shape[0] == 1)
    if not alike or not is_dense(value) or value.requires_grad or value.nbytes > SMALL_BYTES:
        return None
    if value.is_cpu:
        number = content_print(value.contiguous())
    else:  # the device is waited for once, and again when the tensor was written to
        seen = _PRINTS.get(value)
        if seen is None or seen[0] != value._version:
            seen = _PRINTS[value] = value._version, content_print(value.contiguous().cpu())
        number = seen[1]
    return f"{value.dtype}{tuple(value.shape)}:{number:x}"


_PRINTS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _own(value: Any) -> Any:
    """Return an argument that nobody else can change."""
    if isinstance(value, list | tuple):
        return tuple(map(_own, value))
    return value.clone() if isinstance(value, Tensor) else value


def _filled(value: Any, data: Tensor) -> Any:
    if value is ROWS:
        return data.shape[0]
    if isinstance(value, Tensor) and value.device != data.device and value.dim():
        return value.to(data.device)
    return tuple(_filled(item, data) for item in value) if isinstance(value, tuple) else value


def _may_mix_rows(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], num_dims: int
) -> bool:
    """Whether the arguments name the batch's dimension, which no trial may be able to show."""
    if func is Tensor.__getitem__:
        first = args[0][0] if isinstance(args[0], tuple) and args[0] else args[0]
        return not (isinstance(first, slice) and first == slice(None))
    if func not in _HAS_DIMS:
        return False
    if func in _named("roll"):
        dims = kwargs.get("dims", args[1] if len(args) > 1 else 0)
    elif func in _named("flip"):
        dims = kwargs.get("dims", args[0] if len(args) == 1 else args)
    else:
        dims = kwargs.get("dim", args[0] if args else 0)
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return any(not isinstance(dim, int) or dim in (0, -num_dims) for dim in dims)
