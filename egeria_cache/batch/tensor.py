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

from egeria_cache.batch.chain import Op, outside_inference_mode
from egeria_cache.batch.seeds import SampleId
from egeria_cache.batch.structure import Rows, merge_rows, take_rows

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
        self._versions = {p: t._version for p, t in leaves.items() if isinstance(t, Tensor)}

    @property
    def entry(self) -> Entry | None:
        """Where the hits may enter the model now; None once their generation was voided."""
        entry = self._planned_entry
        return entry if entry is not None and entry.alive else None

    @property
    def absent(self) -> np.ndarray | None:
        """Bool mask of the rows whose dropped leaves were not loaded; None if all were."""
        return None if self._planned_entry is None else self._planned_entry.hit

    def load_rows(self, rows: np.ndarray) -> Mapping[str, Rows]:
        """Load the masked rows of all leaves from the dataset, as they were loaded before."""
        return self._load_rows(rows)

    def load_absent(self, leaf: str) -> Rows:
        """Return the raw rows of `leaf` that were not loaded with the batch (loads them once)."""
        assert self.absent is not None, "every row was loaded with the batch"
        if self._loaded is None:
            self._loaded = self._load_rows(self.absent)
        return self._loaded[leaf]

    def rows_of(self, leaf: str, rows: np.ndarray | None) -> Rows | None:
        """Return `leaf` for the masked rows (None: all), as it was yielded.

        None if that would take loading it, or if the loop has changed it in place since.
        """
        values = self.leaves.get(leaf)
        if values is None:
            return None
        if isinstance(values, Tensor) and values._version != self._versions[leaf]:
            return None
        if len(values) == self.size:
            return values if rows is None else take_rows(values, rows)
        if self.absent is None:
            return None
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
    chain: tuple[Op, ...]
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

    def rows(self, mask: np.ndarray, loaded: Mapping[str, Rows]) -> Tensor:
        """Return the plain masked rows, after `chain`, without loading the others.

        Args:
            mask: Bool, shape (B,).
            loaded: What `batch.load_rows(mask)` gave; used if this leaf's own rows are absent.
        """
        rows = take_rows(self.full(), mask)
        assert isinstance(rows, Tensor)
        return rows

    def _let_go(self) -> None:
        """Trust the data no more: it may now be written to without its version telling."""
        self._data_version = -1
        self.batch._versions[self.leaf] = -1

    def _apply(self, op: Op) -> BatchTensor:
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
        if torch.compiler.is_compiling():  # inside it nothing is cached; nor may its graph break
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass(), outside_inference_mode():
            if func in _ABOUT_THE_TENSOR:
                return func(*args, **kwargs)
            first = args[0] if args else None
            if isinstance(first, BatchTensor) and first.intact:
                op = Op.record(func, args[1:], kwargs)
                if op is not None:
                    return first._apply(op)
            args, kwargs = unwrap(args), unwrap(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _GIVES_THE_MEMORY and isinstance(first, BatchTensor):
            first._let_go()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)

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
        if self._full is None:
            return self._data_version >= 0
        return self._full._version == self._data_version

    def misses(self) -> Tensor:
        if self._misses is None:
            return super().misses()
        return self._misses

    def rows(self, mask: np.ndarray, loaded: Mapping[str, Rows]) -> Tensor:
        if self._full is not None:
            return super().rows(mask, loaded)
        rows = loaded[self.leaf]
        assert isinstance(rows, Tensor)
        rows = rows.to(self.device)
        for op in self.chain:
            rows = op.run(rows)
        return rows

    def _apply(self, op: Op) -> BatchTensor:
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


def _loaded(data: Tensor, batch: Batch, leaf: str, chain: tuple[Op, ...]) -> BatchTensor:
    tensor = data.as_subclass(BatchTensor)
    tensor.batch, tensor.leaf, tensor.chain = batch, leaf, chain
    tensor._data_version = data._version
    return tensor


def _absent(
    meta: Tensor,
    batch: Batch,
    leaf: str,
    chain: tuple[Op, ...],
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


_GIVES_THE_MEMORY = {
    Tensor.numpy, Tensor.__array__, Tensor.data.__get__, Tensor.data_ptr,  # type: ignore[attr-defined]
    Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__,
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
    with outside_inference_mode():
        return _unwrap(tree)


def _unwrap(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.full() if _is_batch_tensor(leaf) else leaf, tree)


def batch_tensors(tree: Any) -> list[BatchTensor]:
    """Return the intact `BatchTensor`s in any pytree, in order."""
    return [leaf for leaf in tree_leaves(tree) if _is_batch_tensor(leaf) and leaf.intact]
