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

from egeria_cache.attempt import is_beside
from egeria_cache.batch.batch import Batch
from egeria_cache.batch.chain import IN_PLACE, JOINS, Join, Op, leaves_of, outside_inference_mode
from egeria_cache.batch.fold import Fold
from egeria_cache.batch.lost import note_lost
from egeria_cache.batch.selection import selected_rows
from egeria_cache.batch.structure import Rows, own_containers, take_rows
from egeria_cache.batch.vouch import Vouched
from egeria_cache.device import LEAF_FLAGS

__all__ = ["BatchTensor", "batch_tensors", "loaded_tensor", "unwrap"]


class BatchTensor(Tensor):
    """A leaf of a loader's batch that knows its samples. See the module's text.

    `shape`, `dtype` and `device` are those of the whole leaf, whether or not its data is loaded.
    """

    batch: Batch
    leaf: str
    chain: tuple[Op, ...]
    _vouched: Vouched
    _before: tuple[Tensor, int, Fold] | None = None
    """A meta of the leaf when each row was a sample's last, how long the chain was, and the fold
    then; None where it is."""

    _source: BatchTensor | None = None
    """What it was detached from."""

    @staticmethod
    def wrap(data: Tensor, batch: Batch, leaf: str) -> BatchTensor:
        """Tag a fully loaded leaf. The data is shared, not copied."""
        return loaded_tensor(data, batch, leaf, (), batch._vouched.get(leaf))

    @property
    def chain_key(self) -> str:
        """The recorded operations that change values, as stable text; empty when there are none."""
        return ";".join([op.key for op in self.chain if op.key]) if self.chain else ""

    @property
    def leaves(self) -> set[str]:
        """The leaves of the batch that it is made of."""
        return {self.leaf, *leaves_of(self.chain)}

    @property
    def fold(self) -> Fold:
        """Which of its rows belong to a sample."""
        return self.chain[-1].fold if self.chain else _PLAIN

    @property
    def intact(self) -> bool:
        """Whether the values are still exactly what samples and `chain` say, by content.

        False after the user changed the data; such a tensor is an ordinary one. So is one whose
        rows do not stand in the first dimension.
        """
        return self.has_rows_first and self._holds

    @property
    def has_rows_first(self) -> bool:
        """Whether samples stand in the first dimension; a view may have put them elsewhere."""
        return not self.chain or not self.chain[-1].opens

    @property
    def _holds(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass(), outside_inference_mode():
            return self._vouched.holds(self)

    def full(self) -> Tensor:
        """Return the plain tensor with all rows, after `chain`."""
        return self.as_subclass(Tensor)

    def misses(self) -> Tensor:
        """Return the plain rows that were not planned as hits, after `chain`."""
        entry = self.batch.entry
        assert entry is not None, "a batch without an entry has no hits to leave out"
        rows = take_rows(self.full(), self.fold.mask(~entry.hit))
        assert isinstance(rows, Tensor)
        return rows

    def rows(self, mask: np.ndarray, loaded: Mapping[str, Rows]) -> Tensor:
        """Return the plain masked rows, after `chain`, without loading the others.

        Args:
            mask: Bool, shape (B,).
            loaded: What `batch.load_rows(mask)` gave; used if this leaf's own rows are absent.
        """
        rows = take_rows(self.full(), self.fold.mask(mask))
        assert isinstance(rows, Tensor)
        return rows

    def _apply(self, op: Op) -> BatchTensor | None:
        """Return the result of an operation; None if the data is not what it should be."""
        data = self.full()
        if not self._vouched.holds(data):
            return None
        result = op.run(data)
        if result is data:
            return self
        applied = loaded_tensor(result, self.batch, self.leaf, (*self.chain, op), self._vouched)
        return self._followed(op, applied)

    def _join(self, op: Join, parts: Sequence[BatchTensor]) -> BatchTensor | None:
        """Return this and other leaves put together; None if they are not what they should be."""
        data = [part.full() for part in parts]
        if not all(part._vouched.holds(own) for part, own in zip(parts, data, strict=True)):
            return None
        return loaded_tensor(op.joined(data), self.batch, self.leaf, (*self.chain, op))

    def _followed(self, op: Op, result: BatchTensor) -> BatchTensor:
        if op.func is Tensor.detach:
            result._source = self
        known = self.fold if self._before is None else self._before[2]
        if op.opens or op.fold != known:
            shape, stride = self.shape, self.stride()
            meta = torch.empty_strided(shape, stride, dtype=self.dtype, device="meta")
            result._before = self._before or (meta, len(self.chain), known)
        return result

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
            at = next((i for i, arg in enumerate(args) if isinstance(arg, BatchTensor)), None)
            leaf = ""
            if at is not None or func in JOINS:
                tagged = args[at or 0]
                leaf = "" if at is None else tagged.leaf
                try:
                    if at is None:
                        result = _joined(func, tagged, args[1:], kwargs)
                    else:
                        result = tagged._recorded(func, [*args[:at], *args[at + 1 :]], kwargs, at)
                except Exception as error:
                    if not is_beside(error):
                        raise
                    result = None  # an error of the operation's own comes again, from the real call
                if result is not None:
                    return result
                if at == 0 and _is_in_place(func):
                    if func is Tensor.requires_grad_ and tagged._source is not None:
                        tagged._source._become_plain()  # it is trained: a `Parameter`, say
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
        before = None
        if self._before is not None:
            meta, done, fold = self._before
            before = meta, self.chain[done:], fold
        rows_first = at == 0 and self.has_rows_first
        chosen = selected_rows(func, args, kwargs, self) if rows_first else None
        if chosen is not None:
            parts = [self._select(rows, part) for rows, part in chosen.parts]
            if any(part is None for part in parts):
                return None
            if chosen.rest is not None:
                return parts[0]._recorded(func, [chosen.rest], {}, 0)  # type: ignore[union-attr]
            return tuple(parts) if chosen.is_tuple else parts[0]
        op = Op.record(IN_PLACE.get(func, func), args, kwargs, self, self.fold, at, before)
        if op is None or func not in IN_PLACE:
            return None if op is None else self._apply(op)
        is_done = op.keeps_dtype(self) and self._apply_in_place(op)
        return self if is_done else None

    def _select(self, rows: np.ndarray, part: Callable[[Tensor], Tensor]) -> BatchTensor | None:
        """Return these rows as a batch of their own; `part` takes them from a tensor."""
        data = self.full()
        if not self._vouched.holds(data) or self.fold != _PLAIN:
            return None
        return loaded_tensor(part(data), self.batch.select(rows), self.leaf, self.chain)

    @property
    def _looks_intact(self) -> bool:
        return self._vouched.unchanged(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full().clone()


def _joined(
    func: Callable[..., Any], parts: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> BatchTensor | None:
    """Return leaves of one batch put together; None if it is something else that is."""
    if not isinstance(parts, list | tuple) or not all(map(_is_batch_tensor, parts)):
        return None
    first = parts[0]
    if first.batch.lengths is not None:
        return None  # padding would have to be told of each
    for part in parts:
        if part.batch is not first.batch or part.fold.outer > 1 or part.fold != first.fold:
            return None
        if not part.has_rows_first or not part._looks_intact:
            return None
    named = [(part.leaf, part.chain, part.chain_key) for part in parts]
    op = Join.of(func, named, args, kwargs, first.dim(), first.fold)
    return None if op is None else first._join(op, parts)


_PLAIN = Fold()


def loaded_tensor(
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


_WRITES = {
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
_GIVES_THE_MEMORY = {
    Tensor.numpy, Tensor.__array__, Tensor.data.__get__, Tensor.data_ptr,  # type: ignore[attr-defined]
    Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__,
}  # fmt: skip
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad",
               "is_sparse", "_version", *LEAF_FLAGS)  # fmt: skip
_ABOUT_THE_TENSOR = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.is_contiguous,
    Tensor.__hash__, Tensor.get_device, Tensor.is_pinned,
}  # fmt: skip


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
