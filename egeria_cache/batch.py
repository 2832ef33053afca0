"""What travels with a batch: its sample IDs, and where it may enter the model.

The IDs are carried by the tensors themselves, never by a global "current batch": a wrapper that
fetches one batch ahead would silently shift that by one. A `BatchTensor` survives the moves and
casts of an ordinary training loop, which it records; any other function sees the plain data. When
the data was not loaded (the sample is in the cache) it is loaded then: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from egeria_cache.seeds import SampleId
from egeria_cache.structure import Rows, merge_rows, take_rows

__all__ = ["Batch", "BatchTensor", "Entry", "batch_tensors", "unwrap"]


class Entry(Protocol):
    """Where, and with which rows, a batch may enter the model instead of at its input."""

    @property
    def cut(self) -> Any:
        """The `Cut` that the stored activations were captured at."""

    @property
    def hit(self) -> np.ndarray:
        """Bool, shape (B,): the rows that come from the cache; at least one is True."""

    @property
    def alive(self) -> bool:
        """False once the generation was voided: its activations must not be used any more."""

    def load(self) -> dict[str, Tensor]:
        """Return the hits' activations by name, in row order, on the model's device.

        Raises:
            LookupError: They can no longer be had; the caller computes them from the raw samples.
        """


class Batch:
    """All that is known about one batch, shared by its tensors."""

    def __init__(
        self,
        *,
        ids: Sequence[SampleId],
        variant: int,
        loader_name: str,
        leaves: Mapping[str, Rows],
        load_rows: Callable[[np.ndarray], Mapping[str, Rows]],
        entry: Entry | None = None,
        context: Any = None,
    ) -> None:
        """Collect a batch.

        Args:
            ids: Sample IDs in row order.
            variant: Which augmented version of the samples this is.
            loader_name: The loader's `name`.
            leaves: The leaves by path. With an entry, a leaf that its cut drops holds the rows of
                the misses alone (and is absent where every row is a hit).
            load_rows: Loads the raw rows where its mask is True, from the dataset.
            entry: Where the hits enter the model; None if every row was loaded.
            context: For whoever made the batch.
        """
        self.ids = ids
        self.size = len(ids)
        self.variant = variant
        self.loader_name = loader_name
        self.leaves = leaves
        self.context = context
        self._load_rows = load_rows
        self._planned_entry = entry
        self._loaded: Mapping[str, Rows] | None = None

    @property
    def entry(self) -> Entry | None:
        """Where the hits may enter the model now; None once their generation was voided."""
        entry = self._planned_entry
        return entry if entry is not None and entry.alive else None

    @property
    def absent(self) -> np.ndarray | None:
        """Bool mask of the rows whose dropped leaves were not loaded; None if all were."""
        return None if self._planned_entry is None else self._planned_entry.hit

    def load_absent(self, leaf: str) -> Rows:
        """Return the raw rows of `leaf` that were not loaded with the batch (loads them once)."""
        assert self.absent is not None, "every row was loaded with the batch"
        if self._loaded is None:
            self._loaded = self._load_rows(self.absent)
        return self._loaded[leaf]

    def rows_of(self, leaf: str, rows: np.ndarray | None) -> Rows | None:
        """Return `leaf` for the masked rows (None: all) without loading anything, if it can be."""
        values = self.leaves.get(leaf)
        if values is None:
            return None
        if len(values) == self.size:
            return values if rows is None else take_rows(values, rows)
        assert self.absent is not None
        loaded = ~self.absent
        if rows is None or (rows & ~loaded).any():
            return None
        return take_rows(values, rows[loaded])


class BatchTensor(Tensor):
    """A leaf of a loader's batch that knows its samples. See the module's text.

    `shape`, `dtype` and `device` are those of the whole leaf, whether or not its data is loaded.
    """

    batch: Batch
    leaf: str
    chain: tuple[_Op, ...]
    _data_version: int

    @staticmethod
    def wrap(data: Tensor, batch: Batch, leaf: str) -> BatchTensor:
        """Tag a fully loaded leaf. The data is shared, not copied."""
        return _loaded(data, batch, leaf, ())

    @staticmethod
    def without_data(
        meta: Tensor, batch: Batch, leaf: str, misses: Tensor | None = None
    ) -> BatchTensor:
        """Stand for a leaf whose hits were not loaded.

        Args:
            meta: Meta tensor of the whole leaf's shape, dtype and strides.
            batch: The batch, with an entry.
            leaf: Path of the leaf.
            misses: The loaded rows, those where `batch.entry.hit` is False; None if there are none.
        """
        return _absent(meta, batch, leaf, (), misses, misses.device if misses is not None else None)

    @property
    def chain_key(self) -> str:
        """The recorded operations that change values, as stable text; empty when there are none."""
        return ";".join(op.key for op in self.chain if op.key)

    @property
    def intact(self) -> bool:
        """Whether the values are still exactly what samples and `chain` say.

        False after the user changed the data in place; such a tensor is an ordinary one.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self._version == self._data_version

    def full(self) -> Tensor:
        """Return the plain tensor with all rows, after `chain`."""
        return self.as_subclass(Tensor)

    def misses(self) -> Tensor:
        """Return the plain rows that were not planned as hits, after `chain`."""
        entry = self.batch.entry
        assert entry is not None, "a batch without an entry has no hits to leave out"
        rows = take_rows(self.full(), ~entry.hit)
        assert isinstance(rows, Tensor)
        return rows

    def _apply(self, op: _Op) -> BatchTensor:
        result = op.run(self.full())
        return _loaded(result, self.batch, self.leaf, (*self.chain, op))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT_THE_TENSOR:
                return func(*args, **kwargs)
            first = args[0] if args else None
            if isinstance(first, BatchTensor) and first.intact:
                op = _Op.record(func, args[1:], kwargs)
                if op is not None:
                    return first._apply(op)
            return func(*unwrap(args), **unwrap(kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full().clone()


class _AbsentTensor(BatchTensor):
    """A `BatchTensor` without storage: shape, dtype and device, and perhaps the misses' rows."""

    _meta: Tensor
    _misses: Tensor | None
    _full: Tensor | None

    def full(self) -> Tensor:
        if self._full is None:
            absent = self.batch.load_absent(self.leaf)
            assert isinstance(absent, Tensor)
            absent = absent.to(self.device)
            for op in self.chain:
                absent = op.run(absent)
            mask = self.batch.absent
            assert mask is not None
            merged = absent if self._misses is None else merge_rows(mask, absent, self._misses)
            assert isinstance(merged, Tensor)
            self._full = _with_layout(merged, self._meta)
            self._data_version = self._full._version
        return self._full

    @property
    def intact(self) -> bool:
        return self._full is None or self._full._version == self._data_version

    def misses(self) -> Tensor:
        if self._misses is None:
            return super().misses()
        return self._misses

    def _apply(self, op: _Op) -> BatchTensor:
        if self._full is not None:
            return super()._apply(op)
        misses = None if self._misses is None else op.run(self._misses)
        meta = op.run(self._meta)
        device = misses.device if misses is not None else (op.device or self.device)
        return _absent(meta, self.batch, self.leaf, (*self.chain, op), misses, device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"BatchTensor(leaf={self.leaf!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={str(self.device)!r}, not loaded: its samples are in the cache)"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Reached only from C++ that bypasses __torch_function__: give it the data.
        return func(*unwrap(args), **unwrap(kwargs or {}))


def _loaded(data: Tensor, batch: Batch, leaf: str, chain: tuple[_Op, ...]) -> BatchTensor:
    tensor = data.as_subclass(BatchTensor)
    tensor.batch, tensor.leaf, tensor.chain = batch, leaf, chain
    tensor._data_version = data._version
    return tensor


def _absent(
    meta: Tensor,
    batch: Batch,
    leaf: str,
    chain: tuple[_Op, ...],
    misses: Tensor | None,
    device: torch.device | None,
) -> BatchTensor:
    tensor: _AbsentTensor = Tensor._make_wrapper_subclass(
        _AbsentTensor,
        meta.shape,
        strides=meta.stride(),
        dtype=meta.dtype,
        device=device or torch.device("cpu"),
    )
    tensor.batch, tensor.leaf, tensor.chain = batch, leaf, chain
    tensor._meta, tensor._misses, tensor._full = meta, misses, None
    tensor._data_version = 0
    return tensor


def _with_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """Give `tensor` the strides of the meta tensor `like` (channels_last stays channels_last)."""
    if tensor.stride() == like.stride():
        return tensor
    out = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)


class _Op:
    """One recorded operation on a leaf: pure, per sample, and without other tensors."""

    __slots__ = ("args", "device", "func", "key", "kwargs")

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        key: str,
        device: torch.device | None,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.key, self.device = key, device

    @classmethod
    def record(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Op | None:
        """Return the operation, or None if it is not one that may be repeated on other rows."""
        if func in _MOVES:
            return cls._move(func, args, kwargs)
        if func not in _ARITHMETIC or not all(
            isinstance(value, int | float) for value in (*args, *kwargs.values())
        ):
            return None
        key = f"{func.__name__}{tuple(args)!r}{dict(sorted(kwargs.items())) or ''}"
        return cls(func, tuple(args), kwargs, key=key, device=None)

    @classmethod
    def _move(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Op | None:
        if func is not Tensor.to:
            device = torch.device("cuda") if func is Tensor.cuda else None
            device = torch.device("cpu") if func is Tensor.cpu else device
            if func is Tensor.cuda and (args or kwargs.get("device") is not None):
                where = args[0] if args else kwargs["device"]
                device = torch.device("cuda", where) if isinstance(where, int) else where
                device = torch.device(device) if isinstance(device, str) else device
            text = f"{func.__name__}({kwargs.get('memory_format', '')})"
            key = "" if func in _KEEPS_VALUES and not kwargs.get("memory_format") else text
            return cls(func, tuple(args), kwargs, key=key, device=device)
        if any(isinstance(value, BatchTensor) for value in (*args, *kwargs.values())):
            return None
        other = {k: v for k, v in kwargs.items() if k not in ("copy", "other")}
        if "other" in kwargs:
            args = (kwargs["other"], *args)
        rest = args[:3] if len(args) > 3 else args
        device, dtype, _, memory_format = torch._C._nn._parse_to(*rest, **other)
        key = "".join(f"to({value})" for value in (dtype, memory_format) if value is not None)
        return cls(func, tuple(args), kwargs, key=key, device=device)

    def run(self, data: Tensor) -> Tensor:
        """Apply the operation to some rows (or, without moving it, to a meta tensor)."""
        if data.is_meta and self.func in _MOVES:
            return self._run_meta(data)
        result: Tensor = self.func(data, *self.args, **self.kwargs)
        return result

    def _run_meta(self, meta: Tensor) -> Tensor:
        if self.func in _KEEPS_VALUES:
            memory_format = self.kwargs.get("memory_format")
            return meta if memory_format is None else meta.contiguous(memory_format=memory_format)
        if self.func is not Tensor.to:
            result: Tensor = self.func(meta, *self.args, **self.kwargs)
            return result
        kwargs = {k: v for k, v in self.kwargs.items() if k not in ("copy", "other")}
        args = (self.kwargs["other"], *self.args) if "other" in self.kwargs else self.args
        _, dtype, _, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
        meta = meta if dtype is None else meta.to(dtype)
        return meta if memory_format is None else meta.to(memory_format=memory_format)


_KEEPS_VALUES = {
    Tensor.cuda, Tensor.cpu, Tensor.pin_memory, Tensor.contiguous, Tensor.clone, Tensor.detach,
}  # fmt: skip
_MOVES = _KEEPS_VALUES | {
    Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.long, Tensor.int,
}  # fmt: skip
_ARITHMETIC = {
    Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, torch.add, torch.sub, torch.mul, torch.div,
    Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.__truediv__,
    Tensor.__radd__, Tensor.__rmul__,
}  # fmt: skip
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "requires_grad", "is_leaf",
               "grad", "is_sparse", "_version")  # fmt: skip
_ABOUT_THE_TENSOR = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.is_contiguous,
    Tensor.__hash__, Tensor.get_device, Tensor.is_pinned,
}  # fmt: skip


def _is_batch_tensor(value: Any) -> TypeGuard[BatchTensor]:
    return isinstance(value, BatchTensor)


def unwrap(tree: Any) -> Any:
    """Return `tree` with every `BatchTensor` replaced by its plain data, loaded where needed."""
    return tree_map(lambda leaf: leaf.full() if _is_batch_tensor(leaf) else leaf, tree)


def batch_tensors(tree: Any) -> list[BatchTensor]:
    """Return the intact `BatchTensor`s in any pytree, in order."""
    return [leaf for leaf in tree_leaves(tree) if _is_batch_tensor(leaf) and leaf.intact]
