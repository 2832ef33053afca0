"""Notice that the frozen prefix is no longer what it was when its activations were stored.

Compared on every batch, for each parameter and buffer: is it in the same memory, with the same
version counter, frozen as it was, and are a few of its elements what they were (a write through
`p.data` moves no counter)? And for each module: is all of its Python state the same (`watch.py`)?
What differs is compared by content before it counts: weights that were loaded again, or swapped out
and back, are the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from egeria_cache.device import Answers, copies_beside, runs_late
from egeria_cache.pystate import Code, tensor_digest
from egeria_cache.skip.state.watch import StateWatch

SEEN_LATE = "the content of a parameter or buffer of the prefix was changed"
"""Perhaps some batches ago: what was stored since is of neither state."""

Named = tuple[str, nn.Module | None, Tensor]
_version = attrgetter("_version")


class PrefixGuard:
    """Remembers parameters, buffers and modules as they are now, and says what changed.

    Args:
        tensors: (qualified name, owner, tensor); the owner is None for a plain constant.
        modules: (qualified name, module): the skipped modules; all are in inference mode.
        around: See `StateWatch`.
        code: Likewise.
        objects: Likewise.
        hashes: What the tensors hold; without it a tensor that was written to is a changed one.
    """

    def __init__(
        self,
        tensors: Iterable[Named],
        modules: Iterable[tuple[str, nn.Module]] = (),
        around: Iterable[tuple[str, nn.Module, Iterable[str]]] = (),
        code: Code | None = None,
        hashes: ContentHash | None = None,
        objects: Mapping[int, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self._given = list(tensors), list(modules), list(around), code, objects
        self.state = StateWatch(*self._given[1:])
        self._tensors = list(self._given[0])
        self._tensors += [(name, None, tensor) for name, tensor in self.state.tensors]
        self._slots = [_slots(owner, tensor) for _, owner, tensor in self._tensors]
        self._hashes = hashes
        self._contents = [hashes.of(t) if hashes is not None else "" for _, _, t in self._tensors]
        self._renew_tensors()

    def anew(self) -> PrefixGuard:
        """Return another guard of the same things as they are now, by identity and not content."""
        tensors = [self._now(i) for i in range(len(self._given[0]))]
        return PrefixGuard(tensors, *self._given[1:4], None, self._given[4])

    def renew(self) -> None:
        """Take the present state as the one to keep."""
        self.state.renew()
        self._tensors = [self._now(i) for i in range(len(self._tensors))]
        if self._hashes is not None:
            self._contents = [self._hashes.of(tensor) for _, _, tensor in self._tensors]
        self._renew_tensors()

    def _renew_tensors(self) -> None:
        values = [tensor for _, _, tensor in self._tensors]
        # An inference tensor has no version counter (and cannot be written to outside of the mode).
        self._counted = [tensor for tensor in values if not tensor.is_inference()]
        self._placed = [tensor for tensor in values if tensor.layout == torch.strided]
        self._versions = [tensor._version for tensor in self._counted]
        self._pointers = [tensor.data_ptr() for tensor in self._placed]
        self._probe = ContentProbe(values)

    def changed(self, *, wait: bool = False) -> str | None:
        """Name what changed, or return None. Costs about half a microsecond per tensor.

        Args:
            wait: Also for what a device says of the elements that lie there.
        """
        if (
            list(map(_version, self._counted)) != self._versions
            or list(map(Tensor.data_ptr, self._placed)) != self._pointers
        ) and (reason := self._explain()) is not None:
            return reason
        reason = self.state.changed()
        if reason is None and self.state.rebound:
            self.state.rebound = False
            reason = self._explain()
        if reason is None and self._probe.changed(wait=wait):
            return SEEN_LATE
        return reason

    def is_same(self) -> bool:
        """Whether all is as it was, to the last element that can be read at once."""
        return self.changed() is None and not self._probe.whole_changed()

    def settle(self) -> None:
        """Take over what the prefix's own run has left on its modules (memoised tables)."""
        if self.state.changed() is not None:
            self.state.renew()

    def _explain(self) -> str | None:
        """Compare by content; None, and watch the present tensors, if they hold the same."""
        now, moved = [self._now(i) for i in range(len(self._tensors))], self._moved()
        for (name, _, old), (_, _, new), content in zip(
            self._tensors, now, self._contents, strict=True
        ):
            if new is old and id(old) not in moved:
                continue
            if self._hashes is None or self._hashes.of(new) != content:
                how = "was changed" if new is old else "was replaced by another tensor"
                return f"{name!r} {how}"
        if self._probe.changed(wait=True) or self._probe.whole_changed():  # before it is renewed
            return SEEN_LATE
        self._tensors = now
        self._renew_tensors()
        return None

    def _moved(self) -> set[int]:
        """Ids of the tensors whose version or memory is another one."""
        versions = zip(self._counted, self._versions, strict=True)
        places = zip(self._placed, self._pointers, strict=True)
        moved = {id(tensor) for tensor, before in versions if tensor._version != before}
        return moved | {id(tensor) for tensor, before in places if tensor.data_ptr() != before}

    def _now(self, i: int) -> Named:
        """Return the tensor that stands in the place of the i-th."""
        name, owner, tensor = self._tensors[i]
        for slot, key in self._slots[i]:
            current = slot.get(key)
            if isinstance(current, Tensor):
                return name, owner, current
        return name, owner, tensor


def _slots(owner: nn.Module | None, tensor: Tensor) -> list[tuple[dict[str, Any], str]]:
    """Return where the owner keeps a tensor."""
    if owner is None:
        return []
    slots: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
    return [(slot, key) for slot in slots for key, value in slot.items() if value is tensor]


_SAMPLED = 16
"""Elements looked at per tensor on each batch."""
_MAX_PENDING, _RARELY = 64, 16
"""Verdicts that a device may be behind with; and how often one is asked that has no events."""
LOOK_EVERY_S = 2e-3
"""A look at what lies on a device takes a few kernels and a copy, some 30 us of the host: short
steps take turns."""
_CHUNK_BYTES = 1 << 15
"""Read in full with each batch, in turns over all tensors: about 3 us."""


class ContentHash:
    """Digest tensors, and remember each digest until the tensor changes.

    When the boundary moves forward only the newly frozen tensors are read.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, int, str]] = {}

    def of(self, tensor: Tensor) -> str:
        """Return the hash of dtype, shape and bytes."""
        known = self._known.get(id(tensor))
        place = tensor.data_ptr() if tensor.layout == torch.strided else 0
        state = 0 if tensor.is_inference() else tensor._version, place
        if known is None or known[0] is not tensor or known[1:3] != state:
            known = self._known[id(tensor)] = (tensor, *state, tensor_digest(tensor))
        return known[3]

    def of_all(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Return one hash over names and contents."""
        total = xxhash.xxh3_128()
        for name, tensor in tensors:
            total.update(f"{name}={self.of(tensor)};".encode())
        return total.hexdigest()

    def forget(self) -> None:
        """Drop every digest (and the tensors it kept alive)."""
        self._known.clear()


class ContentProbe:
    """Looks at a few elements of every tensor, bit by bit, and at a piece of one of them in full.

    On the CPU by one gather for each size of element (`_Scattered`). On an accelerator by one
    joined comparison whose verdict is read on the first call after the device has come so far: to
    wait for it would cost more than the batch that is then served too late. It looks once in two
    milliseconds at most. A device without
    events would have to be waited for, and is asked on every 16th call.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        host: dict[np.dtype[Any], list[np.ndarray]] = {}
        apart: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
        self._pieces: list[memoryview] = []
        for tensor in tensors:
            view = _some_elements(tensor)
            if view is None:
                continue
            if not runs_late(view.device):
                host.setdefault(view.numpy().dtype, []).append(view.numpy())
                self._pieces += _pieces(tensor)
            else:
                apart.setdefault(view.device, {}).setdefault(view.dtype, []).append(view)
        self._host = [_Scattered(views) for views in host.values()]
        self._bytes = [elements.tobytes() for elements in self._host]
        self._hashes = list(map(xxhash.xxh3_64_intdigest, self._pieces))
        self._turn = 0
        self._device = [(views, _joined(views)) for views in apart.values()]
        self._verdicts, self._looked_at = Answers(), -LOOK_EVERY_S
        self._is_beside = all(map(copies_beside, apart))

    def changed(self, *, wait: bool = False) -> bool:
        """Whether anything looks different; `wait`: now, and not when a device last said so."""
        if list(map(_Scattered.tobytes, self._host)) != self._bytes:
            return True
        if pieces := self._pieces:  # every element is looked at once in a round
            turn = self._turn = (self._turn + 1) % len(pieces)
            if xxhash.xxh3_64_intdigest(pieces[turn]) != self._hashes[turn]:
                return True
        return bool(self._device) and self._device_changed(wait)

    def whole_changed(self) -> bool:
        """Whether any element on the host looks different."""
        return list(map(xxhash.xxh3_64_intdigest, self._pieces)) != self._hashes

    def _device_changed(self, wait: bool) -> bool:
        if wait:
            self._ask()
        if any(bool(verdict) for verdict, _ in self._verdicts.come(wait=wait)):
            return True
        self._turn, now = self._turn + 1, time.perf_counter()
        if (
            now < self._looked_at + LOOK_EVERY_S
            or len(self._verdicts.asked) >= _MAX_PENDING
            or not (self._is_beside or self._turn % _RARELY == 1)
        ):
            return False
        self._looked_at = now
        self._ask()
        return False

    def _ask(self) -> None:
        for views, before in self._device:  # one copy of a byte
            self._verdicts.ask((_joined(views) != before).any())


def _joined(views: Mapping[torch.dtype, list[Tensor]]) -> Tensor:
    """Return the elements' bytes, in a few kernels however many tensors they are of."""
    parts = [torch.cat(each).view(torch.uint8) for each in views.values()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Scattered:
    """Elements of one size that lie anywhere in memory, read by one call.

    One by one, a hundred small views would take five times as long where they are in the
    processor's cache, and half as long again where they are not: there one waits for the other.
    """

    def __init__(self, views: list[np.ndarray]) -> None:
        first = min(views, key=_address)
        places = np.concatenate([_address(v) + v.strides[0] * np.arange(v.size) for v in views])
        self._at, rest = np.divmod(places - _address(first), first.itemsize)
        self._views = views  # they keep the memory
        # All that lies between the first element and the last one, of which no other is touched.
        self._memory: np.ndarray | None = None
        if not rest.any():  # else not all lie as elements of this size do
            shape, strides = (int(self._at.max()) + 1,), (first.itemsize,)
            self._memory = np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)

    def tobytes(self) -> bytes:
        """Return what they hold now."""
        if self._memory is None:
            return b"".join(map(np.ndarray.tobytes, self._views))
        return self._memory.take(self._at, mode="clip").tobytes()


def _address(view: np.ndarray) -> int:
    address: int = view.__array_interface__["data"][0]
    return address


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _some_elements(tensor: Tensor) -> Tensor | None:
    """Return a view of a few elements as integers, spread over the tensor's memory."""
    if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_meta:
        return None
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    integer = _INTEGER.get(plain.element_size())
    if integer is None:
        return None
    extent = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
    step = max(1, extent // _SAMPLED)
    view = plain.as_strided((min(_SAMPLED, extent),), (step,), plain.storage_offset())
    return view.view(integer)


def _pieces(tensor: Tensor) -> list[memoryview]:
    """Return views of a tensor's bytes, each small enough to be read with one batch."""
    if not tensor.is_contiguous():
        return []
    with torch._C.DisableTorchFunctionSubclass():
        data = tensor.detach().reshape(-1)
        if data.data_ptr() != tensor.data_ptr() or data.is_complex() or data.is_conj():
            return []
        whole = data.view(torch.uint8).numpy()
    return [whole[i : i + _CHUNK_BYTES].data for i in range(0, len(whole), _CHUNK_BYTES)]
