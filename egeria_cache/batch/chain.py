"""Operations that the user's loop may do to leaves of a batch between the loader and the model.

Each is repeated on other rows, so that it may be any function of PyTorch's of which a row's result
is that row's alone. Whether it is, is tried out once with these very arguments: on made-up samples,
all that was done to them included, each in company and by itself (`trial.py`). A function that
takes rows (slices, chunks, another order) is asked of the row numbers: what it gives there are the
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from egeria_cache.batch.batch import SMALL_BYTES, Func, Kwargs, Leaves, content_print, is_dense
from egeria_cache.device import moved_to, uploaded

_KEEPS_VALUES = {
    Tensor.cpu, Tensor.pin_memory, Tensor.contiguous, Tensor.clone, Tensor.detach,
}  # fmt: skip
_MOVES = _KEEPS_VALUES | {Tensor.to}


class Fold(NamedTuple):
    """A tensor has `outer` blocks of the batch, and in each of them `inner` rows of a sample."""

    outer: int = 1
    inner: int = 1

    def mask(self, mask: np.ndarray) -> np.ndarray:
        """Return which rows a bool mask of samples, shape (B,), means."""
        return mask if self == Fold() else np.tile(np.repeat(mask, self.inner), self.outer)

    def apart(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return shape (B, ..., outer * inner, ...): what is one sample's, the samples first."""
        split = tensor.unflatten(dim, (self.outer, -1, self.inner)).movedim(dim + 1, 0)
        return torch.flatten(split, dim + 1, dim + 2)

    def together(self, samples: Tensor, dim: int = 0) -> Tensor:
        """Return what `apart` was made from."""
        split = samples.unflatten(dim + 1, (self.outer, self.inner)).movedim(0, dim + 1)
        return torch.flatten(split, dim, dim + 2)


PLAIN = Fold()
Ops: TypeAlias = "tuple[Op, ...]"
Raw = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a leaf as the loader gave it out."""


class Chained:
    """A leaf of a batch, and what was done to it."""

    leaf: str
    raw: Raw
    """The leaf as it was given out."""
    chain: Ops

    @property
    def chain_key(self) -> str:
        """The recorded operations that change values, as stable text; empty when there are none."""
        return ";".join([op.key for op in self.chain if op.key]) if self.chain else ""

    @property
    def fold(self) -> Fold:
        """Which of its rows belong to a sample."""
        return self.chain[-1].fold if self.chain else PLAIN

    @property
    def has_rows_first(self) -> bool:
        """Whether samples stand in the first dimension; a view may have put them elsewhere."""
        return not self.chain or not self.chain[-1].opens

    @property
    def raws(self) -> dict[str, Raw]:
        """All leaves that it is made of."""
        return {self.leaf: self.raw} | {name: raw for op in self.chain for name, raw in op.raws}


class Leaf(Chained):
    """A `BatchTensor` as it is now, without its batch and what it holds."""

    def __init__(self, tensor: Any) -> None:
        self.leaf, self.raw, self.chain = tensor.leaf, tensor.raw, tensor.chain
        self.num_rows, self.num_dims, self.device = len(tensor), tensor.dim(), tensor.device

    @property
    def way(self) -> tuple[Any, ...]:
        """What tells it from other leaves, and what was done to it from that."""
        shape, stride, dtype = self.raw
        ops = tuple([(op.func, op.key) for op in self.chain])
        return self.leaf, shape[1:], stride, dtype, self.device, ops


class Slot(int):
    """Stands for a leaf among the arguments of an operation: the first is 0."""


ROWS = Slot(-1)
"""Stands for the number of rows."""


@dataclass(slots=True, eq=False)
class Op:
    """One recorded operation on a leaf: row by row, and the same for all rows."""

    func: Func
    args: tuple[Any, ...]
    """With a `Slot` for each leaf."""
    kwargs: Kwargs
    key: str = ""
    """What tells it from others."""
    others: Sequence[Leaf] = ()
    """What it puts beside the leaf that it is done to."""
    device: torch.device | None = None
    """Where it moves to."""
    fold: Fold = PLAIN
    """Which rows belong to a sample after it."""
    opens: bool = False
    """Whether rows no longer stand in the first dimension, so that another has to follow."""
    item: int | None = None
    """Which of the tensors that it gives is meant; None where it gives one."""
    writes: bool = False
    """Whether it writes to its first leaf, and that is what it gives."""

    @property
    def raws(self) -> Iterator[tuple[str, Raw]]:
        """The leaves that it puts beside the one that it is done to."""
        return ((name, raw) for other in self.others for name, raw in other.raws.items())

    def is_nothing(self, before: Tensor, after: Tensor) -> bool:
        """Whether PyTorch would give back the very tensor: a cast to what it is (metas of both)."""
        copies = self.kwargs.get("copy") or any(value is True for value in self.args[3:])
        is_copy = self.func in (Tensor.pin_memory, Tensor.detach)
        return after is before and not (is_copy or (copies and self.func is Tensor.to))

    def aliases(self, before: Tensor, after: Tensor) -> bool:
        """Whether the result may share the memory of what it is made from (metas of both)."""
        if self.func not in _MOVES:
            return after._is_view()
        if self.func is Tensor.clone or self.kwargs.get("copy"):
            return False
        return (before.dtype, before.stride()) == (after.dtype, after.stride())

    def run(self, data: Tensor, loaded: Leaves | None = None) -> Tensor:
        """Apply the operation to some rows (or, without moving it, to a meta tensor).

        `loaded` has the same rows of the batch's leaves, as they were loaded.
        """
        others = [derived(o.leaf, o.chain, loaded or {}, data.device) for o in self.others]
        return self.apply([data, *others])

    def apply(self, leaves: Sequence[Tensor]) -> Tensor:
        """Apply it to the same rows of all its leaves; what it would write to is copied."""
        if leaves[0].is_meta and self.func in _MOVES:
            return self._run_meta(leaves[0])
        if not self.writes:
            result: Tensor = self.call(leaves)
            return result if self.item is None else result[self.item]
        copy = leaves[0].clone()
        self.call([copy, *leaves[1:]])
        return copy

    def call(self, leaves: Sequence[Tensor]) -> Any:
        """Call the function itself."""
        args = [_filled(value, leaves) for value in self.args]
        kwargs = {name: _filled(value, leaves) for name, value in self.kwargs.items()}
        return self.func(*args, **kwargs)

    def _run_meta(self, meta: Tensor) -> Tensor:
        if self.func in (Tensor.contiguous, Tensor.clone):
            copy: Tensor = self.func(meta, *self.args[1:], **self.kwargs)
            return copy
        if self.func in _KEEPS_VALUES:
            return meta
        _, dtype, _, memory_format = _parsed(self.args[1:], self.kwargs)
        meta = meta if dtype is None else meta.to(dtype)
        return meta if memory_format is None else meta.to(memory_format=memory_format)


def name_of(func: Func) -> str:
    """Return the name of a function, of a property that of itself."""
    name: str = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]


def moved(func: Func, args: Sequence[Any], kwargs: Kwargs) -> Op | None:
    """Return the operation if it only moves rows, casts them or lays them out."""
    kind = moved_to(func)
    if kind is not None:
        where = args[1] if len(args) > 1 else kwargs.get("device")
        there = torch.device(kind, where) if isinstance(where, int) else where or kind
        others = {k: v for k, v in kwargs.items() if k != "device"}
        # As `to`: the method may be one that was added to `Tensor` from outside.
        return moved(Tensor.to, (args[0], torch.device(there), None, *args[2:3]), others)
    if func is Tensor.type and len(args) == 2 and isinstance(args[1], torch.dtype):
        func = Tensor.to
    if func in _KEEPS_VALUES:
        device = torch.device("cpu") if func is Tensor.cpu else None
        layout = kwargs.get("memory_format")
        key = f"{func.__name__}({layout})" if layout else ""
        return Op(func, tuple(args), kwargs, key, device=device)
    given = (*args[1:], *kwargs.values())
    if func is not Tensor.to or any(
        isinstance(v, Slot | Tensor) and type(v) is not Tensor for v in given
    ):
        return None
    if given and isinstance(given[0], Tensor):  # it stays where it is
        args = (args[0], given[0].device, given[0].dtype, *args[2:])
    device, dtype, _, memory_format = _parsed(args[1:], kwargs)
    key = "".join(f"to({value})" for value in (dtype, memory_format) if value is not None)
    return Op(func, tuple(args), kwargs, key, device=device)


def _parsed(args: Sequence[Any], kwargs: Kwargs) -> tuple[Any, ...]:
    """Return device, dtype, whether it waits, and the memory format that `to` is told."""
    named = {k: v for k, v in kwargs.items() if k != "copy"}
    found: tuple[Any, ...] = torch._C._nn._parse_to(*args[:3], **named)
    return found


def derived(leaf: str, chain: Ops, loaded: Leaves, device: torch.device) -> Tensor:
    """Return rows of a leaf after all that was done to it, from what was loaded of them."""
    rows: Tensor = uploaded(loaded[leaf], device)
    for op in chain:
        rows = op.run(rows, loaded)
    return rows


_PLAIN = (
    bool, int, float, complex, str, slice, type(None), type(...), np.number, torch.dtype,
    torch.memory_format,
)  # fmt: skip


def text_of(value: Any, leaves: Sequence[Leaf]) -> str | None:
    """Return what tells an argument from others; None if it is not the same for all rows."""
    if isinstance(value, Slot):
        leaf = leaves[value]
        return f"{leaf.leaf}:{leaf.chain_key}" if value else "x0"
    if isinstance(value, Tensor):
        return _constant_text(value, leaves)
    if isinstance(value, list | tuple):
        texts = [text_of(item, leaves) for item in value]
        return None if None in texts else f"[{', '.join(map(str, texts))}]"
    return repr(value) if isinstance(value, _PLAIN) else None


def _constant_text(value: Tensor, leaves: Sequence[Leaf]) -> str | None:
    # A tensor with a row per sample is another one in each batch: it need not be tried.
    is_by_row = any(
        value.dim() >= leaf.num_dims and value.shape[0] == leaf.num_rows != 1 for leaf in leaves
    )
    if is_by_row or not is_dense(value) or value.requires_grad or value.nbytes > SMALL_BYTES:
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


def _filled(value: Any, leaves: Sequence[Tensor]) -> Any:
    if isinstance(value, Slot):
        return leaves[0].shape[0] if value is ROWS else leaves[value]
    if isinstance(value, Tensor) and value.device != leaves[0].device and value.dim():
        return value.to(leaves[0].device)
    return tuple(_filled(item, leaves) for item in value) if isinstance(value, tuple) else value


Selection = tuple[Sequence[tuple[np.ndarray, Callable[[Tensor], Tensor]]], bool, Any]
"""Rows that are taken from a batch: their positions and what takes them from a tensor, for each
tensor that the function gives; whether that is a tuple; what is indexed behind the rows."""


_DIM_AT = {
    Tensor.chunk: 1, torch.chunk: 1, Tensor.split: 1, torch.split: 1, torch.functional.split: 1,
    Tensor.tensor_split: 1, torch.tensor_split: 1, Tensor.narrow: 0, torch.narrow: 0,
    Tensor.index_select: 0, torch.index_select: 0, Tensor.roll: 1, torch.roll: 1,
    Tensor.flip: 0, torch.flip: 0, Tensor.flipud: 0, torch.flipud: 0,
}  # fmt: skip
"""Functions that may take rows: where, behind the tensor, the dimension is told."""


def selected_rows(
    func: Func, args: Sequence[Any], kwargs: Kwargs, leaf: Tensor
) -> Selection | None:
    """Return the rows that `func(leaf, *args, **kwargs)` takes; None if that is not what it does.

    Raises:
        Exception: The function does, too.
    """
    if leaf.dim() and func is Tensor.__getitem__:
        return _indexed(args[0], leaf.shape[0])
    if not leaf.dim() or func not in _DIM_AT or not _is_along_rows(func, args, kwargs, leaf.dim()):
        return None
    found = func(torch.arange(leaf.shape[0]), *args, **kwargs)
    if isinstance(found, Tensor):
        return [(found.numpy(), partial(_call, func, args, kwargs, None))], False, None
    parts = [(rows.numpy(), partial(_call, func, args, kwargs, i)) for i, rows in enumerate(found)]
    return parts, True, None


def _indexed(index: Any, num_rows: int) -> Selection | None:
    first, rest = index, None
    if isinstance(index, tuple):
        if not index:
            return None
        first, rest = index[0], (slice(None), *index[1:]) if len(index) > 1 else None
    if isinstance(first, np.ndarray):
        first = torch.from_numpy(first)
    is_rows = isinstance(first, slice) and first != slice(None)
    is_rows |= isinstance(first, list) and all(type(i) in (int, bool) for i in first)
    is_rows |= type(first) is Tensor and first.dim() == 1 and not first.requires_grad
    # Several lists of indices are taken together.
    if not is_rows or any(isinstance(i, Tensor | list | np.ndarray) for i in rest or ()):
        return None
    rows = torch.arange(num_rows)[first.cpu() if isinstance(first, Tensor) else first]
    at = first if isinstance(first, slice) else rows
    return [(rows.numpy(), itemgetter(at))], False, rest


def _call(
    func: Func, args: Sequence[Any], kwargs: Kwargs, nth: int | None, tensor: Tensor
) -> Tensor:
    found = func(tensor, *args, **kwargs)
    result: Tensor = found if nth is None else found[nth]
    return result


def _is_along_rows(func: Func, args: Sequence[Any], kwargs: Kwargs, num_dims: int) -> bool:
    """Whether the dimension that it works on is the batch's, and that one alone."""
    name, at = func.__name__, _DIM_AT[func]
    default = None if name == "roll" and num_dims > 1 else 0
    dims = kwargs.get("dims", kwargs.get("dim", args[at] if len(args) > at else default))
    if name == "flip" and len(args) > 1:
        dims = args
    dims = list(dims) if isinstance(dims, list | tuple) else [dims]
    return dims in ([0], [-num_dims])
