"""Storage in fewer bits than were computed: float16, bfloat16, or int8 with a scale per channel.

Never the default. The setting is part of a generation's address, and the error it makes is measured
on every batch. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Storage = str | None
"""A name from `arguments.StorageDtype`, or None: every bit is kept."""

CODES: dict[int, Storage] = {0: None, 1: "float16", 2: "bfloat16", 3: "int8"}
"""On disk."""

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LEVELS = 127


@dataclass(slots=True)
class LossyError:
    """What lossy storage changed, summed over all elements stored so."""

    squared_error: float = 0.0
    squared_value: float = 0.0

    @property
    def relative_rms(self) -> float:
        """Root mean square of the error over that of the values."""
        known = self.squared_error >= 0 < self.squared_value  # else nothing, or forged
        return math.sqrt(self.squared_error / self.squared_value) if known else 0.0

    def join(self, other: LossyError) -> None:
        """Account for what another one has seen."""
        self.squared_error += other.squared_error
        self.squared_value += other.squared_value

    def add(self, exact: Tensor, stored: Tensor) -> None:
        """Account for one batch."""
        difference = exact.double() - stored.double()
        self.squared_error += float(difference.square().sum())
        self.squared_value += float(exact.double().square().sum())


def channel_dim(shape: tuple[int, ...]) -> int:
    """Return which dimension of a sample has a scale each: channels first for images, last for
    sequences and vectors.
    """
    return 0 if len(shape) >= 3 else len(shape) - 1


def storage_bytes(shape: tuple[int, ...], dtype: torch.dtype, storage: Storage) -> int:
    """Return the size of one sample as stored."""
    count = math.prod(shape)
    if storage is None:
        return count * dtype.itemsize
    if storage == "int8":
        return count + 4 * (shape[channel_dim(shape)] if shape else 1)
    return count * 2


def pack(rows: Tensor, storage: Storage) -> tuple[Tensor, Storage]:
    """Return the rows as stored, uint8 of shape (B, bytes), and in which storage that is.

    Rows that the storage cannot hold (other dtypes, infinities, overflow) keep every bit.
    """
    num_rows = len(rows)
    width = 1 if storage == "int8" else 2
    if storage is not None and rows.is_floating_point() and rows.element_size() > width:
        if storage == "int8":
            packed = _pack_int8(rows.float())
        else:
            halves = rows.to(_HALVES[storage])
            packed = _flat(halves) if bool(halves.isfinite().all()) else None
        if packed is not None:
            size = storage_bytes(tuple(rows.shape[1:]), rows.dtype, storage)
            return packed.view(num_rows, size), storage
    size = storage_bytes(tuple(rows.shape[1:]), rows.dtype, None)
    return _flat(rows).view(num_rows, size), None


def unpack(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype, storage: Storage) -> Tensor:
    """Undo `pack`: uint8 (B, bytes) -> (B, *shape) of `dtype`."""
    num_rows = len(packed)
    if storage is None:
        return packed.view(-1).view(dtype).view(num_rows, *shape)
    if storage != "int8":
        return packed.view(-1).view(_HALVES[storage]).view(num_rows, *shape).to(dtype)
    num_scales = shape[channel_dim(shape)] if shape else 1
    scales = packed[:, : 4 * num_scales].contiguous().view(-1).view(torch.float32)
    levels = packed[:, 4 * num_scales :].contiguous().view(torch.int8).view(num_rows, *shape)
    return (levels.float() * _spread(scales.view(num_rows, num_scales), shape)).to(dtype)


def _pack_int8(rows: Tensor) -> Tensor | None:
    shape = tuple(rows.shape[1:])
    if not rows.numel() or not bool(rows.isfinite().all()):
        return None
    others = [1 + dim for dim in range(len(shape)) if dim != channel_dim(shape)]
    largest = rows.abs().amax(others) if others else rows.abs()
    scales = (largest / _LEVELS).clamp_min(torch.finfo(torch.float32).tiny).view(len(rows), -1)
    levels = (rows / _spread(scales, shape)).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    parts = (_flat(scales).view(len(rows), -1), _flat(levels).view(len(rows), -1))
    return torch.cat(parts, 1)


def _spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View (B, channels) so that it multiplies (B, *shape)."""
    if not shape:
        return scales.view(-1)
    sizes = [1] * len(shape)
    sizes[channel_dim(shape)] = -1
    return scales.view(len(scales), *sizes)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
