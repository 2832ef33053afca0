"""Notice that the frozen prefix is no longer what it was when its activations were stored.

Compared on every batch, for each parameter and buffer: is it the same object in the same module, in
the same memory, with the same version counter, and are a few of its elements what they were (a
write through `p.data` moves no counter)? And is every module still in inference mode?
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["ContentHash", "ContentProbe", "PrefixGuard"]

_SAMPLED = 16
"""Elements looked at per tensor on each batch."""


class PrefixGuard:
    """Remembers parameters, buffers and modules as they are now, and says what changed.

    Args:
        tensors: (qualified name, owner, tensor); the owner is None for a plain constant.
        modules: (qualified name, module): the skipped modules; all are in inference mode.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, nn.Module | None, Tensor]],
        modules: Iterable[tuple[str, nn.Module]] = (),
    ) -> None:
        self._tensors = list(tensors)
        self._modules = list(modules)
        self._slots = [
            (slot, name.rpartition(".")[2], tensor)
            for name, owner, tensor in self._tensors
            for slot in _slots(owner, tensor)
        ]
        self._children = [
            (module._modules, key, child)
            for _, module in self._modules
            for key, child in module._modules.items()
        ]
        self.renew()

    def renew(self) -> None:
        """Take the present state as the one to keep."""
        values = [tensor for _, _, tensor in self._tensors]
        # An inference tensor has no version counter (and cannot be written to outside of the mode).
        self._counted = [tensor for tensor in values if not tensor.is_inference()]
        self._placed = [tensor for tensor in values if tensor.layout == torch.strided]
        self._versions = [tensor._version for tensor in self._counted]
        self._pointers = [tensor.data_ptr() for tensor in self._placed]
        self._probe = ContentProbe(values)
        self._modes = [module.training for _, module in self._modules]

    def changed(self) -> str | None:
        """Name what changed, or return None. Costs about half a microsecond per tensor."""
        versions = [tensor._version for tensor in self._counted]
        if versions != self._versions:
            return self._first("was changed in place", self._counted, versions, self._versions)
        pointers = [tensor.data_ptr() for tensor in self._placed]
        if pointers != self._pointers:
            return self._first("was given other data", self._placed, pointers, self._pointers)
        for slot, key, tensor in self._slots:
            if slot.get(key) is not tensor:
                return f"{self._name(tensor)!r} was replaced by another tensor"
        for children, key, child in self._children:
            if children.get(key) is not child:
                return f"module {key!r} of the prefix was replaced"
        if [module.training for _, module in self._modules] != self._modes:
            return "a module of the prefix left inference mode"
        if self._probe.changed():
            return "the content of a parameter or buffer of the prefix was changed"
        return None

    def _name(self, tensor: Tensor) -> str:
        return next(name for name, _, other in self._tensors if other is tensor)

    def _first(
        self, what: str, tensors: Sequence[Tensor], now: Sequence[int], before: Sequence[int]
    ) -> str:
        pairs = zip(tensors, now, before, strict=True)
        return next(f"{self._name(tensor)!r} {what}" for tensor, a, b in pairs if a != b)


def version(tensor: Tensor) -> int:
    """Return the version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def pointer(tensor: Tensor) -> int:
    """Return the address of the data; 0 where there is no single one."""
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _slots(owner: nn.Module | None, tensor: Tensor) -> list[dict[str, Any]]:
    if owner is None:
        return []
    slots: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, owner.__dict__)
    return [slot for slot in slots if any(value is tensor for value in slot.values())]


class ContentProbe:
    """Looks at a few elements of every tensor, bit by bit.

    On the CPU by NumPy views, a quarter of a microsecond each. On a GPU by one joined comparison
    whose verdict is read on the next call: to wait for the device would cost more than the batch
    that is then served too late.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._host: list[np.ndarray] = []
        self._device: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            view = _some_elements(tensor)
            if view is None:
                continue
            if view.device.type == "cpu":
                self._host.append(view.numpy())
            else:
                self._device.setdefault(view.dtype, []).append(view)
        self._bytes = [view.tobytes() for view in self._host]
        self._before = {dtype: torch.cat(views) for dtype, views in self._device.items()}
        self._pending: list[tuple[Tensor, torch.cuda.Event]] = []

    def changed(self) -> bool:
        """Whether anything looks different."""
        if [view.tobytes() for view in self._host] != self._bytes:
            return True
        return self._device_changed() if self._device else False

    def _device_changed(self) -> bool:
        done, self._pending = self._pending, []
        for verdict, event in done:
            event.synchronize()
            if bool(verdict):
                return True
        for dtype, views in self._device.items():
            different = (torch.cat(views) != self._before[dtype]).any()
            verdict = torch.empty((), dtype=torch.bool, pin_memory=True)
            verdict.copy_(different, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending.append((verdict, event))
        return False


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _some_elements(tensor: Tensor) -> Tensor | None:
    """Return a view of a few elements as integers, spread over the tensor's memory."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
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


class ContentHash:
    """Digest tensors, and remember each digest until the tensor changes.

    When the boundary moves forward only the newly frozen tensors are read.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, int, str]] = {}

    def of(self, tensor: Tensor) -> str:
        """Return the hash of dtype, shape and bytes (about 1 GB/s)."""
        known = self._known.get(id(tensor))
        state = (version(tensor), pointer(tensor))
        if known is not None and known[0] is tensor and known[1:3] == state:
            return known[3]
        digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
        plain = tensor.detach().cpu()
        plain = (plain if plain.layout == torch.strided else plain.to_dense()).contiguous()
        if plain.numel():
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        self._known[id(tensor)] = (tensor, *state, digest.hexdigest())
        return self._known[id(tensor)][3]

    def of_all(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Return one hash over names and contents."""
        total = hashlib.blake2b(digest_size=16)
        for name, tensor in tensors:
            total.update(f"{name}={self.of(tensor)};".encode())
        return total.hexdigest()

    def forget(self) -> None:
        """Drop every digest (and the tensors it kept alive)."""
        self._known.clear()
