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

from egeria_cache.batch.chain import IN_PLACE, Op, outside_inference_mode
from egeria_cache.batch.lost import forget_lost, note_lost
from egeria_cache.batch.seeds import SampleId
from egeria_cache.batch.structure import Rows, merge_rows, own_containers, take_rows
from egeria_cache.batch.vouch import Vouched, held

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
        may_be_stored: bool = True,
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
            may_be_stored: Whether what it holds has to be vouched for by content.
        """
        forget_lost()
        self.ids = ids
        self.size = len(ids)
        self.variant = variant
        self.loader_name = loader_name
        keep = {
            path: held(rows) if may_be_stored else (rows, None) for path, rows in leaves.items()
        }
        self.leaves = {path: rows for path, (rows, _) in keep.items()}
        """As they were handed out: what the loop does to its own is not done to these."""
        self.may_be_stored = may_be_stored
        self.context = context
        self._load_rows = load_rows
        self._planned_entry = entry
        self._loaded: Mapping[str, Rows] | None = None
        self._vouched = {path: vouched for path, (_, vouched) in keep.items() if vouched}

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

        None if that would take loading it, or if it is large and was written to since.
        """
        values, vouched = self.leaves.get(leaf), self._vouched.get(leaf)
        if values is None or (vouched is not None and not vouched.holds(values)):  # type: ignore[arg-type]
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
    _vouched: Vouched

    @staticmethod
    def wrap(data: Tensor, batch: Batch, leaf: str) -> BatchTensor:
        """Tag a fully loaded leaf. The data is shared, not copied."""
        return _loaded(data, batch, leaf, (), batch._vouched.get(leaf))

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
        """Whether the values are still exactly what samples and `chain` say, by content.

        False after the user changed the data; such a tensor is an ordinary one.
        """
        with torch._C.DisableTorchFunctionSubclass(), outside_inference_mode():
            return self._vouched.holds(self)

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

    def _apply(self, op: Op) -> BatchTensor | None:
        """Return the result of an operation; None if the data is not what it should be."""
        data = self.full()
        if not self._vouched.holds(data):
            return None
        result = op.run(data)
        return _loaded(result, self.batch, self.leaf, (*self.chain, op), self._vouched)

    def _apply_in_place(self, op: Op) -> bool:
        """Do an operation to the data itself; False if nothing was done."""
        data = self.full()
        if not self._vouched.holds(data):
            return False
        data.copy_(op.run(data))
        self.chain = (*self.chain, op)
        self._vouched = Vouched(data, by_content=self.batch.may_be_stored)
        return True

    def _become_plain(self) -> None:
        """Make this very object an ordinary tensor: it is about to be changed in place."""
        self.__dict__.clear()
        self.__class__ = Tensor  # type: ignore[assignment]

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
            if isinstance(first, BatchTensor):
                result = first._recorded(func, args[1:], kwargs)
                if result is not None:
                    return result
                if _is_in_place(func):
                    first._become_plain()
            leaf = first.leaf if isinstance(first, BatchTensor) else ""
            args, kwargs = unwrap(args), unwrap(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            note_lost(func, leaf, result)
            return result

    def _recorded(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BatchTensor | None:
        """Do what can be recorded; None if this cannot be."""
        if func in _GIVES_THE_MEMORY and not self.is_cpu:
            self._vouched.let_go()  # what is written to it elsewhere, nobody sees
        if not self._looks_intact:
            return None
        op = Op.record(IN_PLACE.get(func, func), args, kwargs)
        if op is None or func not in IN_PLACE:
            return None if op is None else self._apply(op)
        is_done = op.keeps_dtype(self) and self._apply_in_place(op)
        return self if is_done else None

    @property
    def _looks_intact(self) -> bool:
        return self._vouched.unchanged(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full().clone()


class _AbsentTensor(BatchTensor):
    """A `BatchTensor` without storage: shape, dtype and device, and perhaps the misses' rows."""

    _meta: Tensor
    _misses: Tensor | None
    _full: Tensor | None
    _is_shared: bool
    """Whether another tensor would share the memory of this one."""
    _alias: tuple[Tensor, Op] | None
    """The tensor whose memory this one would share, and the operation that leads from it to here.

    What is written to one then shows in the other, as it does where data is."""

    def full(self) -> Tensor:
        if self._full is None and self._alias is not None:
            other, op = self._alias
            self._full = op.run(other.full() if isinstance(other, BatchTensor) else other)
            self._vouched = Vouched(self._full)
        elif self._full is None:
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
            self._vouched = Vouched(self._full)
        return self._full

    @property
    def intact(self) -> bool:
        if self._alias is not None and not _is_intact(self._alias[0]):
            return False
        data = self._misses if self._full is None else self._full
        with torch._C.DisableTorchFunctionSubclass(), outside_inference_mode():
            return data is None or self._vouched.holds(data)

    @property
    def _looks_intact(self) -> bool:
        if self._alias is not None and not _is_intact(self._alias[0]):
            return False
        return self._full is None or self._vouched.unchanged(self._full)

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

    def _apply(self, op: Op) -> BatchTensor | None:
        if self._full is not None:
            return super()._apply(op)
        if not self.intact:
            return None
        misses = None if self._misses is None else op.run(self._misses)
        meta = op.run(self._meta)
        device = misses.device if misses is not None else (op.device or self.device)
        result = _absent(meta, self.batch, self.leaf, (*self.chain, op), misses, device)
        if device == self.device and op.aliases(self._meta, meta):
            result._alias = self, op
            self._is_shared = True
        return result

    def _apply_in_place(self, op: Op) -> bool:
        if self._full is not None or self._is_shared or self._alias is not None:
            self.full()
            return super()._apply_in_place(op)
        if not self.intact:
            return False
        if self._misses is not None:
            self._misses = op.run(self._misses)
            self._vouched = Vouched(self._misses)
        self.chain = (*self.chain, op)
        return True

    def _become_plain(self) -> None:
        data = self.full().as_subclass(Tensor)
        torch._C._swap_tensor_impl(self, data)
        super()._become_plain()

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


def _loaded(
    data: Tensor,
    batch: Batch,
    leaf: str,
    chain: tuple[Op, ...],
    known: Vouched | None = None,
) -> BatchTensor:
    """Tag data; `known` vouches for what may be the same memory."""
    vouched = None if known is None else known.carry_over(data)
    tensor = data.as_subclass(BatchTensor)
    tensor.batch, tensor.leaf, tensor.chain = batch, leaf, chain
    tensor._vouched = vouched or Vouched(data, by_content=batch.may_be_stored)
    return tensor


def _absent(
    meta: Tensor,
    batch: Batch,
    leaf: str,
    chain: tuple[Op, ...],
    misses: Tensor | None,
    device: torch.device | None,
) -> _AbsentTensor:
    tensor: _AbsentTensor = Tensor._make_wrapper_subclass(
        _AbsentTensor,
        meta.shape,
        strides=meta.stride(),
        dtype=meta.dtype,
        device=device or torch.device("cpu"),
    )
    tensor.batch, tensor.leaf, tensor.chain = batch, leaf, chain
    tensor._meta, tensor._misses, tensor._full = meta, misses, None
    tensor._alias, tensor._is_shared = None, False
    if misses is not None:
        tensor._vouched = Vouched(misses)
    return tensor


def _with_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """Give `tensor` the strides of the meta tensor `like` (channels_last stays channels_last)."""
    if tensor.stride() == like.stride():
        return tensor
    out = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)


_WRITES = {
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
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


def _is_intact(tensor: Tensor) -> bool:
    return isinstance(tensor, BatchTensor) and tensor.intact


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _is_batch_tensor(value: Any) -> TypeGuard[BatchTensor]:
    return isinstance(value, BatchTensor)


def unwrap(tree: Any) -> Any:
    """Return `tree` with every `BatchTensor` replaced by its plain data, loaded where needed."""
    with outside_inference_mode():
        return _unwrap(tree)


def _unwrap(tree: Any) -> Any:
    plain = tree_map(lambda leaf: leaf.full() if _is_batch_tensor(leaf) else leaf, tree)
    return own_containers(tree, plain)


def batch_tensors(tree: Any) -> list[BatchTensor]:
    """Return the intact `BatchTensor`s in any pytree, in order."""
    return [leaf for leaf in tree_leaves(tree) if _is_batch_tensor(leaf) and leaf.intact]
