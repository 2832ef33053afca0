"""What travels with a batch: its sample IDs, and where it may enter the model.

The IDs are carried by the tensors themselves, never by a global "current batch": a wrapper that
fetches one batch ahead would silently shift that by one. A `BatchTensor` survives the moves and
casts of an ordinary training loop, which it records; any other function sees the plain data. When
the data was not loaded (the sample is in the cache) it is loaded then: slower, never wrong.

Such a leaf, an `AbsentTensor`, has shape, dtype and device, but no data. What is recorded is done
to its description. Where a function needs the data, it is loaded from the data set, once, and the
tensor is from then on like any other of its batch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves, tree_map

from egeria_cache import attempt
from egeria_cache.batch import batch as batches
from egeria_cache.batch.batch import Batch, Func, Kwargs, Leaves, Vouched
from egeria_cache.batch.chain import (
    PLAIN,
    Chained,
    Op,
    Ops,
    Raw,
    Slot,
    derived,
    name_of,
    selected_rows,
)
from egeria_cache.batch.trial import operation
from egeria_cache.device import LEAF_FLAGS, located


class BatchTensor(Chained, Tensor):
    """A leaf of a loader's batch that knows its samples. See the module's text.

    `shape`, `dtype` and `device` are those of the whole leaf, whether or not its data is loaded.
    """

    batch: Batch
    _vouched: Vouched

    @staticmethod
    def wrap(data: Tensor, batch: Batch, leaf: str) -> BatchTensor:
        """Tag a fully loaded leaf. The data is shared, not copied."""
        raw = data.shape, data.stride(), data.dtype
        return loaded_tensor(data, batch, leaf, raw, (), batch._vouched.get(leaf))

    @property
    def intact(self) -> bool:
        """Whether the values are still exactly what samples and `chain` say, by content.

        False after the user changed the data; such a tensor is an ordinary one. So is one whose
        rows do not stand in the first dimension.
        """
        return (not self.chain or not self.chain[-1].opens) and self.holds()

    def holds(self) -> bool:
        """Whether that is so, wherever the rows stand."""
        with torch._C.DisableTorchFunctionSubclass(), attempt.outside_inference_mode():
            return self._vouched.holds(self)

    @property
    def has_data(self) -> bool:
        """Whether its data are there."""
        return True

    @property
    def described(self) -> Tensor:
        """A meta tensor of the same shape, dtype and strides."""
        return self.full().to("meta")

    def full(self) -> Tensor:
        """Return the plain tensor with all rows, after `chain`."""
        return self.as_subclass(Tensor)

    def misses(self) -> Tensor:
        """Return the plain rows that were not planned as hits, after `chain`."""
        entry = self.batch.entry
        assert entry is not None, "a batch without an entry has no hits to leave out"
        return batches.take_rows(self.full(), self.fold.mask(~entry.hit))

    def rows(self, mask: np.ndarray, loaded: Leaves) -> Tensor:
        """Return the plain masked rows, after `chain`, without loading the others.

        Args:
            mask: Bool, shape (B,).
            loaded: What `batch.load_rows(mask)` gave; used if this leaf's own rows are absent.
        """
        return batches.take_rows(self.full(), self.fold.mask(mask))

    def of(self, loaded: Leaves) -> Tensor:
        """Return the plain rows of another batch, after `chain`, from what was loaded of it.

        Raises:
            LookupError: They do not stand one by one, or are of another kind.
        """
        rows = derived(self.leaf, self.chain, loaded, self.device)
        if self.fold != PLAIN or rows.dtype != self.dtype:
            raise LookupError("rows of another batch cannot stand behind these")
        return rows

    def _apply(self, op: Op, parts: Sequence[BatchTensor]) -> BatchTensor:
        """Return the result of an operation on leaves of a batch, this one among them."""
        data, first = [part.full() for part in parts], parts[0]
        result = op.apply(data)
        if result is data[0]:
            return first
        known = first._vouched if len(parts) == 1 else None
        chain = (*first.chain, op)
        return loaded_tensor(result, first.batch, first.leaf, first.raw, chain, known)

    def _apply_in_place(self, op: Op, parts: Sequence[BatchTensor]) -> None:
        """Do an operation to the data itself."""
        data = [part.full() for part in parts]
        op.call(data)
        self.chain = (*self.chain, op)
        self._vouched = Vouched(data[0], by_content=self.batch.may_be_stored)

    def _become_plain(self) -> None:
        """Make this very object an ordinary tensor: it is about to be changed in place."""
        self.__dict__.clear()
        self.__class__ = Tensor  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the loop's own makes this an ordinary tensor: a model may read it."""
        if name not in vars(self) and not hasattr(type(self), name):
            self._become_plain()
        object.__setattr__(self, name, value)

    @classmethod
    def __torch_function__(
        cls, func: Func, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # inside it nothing is cached; nor may its graph break
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass(), attempt.outside_inference_mode():
            if func in _ABOUT_THE_TENSOR:
                return func(*args, **kwargs)
            if func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
                # It asks whether what it has detached is of the same class as before.
                args[0]._become_plain()
                return func(*args)
            result: Any = NotImplemented
            with attempt.Attempt():  # an error of the operation's own comes again, below
                result = _recorded(func, args, kwargs)
            if result is not NotImplemented:
                return result
            leaf = next((f"the leaf {a.leaf!r}" for a in args if isinstance(a, BatchTensor)), "")
            if not leaf and len({one.batch for one in batch_tensors(args)}) > 1:
                leaf = "batches that are joined; call the model with each"
            first = args[0] if args else None
            name = name_of(func)
            writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
            if isinstance(first, BatchTensor) and writes:
                first._become_plain()
            args, kwargs = unwrap(args), unwrap(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            note_lost(func, leaf, result)
            return result

    def _selected(self, func: Func, args: Any, kwargs: Kwargs) -> Any:
        """Return rows of the batch, if it is rows that the function takes."""
        chosen = selected_rows(func, args, kwargs, self)
        if chosen is None:
            return None
        if self.fold != (1, 1):
            return NotImplemented
        taken, is_tuple, rest = chosen
        parts = [self._select(rows, part) for rows, part in taken]
        if rest is not None:
            return _recorded(Tensor.__getitem__, (parts[0], rest), {})
        return tuple(parts) if is_tuple else parts[0]

    def _select(self, rows: np.ndarray, part: Callable[[Tensor], Tensor]) -> BatchTensor:
        """Return these rows as a batch of their own; `part` takes them from a tensor."""
        data, batch = part(self.full()), self.batch.select(rows)
        return loaded_tensor(data, batch, self.leaf, self.raw, self.chain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full().clone()


def without_data(
    meta: Tensor,
    batch: Batch,
    leaf: str,
    misses: Tensor | None = None,
    *,
    device: torch.device | None = None,
    raw: Raw | None = None,
    chain: Ops = (),
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
    device = device or (torch.device("cpu") if misses is None else misses.device)
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
    _alias: tuple[Tensor, Op, Ops] | None
    """The tensor whose memory this one would share, the operation that leads from it to here, and
    what had been done to that.

    What is written to one then shows in the other, as it does where data is."""

    def full(self) -> Tensor:
        """Return the plain tensor with all rows, loaded now if need be."""
        if self._full is None:
            with (
                temporarily_clear_interpreter_stack(),
                attempt.without_modes(),
            ):  # it is no part of them
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
        merged = absent if self._misses is None else batches.interleaved(mask, absent, self._misses)
        # The strides that it would have: channels_last stays channels_last.
        shape, strides = self._meta.shape, self._meta.stride()
        return merged.new_empty_strided(shape, strides).copy_(merged)

    def holds(self) -> bool:
        """Whether that is so, wherever the rows stand."""
        if self._alias is not None:  # nothing was done to the other since
            other, _, chain = self._alias
            if not (isinstance(other, BatchTensor) and other.chain is chain and other.holds()):
                return False
        data = self._misses if self._full is None else self._full
        with torch._C.DisableTorchFunctionSubclass(), attempt.outside_inference_mode():
            return data is None or self._vouched.holds(data)

    @property
    def described(self) -> Tensor:
        """A meta tensor of the same shape, dtype and strides."""
        return self._meta

    def misses(self) -> Tensor:
        """Return the plain rows that were not planned as hits, after `chain`."""
        if self._misses is None:
            return super().misses()
        return self._misses

    def rows(self, mask: np.ndarray, loaded: Leaves) -> Tensor:
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
        return result

    def _select(self, rows: np.ndarray, part: Callable[[Tensor], Tensor]) -> BatchTensor:
        batch, mask = self.batch.select(rows), self.batch.absent
        assert mask is not None
        if self._full is not None or batch.absent is None:  # misses alone: they are all there
            return super()._select(rows, part)
        meta, misses = part(self._meta), None
        if self._misses is not None and not mask[rows].all():
            misses = batches.at_rows(self._misses, batches.among(~mask, rows))
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
        if self._misses is not None:
            self._misses = op.apply([part.misses() for part in parts])
            self._vouched = Vouched(self._misses)
        self.chain = (*self.chain, op)

    def _become_plain(self) -> None:
        data = self.full().as_subclass(Tensor)
        torch._C._swap_tensor_impl(self, data)
        super()._become_plain()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Func, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        # Reached only from C++ that bypasses __torch_function__: give it the data.
        return func(*unwrap(args), **unwrap(kwargs or {}))


def _recorded(func: Func, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Do what can be recorded; `NotImplemented` if this cannot be."""
    if attempt.has_other_operations():
        return NotImplemented
    if func is Tensor.__getitem__ and isinstance(args[0], BatchTensor):
        args = args[0], unwrap(args[1])  # a mask of labels: which rows it takes
    found: list[BatchTensor] = []
    slots = _slots((args, kwargs), found)
    first = found[0]
    is_first = bool(args) and args[0] is first
    if is_first and func in _GIVES_THE_MEMORY and not first.is_cpu:
        first._vouched.let_go()  # what is written to it elsewhere, nobody sees
    batch = first.batch
    if any(part.batch is not batch or not part.holds() for part in found):
        return NotImplemented
    if len(found) > 1 and batch.lengths is not None:
        return NotImplemented  # padding would have to be told of each
    if func is Tensor.requires_grad_ and args[1:] == (False,):
        return first
    if is_first and first.has_rows_first and len(found) == 1:
        selected = first._selected(func, args[1:], kwargs)
        if selected is not None:
            return selected
    done = operation(func, slots[0], slots[1], found, batch.size)
    if done is None:
        return NotImplemented
    ops, kind = done
    if ops[0].writes:
        found[0]._apply_in_place(ops[0], found)
        return None if ops[0].func is Tensor.__setitem__ else found[0]
    # One without data knows how to do without.
    leads = next((part for part in found if not part.has_data), found[0])
    results = [leads._apply(op, found) for op in ops]
    return results[0] if kind is None else kind(results)


def _slots(value: Any, found: list[BatchTensor]) -> Any:
    """Return arguments with a slot for each batch tensor, those being put into `found`."""
    if isinstance(value, BatchTensor):
        at = next((i for i, known in enumerate(found) if known is value), len(found))
        if at == len(found):
            found.append(value)
        return Slot(at)
    if type(value) in (list, tuple):
        return [_slots(item, found) for item in value]
    if type(value) is dict:
        return {name: _slots(item, found) for name, item in value.items()}
    return value


def loaded_tensor(
    data: Tensor, batch: Batch, leaf: str, raw: Raw, chain: Ops, known: Vouched | None = None
) -> BatchTensor:
    """Tag data; `known` vouches for what may be the same memory."""
    if known is None or not known.is_of(data):
        known = Vouched(data, by_content=batch.may_be_stored)
    tensor = data.as_subclass(BatchTensor)
    vars(tensor).update(batch=batch, leaf=leaf, raw=raw, chain=chain, _vouched=known)
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


def unwrap(tree: Any) -> Any:
    """Return `tree` with every `BatchTensor` replaced by its plain data, loaded where needed."""
    with attempt.outside_inference_mode():
        plain = tree_map(lambda one: one.full() if isinstance(one, BatchTensor) else one, tree)
        return batches.own_containers(tree, plain)


def batch_tensors(tree: Any) -> list[BatchTensor]:
    """Return the intact `BatchTensor`s in any pytree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, BatchTensor) and leaf.intact]


_LOCAL = threading.local()


def note_lost(func: Func, leaf: str, result: Any) -> None:
    """Note that `func` took a leaf of a batch and gave an ordinary tensor."""
    parts = result if isinstance(result, tuple | list) else (result,)
    if not hasattr(_LOCAL, "lost") and any(isinstance(part, Tensor) for part in parts):
        _LOCAL.lost = f"the rows were lost in {name_of(func)!r} of {leaf or 'the batch'}"


def forget_lost() -> None:
    """Another batch is given out in this thread."""
    vars(_LOCAL).clear()


def lost_by() -> str | None:
    """Say where the rows of the last batch were lost; None if they were not."""
    why: str | None = getattr(_LOCAL, "lost", None)
    return why
