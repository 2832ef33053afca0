"""Notice that the frozen prefix is no longer what it was when its activations were stored.

Compared on every batch, for each parameter and buffer: is it the same object in the same module, in
the same memory, with the same version counter, and are a few of its elements what they were (a
write through `p.data` moves no counter)? And is every module still in inference mode?
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ContentHash", "PrefixGuard"]

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
        self._values = [tensor for _, _, tensor in self._tensors]
        self._versions = [version(tensor) for tensor in self._values]
        self._pointers = [pointer(tensor) for tensor in self._values]
        self._probes = _probes(self._values)
        self._samples = [torch.cat(views) for views in self._probes]
        self._modes = [module.training for _, module in self._modules]

    def changed(self) -> str | None:
        """Name what changed, or return None. Costs well below a microsecond per tensor."""
        values = self._values
        if [version(tensor) for tensor in values] != self._versions:
            return self._first("was changed in place", [version(t) for t in values], self._versions)
        pointers = [pointer(tensor) for tensor in values]
        if pointers != self._pointers:
            return self._first("was given other data", pointers, self._pointers)
        for slot, key, tensor in self._slots:
            if slot.get(key) is not tensor:
                return f"{self._name(tensor)!r} was replaced by another tensor"
        for children, key, child in self._children:
            if children.get(key) is not child:
                return f"module {key!r} of the prefix was replaced"
        if [module.training for _, module in self._modules] != self._modes:
            return "a module of the prefix left inference mode"
        for views, sample in zip(self._probes, self._samples, strict=True):
            now = torch.cat(views)
            if not torch.equal(now, sample) and not _same_bits(now, sample):
                return "the content of a parameter or buffer of the prefix was changed"
        return None

    def _name(self, tensor: Tensor) -> str:
        return next(name for name, _, other in self._tensors if other is tensor)

    def _first(self, what: str, now: Sequence[int], before: Sequence[int]) -> str:
        index = next(i for i, (a, b) in enumerate(zip(now, before, strict=True)) if a != b)
        return f"{self._tensors[index][0]!r} {what}"


def version(tensor: Tensor) -> int:
    """Return the version counter; inference tensors have none, and cannot be changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def pointer(tensor: Tensor) -> int:
    """Return the address of the data; 0 where there is no single one."""
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _slots(owner: nn.Module | None, tensor: Tensor) -> list[dict[str, Any]]:
    if owner is None:
        return []
    return [
        slot for slot in (owner._parameters, owner._buffers)
        if any(value is tensor for value in slot.values())
    ]  # fmt: skip


def _probes(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return views of a few elements of each tensor, grouped so that each group can be joined."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0 or tensor.layout != torch.strided:
            continue
        plain = tensor.detach()
        extent = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
        step = max(1, extent // _SAMPLED)
        view = plain.as_strided((min(_SAMPLED, extent),), (step,), plain.storage_offset())
        groups.setdefault((tensor.device, tensor.dtype), []).append(view)
    return list(groups.values())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare where NaN equals NaN."""
    if not a.is_floating_point() and not a.is_complex():
        return False
    return bool(torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        torch.nan_to_num(a), torch.nan_to_num(b)
    ))  # fmt: skip


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
