"""A leaf of a batch whose samples are in the cache: it has shape, dtype and device, but no data.

What is recorded is done to its description. Where a function needs the data, it is loaded from the
data set, once, and the tensor is from then on like any other of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from egeria_cache.batch.batch import Batch, Vouched
from egeria_cache.batch.chain import Fold, Op, Raw, Slot, derived
from egeria_cache.batch.structure import Rows, merge_rows
from egeria_cache.batch.tensor import BatchTensor, unwrap
from egeria_cache.device import located, uploaded
from egeria_cache.threads import outside_inference_mode, without_modes

_CPU = torch.device("cpu")


def without_data(
    meta: Tensor,
    batch: Batch,
    leaf: str,
    misses: Tensor | None = None,
    *,
    device: torch.device | None = None,
    raw: Raw | None = None,
    chain: tuple[Op, ...] = (),
) -> AbsentTensor:
    """Stand for a leaf whose hits were not loaded.

    Args:
        meta: Meta tensor of the whole leaf's shape, dtype and strides.
        batch: The batch, with an entry.
        leaf: Path of the leaf.
        misses: The loaded rows, those where `batch.entry.hit` is False; None if there are none.
        device: Where it would be, with its index; None: where the misses are, or on the host.
        raw: The leaf as it was given out; None: as it is.
        chain: What was done to it since.
    """
    device = device or (_CPU if misses is None else misses.device)
    tensor: AbsentTensor = Tensor._make_wrapper_subclass(
        AbsentTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
    )
    vars(tensor).update(
        batch=batch, leaf=leaf, raw=raw or (meta.shape, meta.stride(), meta.dtype), chain=chain,
        _meta=meta, _misses=misses, _full=None, _alias=None, _is_shared=False,
        _vouched=None if misses is None else Vouched(misses),
    )  # fmt: skip
    return tensor


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
        if self._full is None:
            with temporarily_clear_interpreter_stack(), without_modes():  # it is no part of them
                self._full = self._loaded()
                self._vouched = Vouched(self._full)
        return self._full

    def _loaded(self) -> Tensor:
        if self._alias is not None:
            other, op, _ = self._alias
            return op.run(other.full() if isinstance(other, BatchTensor) else other)
        absent = derived(self.leaf, self.chain, self.batch.load_absent(), self.device)
        mask = self.batch.absent
        assert mask is not None
        mask = self.fold.mask(mask)
        merged = absent if self._misses is None else merge_rows(mask, absent, self._misses)
        assert isinstance(merged, Tensor)
        return _with_layout(merged, self._meta)

    @property
    def intact(self) -> bool:
        """Whether the values, those that are there, are still what samples and `chain` say."""
        if self._full is None and self._misses is None and self._alias is None:
            return not self.chain or not self.chain[-1].opens
        return self.has_rows_first and self.holds()

    def holds(self) -> bool:
        """Whether that is so, wherever the rows stand."""
        if self._alias is not None and not _holds(self._alias[0], self._alias[2]):
            return False
        data = self._misses if self._full is None else self._full
        with torch._C.DisableTorchFunctionSubclass(), outside_inference_mode():
            return data is None or self._vouched.holds(data)

    @property
    def _looks_intact(self) -> bool:
        if self._alias is not None and not _holds(self._alias[0], self._alias[2]):
            return False
        return self._full is None or self._vouched.unchanged(self._full)

    @property
    def described(self) -> Tensor:
        """A meta tensor of the same shape, dtype and strides."""
        return self._meta

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

    @property
    def has_data(self) -> bool:
        """Whether its data are there."""
        return self._full is not None

    def _apply(self, op: Op, parts: Sequence[BatchTensor]) -> BatchTensor:
        if self._full is not None:
            return super()._apply(op, parts)
        if not all(part.holds() for part in parts):
            raise LookupError("a leaf was written to")
        first, device = parts[0], op.device or self.device
        misses = None
        if self._misses is not None:
            own = [part.misses() for part in parts]
            misses = op.apply(own)
            device = misses.device
        metas = [part.described for part in parts]
        meta = op.apply(metas)
        is_here = device == self.device if device.type == "cpu" else located(device) == self.device
        is_same = is_here and (misses is None or misses is own[0])  # "cpu:0" is "cpu" elsewhere
        if is_same and op.is_nothing(metas[0], meta):
            return first
        result = without_data(
            meta, first.batch, first.leaf, misses,
            device=located(device), raw=first.raw, chain=(*first.chain, op),
        )  # fmt: skip
        if first is self and device == self.device and op.aliases(metas[0], meta):
            result._alias = self, op, self.chain
            self._is_shared = True
        return first._followed(op, result)

    def _select(self, rows: np.ndarray, part: Callable[[Tensor], Tensor]) -> BatchTensor | None:
        if self._full is not None:
            return super()._select(rows, part)
        if not self.holds() or self.fold != Fold():
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
        result = without_data(
            meta, batch, self.leaf, misses, device=self.device, raw=self.raw, chain=self.chain
        )
        if meta._is_view():
            result._alias = self, Op(part, (Slot(0),), {}, key=""), self.chain
            self._is_shared = True
        return result

    def _apply_in_place(self, op: Op, parts: Sequence[BatchTensor]) -> None:
        if self._full is not None or self._is_shared or self._alias is not None:
            self.full()
            super()._apply_in_place(op, parts)
            return
        if not all(part.holds() for part in parts):
            raise LookupError("a leaf was written to")
        if self._misses is not None:
            self._misses = op.apply([part.misses() for part in parts])
            self._vouched = Vouched(self._misses)
        self.chain = (*self.chain, op)

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


def _with_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """Give `tensor` the strides of the meta tensor `like` (channels_last stays channels_last)."""
    if tensor.stride() == like.stride():
        return tensor
    out = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)


def _holds(tensor: Tensor, chain: tuple[Op, ...]) -> bool:
    """Whether nothing was done to a tensor since a view of it was made."""
    return isinstance(tensor, BatchTensor) and tensor.chain is chain and tensor.holds()
