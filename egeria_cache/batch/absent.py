"""A leaf of a batch whose samples are in the cache: it has shape, dtype and device, but no data.

What is recorded is done to its description. Where a function needs the data, it is loaded from the
data set, once, and the tensor is from then on like any other of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.batch.batch import Batch
from egeria_cache.batch.chain import Join, Op, derived, outside_inference_mode
from egeria_cache.batch.fold import Fold
from egeria_cache.batch.structure import Beside, Rows, merge_rows
from egeria_cache.batch.tensor import BatchTensor, unwrap
from egeria_cache.batch.vouch import Vouched
from egeria_cache.device import located, uploaded

__all__ = ["AbsentBeside", "AbsentTensor", "without_data"]


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


class AbsentTensor(BatchTensor):
    """A `BatchTensor` without storage: shape, dtype and device, and perhaps the misses' rows."""

    _meta: Tensor
    _misses: Tensor | None
    _full: Tensor | None
    _is_shared: bool
    """Whether another tensor would share the memory of this one."""
    _alias: tuple[Tensor, Op, tuple[Op, ...]] | None
    """The tensor whose memory this one would share, the operation that leads from it to here, and
    what had been done to that.

    What is written to one then shows in the other, as it does where data is."""

    def full(self) -> Tensor:
        """Return the plain tensor with all rows, loaded now if need be."""
        if self._full is None and self._alias is not None:
            other, op, _ = self._alias
            self._full = op.run(other.full() if isinstance(other, BatchTensor) else other)
            self._vouched = Vouched(self._full)
        elif self._full is None:
            absent = derived(self.leaf, self.chain, self.batch.load_absent(), self.device)
            mask = self.batch.absent
            assert mask is not None
            mask = self.fold.mask(mask)
            merged = absent if self._misses is None else merge_rows(mask, absent, self._misses)
            assert isinstance(merged, Tensor)
            self._full = _with_layout(merged, self._meta)
            self._vouched = Vouched(self._full)
        return self._full

    @property
    def _holds(self) -> bool:
        """Whether the values, those that are there, are what samples and `chain` say."""
        if self._alias is not None and not _is_intact(self._alias[0], self._alias[2]):
            return False
        data = self._misses if self._full is None else self._full
        with torch._C.DisableTorchFunctionSubclass(), outside_inference_mode():
            return data is None or self._vouched.holds(data)

    @property
    def _looks_intact(self) -> bool:
        if self._alias is not None and not _is_intact(self._alias[0], self._alias[2]):
            return False
        return self._full is None or self._vouched.unchanged(self._full)

    def misses(self) -> Tensor:
        """Return the plain rows that were not planned as hits, after `chain`."""
        if self._misses is None:
            return super().misses()
        return self._misses

    def rows(self, mask: np.ndarray, loaded: Mapping[str, Rows]) -> Tensor:
        """Return the plain masked rows, after `chain`, without loading the others."""
        if self._full is not None:
            return super().rows(mask, loaded)
        return derived(self.leaf, self.chain, loaded, self.device)

    def _apply(self, op: Op) -> BatchTensor | None:
        if self._full is not None:
            return super()._apply(op)
        if not self._holds:
            return None
        misses = None if self._misses is None else op.run(self._misses)
        meta = op.run(self._meta)
        device = misses.device if misses is not None else (op.device or self.device)
        is_here = device == self.device if device.type == "cpu" else located(device) == self.device
        is_same = is_here and misses is self._misses  # "cpu:0" is not "cpu": a copy is made
        if is_same and op.is_nothing(self._meta, meta):
            return self
        result = _absent(meta, self.batch, self.leaf, (*self.chain, op), misses, device)
        if device == self.device and op.aliases(self._meta, meta):
            result._alias = self, op, self.chain
            self._is_shared = True
        return self._followed(op, result)

    def _join(self, op: Join, parts: Sequence[BatchTensor]) -> BatchTensor | None:
        absent = [p for p in parts if isinstance(p, AbsentTensor) and p._full is None]
        if len(absent) < len(parts):
            return super()._join(op, parts)
        if not all(part._holds for part in absent):
            return None
        own = [part._misses for part in absent if part._misses is not None]
        misses = op.joined(own) if own else None
        meta = op.joined([part._meta for part in absent])
        return _absent(meta, self.batch, self.leaf, (*self.chain, op), misses, self.device)

    def _select(self, rows: np.ndarray, part: Callable[[Tensor], Tensor]) -> BatchTensor | None:
        if self._full is not None:
            return super()._select(rows, part)
        if not self.intact or self.fold != Fold():
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
            misses = self._misses[uploaded(torch.from_numpy(at), self._misses.device)]
        result = _absent(meta, batch, self.leaf, self.chain, misses, self.device)
        if meta._is_view():
            result._alias = self, Op(part, (), {}, key=""), self.chain
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


class AbsentBeside(Beside):
    """A `Beside` of which nothing was loaded: the whole batch is, when it is read."""

    def __init__(self, batch: Batch, leaf: str) -> None:
        super().__init__()
        self._batch, self._leaf = batch, leaf

    def _values(self) -> list[Any]:
        if not super().__len__():
            everything = np.ones(self._batch.size, bool)
            super().extend(self._batch.load_rows(everything)[self._leaf])
        return list(super().__iter__())

    def __len__(self) -> int:
        return self._batch.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __getitem__(self, at: Any) -> Any:
        return self._values()[at]

    def __contains__(self, value: object) -> bool:
        return value in self._values()

    def __eq__(self, other: object) -> bool:
        return self._values() == other

    def __reduce__(self) -> Any:
        return list, (self._values(),)


def _absent(
    meta: Tensor,
    batch: Batch,
    leaf: str,
    chain: tuple[Op, ...],
    misses: Tensor | None,
    device: torch.device | None,
) -> AbsentTensor:
    device = located(device or torch.device("cpu"))  # as for tensors with data
    tensor: AbsentTensor = Tensor._make_wrapper_subclass(
        AbsentTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
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


def _is_intact(tensor: Tensor, chain: tuple[Op, ...]) -> bool:
    """Whether nothing was done to a tensor since a view of it was made."""
    return isinstance(tensor, BatchTensor) and tensor.chain is chain and tensor._holds
