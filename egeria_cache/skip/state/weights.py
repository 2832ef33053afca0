"""Parameters and their gradients, which copies of a model share: put back where they were moved.

A forward may write to them: averages of another encoder (MoCo, BYOL), noise, rows that are
normalised, `loss.backward()`. A dry run runs it many times, and the loop once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from egeria_cache.device import room

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights:
    """What some parameters hold now. Takes as much memory as they do, for as long as it lives."""

    def __init__(self) -> None:
        self.looks_closely = True
        """Whether contents are compared where no version counter has moved (`p.data.mul_()`): in
        the first runs; later of what was written so in one of them."""
        self._kept: dict[int, tuple[str, _Held, _Held | None]] = {}
        self._room: dict[torch.device, int] = {}

    def keep(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Remember these, too; those that lie elsewhere (cut over ranks, made later) are left."""
        for name, tensor in named:
            if id(tensor) in self._kept or not _is_plain(tensor) or tensor.is_inference():
                continue
            grad = tensor.grad
            kept = _Held(tensor, self._room), grad if grad is None else _Held(grad, self._room)
            self._kept[id(tensor)] = name, *kept

    def put_back(self, *, wholly: bool = False) -> dict[int, str]:
        """Put back what differs; return id -> name of what did.

        Args:
            wholly: Whether to compare all contents, those that a device had no room to keep, too.
        """
        moved = {}
        # Whoever watches the run (`trace.py`) or computes in float64 has no part in this.
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            for key, (name, held, grad) in self._kept.items():
                tensor = held.tensor
                if held.put_back(wholly, self.looks_closely):
                    moved[key] = name
                if tensor.requires_grad is not held.requires_grad:
                    tensor.requires_grad_(held.requires_grad)
                now = tensor.grad
                if now is not (None if grad is None else grad.tensor):
                    tensor.grad = None if grad is None else grad.tensor
                    moved.setdefault(key, f"{name}.grad")
                if grad is not None and grad.put_back(wholly, self.looks_closely):
                    moved.setdefault(key, f"{name}.grad")
        return moved


class _Held:
    """One tensor: the memory that it lies in, and a copy of that where there is room."""

    def __init__(self, tensor: Tensor, rooms: dict[torch.device, int]) -> None:
        self.tensor, self.requires_grad = tensor, tensor.requires_grad
        self._data = tensor.data
        self._place = _place(self._data)
        self._copy = _copied(self._data, rooms) if _is_plain(tensor) else None
        self._is_written_unseen = False
        self._version = tensor._version
        self._preserved: Any = torch.autograd._unsafe_preserve_version_counter(tensor)

    def put_back(self, wholly: bool, closely: bool) -> bool:
        """Put it back; return whether it was moved."""
        was_replaced = _place(self.tensor) != self._place
        was_written = self.tensor._version != self._version
        if was_replaced:
            self.tensor.data = self._data
        looks, place = closely or self._is_written_unseen, self._data.device
        if self._copy is not None and (
            was_written or wholly or (looks and self._copy.device == place)
        ):
            copy, had_version = self._copy.to(place), was_written
            was_written = not torch.equal(_bits(self._data), _bits(copy))
            if was_written:
                self._data.copy_(copy)
                self._is_written_unseen |= not had_version
        if self.tensor._version != self._version:
            self._preserved.__exit__(None, None, None)
        return was_replaced or was_written


def _is_plain(tensor: Tensor) -> bool:
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_dense and not (tensor.is_meta or tensor.is_quantized or is_lazy(tensor))


def _place(data: Tensor) -> tuple[Any, ...]:
    if data.layout != torch.strided:
        return (data.layout, data.shape)
    return (data.data_ptr(), data.device, data.dtype, data.shape, data.stride())


def _bits(data: Tensor) -> Tensor:
    """Return it as integers: what is not a number is itself."""
    data = torch.view_as_real(data) if data.is_complex() else data
    return data.view(_BITS[data.element_size()])


def _copied(data: Tensor, rooms: dict[torch.device, int]) -> Tensor | None:
    """Copy it where it lies, or on the host; None if there is no room on either."""
    for device in (data.device, torch.device("cpu")):
        left = rooms[device] if device in rooms else _room(device)
        rooms[device] = left - data.nbytes
        if left >= data.nbytes:
            return data.to(device, copy=True)
        rooms[device] = left
    return None


def _room(device: torch.device) -> int:
    available: int = psutil.virtual_memory().available
    return available // 2 if device.type == "cpu" else room(device) or 0
