"""What travels with a batch: its sample IDs, and where it may enter the model.

The IDs are carried by the tensors themselves, never by a global "current batch": a wrapper that
fetches one batch ahead would silently shift that by one. A `BatchTensor` survives the moves and
casts of an ordinary training loop, which it records; any other function sees the plain data. When
the data was not loaded (the sample is in the cache) it is loaded then: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from egeria_cache.batch.batch import Batch
from egeria_cache.batch.chain import IN_PLACE, Op, outside_inference_mode
from egeria_cache.batch.lost import note_lost
from egeria_cache.batch.selection import selected_rows
from egeria_cache.batch.structure import Rows, merge_rows, own_containers, take_rows
from egeria_cache.batch.vouch import Vouched

__all__ = ["BatchTensor", "batch_tensors", "unwrap"]


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
            leaf = ""
            at = next((i for i, arg in enumerate(args) if isinstance(arg, BatchTensor)), None)
            leaf = ""
            if at is not None:
                tagged = args[at]
                leaf = tagged.leaf
                result = tagged._recorded(func, [*args[:at], *args[at + 1 :]], kwargs, at)
                if result is not None:
                    return result
                if at == 0 and _is_in_place(func):
                    tagged._become_plain()
            args, kwargs = unwrap(args), unwrap(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            note_lost(func, leaf, result)
            return result

    def _recorded(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], at: int
    ) -> Any:
        """Do what can be recorded; None if this cannot be. The tensor is the argument at `at`."""
        if func in _GIVES_THE_MEMORY and not self.is_cpu:
            self._vouched.let_go()  # what is written to it elsewhere, nobody sees
        if not self._looks_intact:
            return None
        chosen = selected_rows(func, args, kwargs, self) if at == 0 else None
        if chosen is not None:
            parts = [self._select(rows, part) for rows, part in chosen.parts]
            if any(part is None for part in parts):
                return None
            if chosen.rest is not None:
                return parts[0]._recorded(func, [chosen.rest], {}, 0)  # type: ignore[union-attr]
            return tuple(parts) if chosen.is_tuple else parts[0]
        op = Op.record(IN_PLACE.get(func, func), args, kwargs, self, at)
        if op is None or func not in IN_PLACE:
            return None if op is None else self._apply(op)
        is_done = op.keeps_dtype(self) and self._apply_in_place(op)
        return self if is_done else None

    def _select(self, rows: np.ndarray, part: Callable[[Tensor], Tensor]) -> BatchTensor | None:
        """Return these rows as a batch of their own; `part` takes them from a tensor."""
        data = self.full()
        if not self._vouched.holds(data):
            return None
        return _loaded(part(data), self.batch.select(rows), self.leaf, self.chain)

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

    def _select(self, rows: np.ndarray, part: Callable[[Tensor], Tensor]) -> BatchTensor | None:
        if self._full is not None:
            return super()._select(rows, part)
        if not self.intact:
            return None
        batch, mask = self.batch.select(rows), self.batch.absent
        assert mask is not None
        meta = part(self._meta)
        misses = None
        if not mask[rows].all():
            if batch.absent is None:  # misses alone: they are all there
                return super()._select(rows, part)
            assert self._misses is not None
            at = (np.cumsum(~mask) - 1)[rows[~mask[rows]]]
            misses = self._misses[torch.from_numpy(at).to(self._misses.device)]
        result = _absent(meta, batch, self.leaf, self.chain, misses, self.device)
        if meta._is_view():
            result._alias = self, Op(part, (), {}, key="")
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
