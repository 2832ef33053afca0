"""Rows of different sizes: padded into one tensor, and taken out of it again. Pure.

A dimension of a row that is padded is given as (dimension, whether the padding stands on the left);
dimension 0 is the first one behind the samples'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Dims = tuple[tuple[int, bool], ...]
Sizes = npt.NDArray[np.int64]
"""Shape (B, number of padded dimensions)."""


class PaddedRows(Sequence[Tensor]):
    """A batch of rows that lie padded in one tensor: a sequence of the rows without their padding.

    Args:
        padded: Shape (B, ...).
        dims: Which dimensions of a row are padded.
        sizes: Of each row in these dimensions, int64, shape (B, number of dims).
    """

    def __init__(self, padded: Tensor, dims: Dims, sizes: Sizes) -> None:
        self.padded = padded
        self.dims = dims
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.padded)

    @overload
    def __getitem__(self, row: int) -> Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, row: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(row, slice):
            return PaddedRows(self.padded[row], self.dims, self.sizes[row])
        return inside(self.padded[row], self.dims, self.sizes[row].tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the rows alone."""
        whole = np.array([self.padded.shape[dim + 1] for dim, _ in self.dims])
        share = float((self.sizes / np.maximum(whole, 1)).prod(1).sum()) / max(len(self), 1)
        return round(self.padded.nbytes * share)

    def on(self, padded: Tensor) -> PaddedRows:
        """Return the same rows in a copy of their tensor, on another device, say."""
        return PaddedRows(padded, self.dims, self.sizes)


def pad_rows(
    rows: Sequence[Tensor], dims: Dims, whole: Sequence[int], fill: Any, *, pin_memory: bool = False
) -> Tensor:
    """Return rows of different sizes as one tensor, shape (B, ...).

    Args:
        rows: At least one, of the same dtype, alike except for the padded dimensions.
        dims: Which dimensions are padded.
        whole: Their sizes in the result, at least those of every row.
        fill: What stands in the padding.
        pin_memory: Put them together in page-locked memory.
    """
    shape = list(rows[0].shape)
    for (dim, _), size in zip(dims, whole, strict=True):
        shape[dim] = size
    out = rows[0].new_empty((len(rows), *shape), pin_memory=pin_memory)
    if all(list(row.shape) == shape for row in rows):
        return torch.stack(tuple(rows), out=out)
    if len(dims) == 1 and dims[0][0] == 0:
        torch.cat(_joined(rows, dims[0][1], shape, fill), out=out.view(-1))
        return out
    if len(dims) > 1:
        out.fill_(fill)
    for target, row in zip(out.unbind(0), rows, strict=True):
        sizes = [row.shape[dim] for dim, _ in dims]
        inside(target, dims, sizes).copy_(row)
        if len(dims) == 1:
            (dim, left), *_ = dims
            rest = shape[dim] - sizes[0]
            if rest:
                target.narrow(dim, 0 if left else sizes[0], rest).fill_(fill)
    return out


def _joined(rows: Sequence[Tensor], left: bool, shape: Sequence[int], fill: Any) -> list[Tensor]:
    """Return what stands in the first dimension, one behind the other: one call copies all."""
    inner = math.prod(shape[1:])
    rest = [(shape[0] - len(row)) * inner for row in rows]
    padding = rows[0].new_full((max(rest),), fill)
    pieces = []
    for row, size in zip(rows, rest, strict=True):
        pieces += [padding[:size], row.reshape(-1)] if left else [row.reshape(-1), padding[:size]]
    return pieces


def widen(padded: Tensor, dims: Dims, whole: Sequence[int], fill: Any) -> Tensor:
    """Pad a batch of rows further, or return it if it has these sizes already.

    Args:
        padded: Shape (B, ...).
        dims: Which dimensions of a row are padded.
        whole: Their sizes in the result.
        fill: What stands in the padding.
    """
    shape = list(padded.shape)
    for (dim, _), size in zip(dims, whole, strict=True):
        shape[dim + 1] = size
    if shape == list(padded.shape):
        return padded
    out = padded.new_full(shape, fill)
    inside(out, dims, [padded.shape[dim + 1] for dim, _ in dims], 1).copy_(padded)
    return out


def blank(padded: Tensor, dims: Dims, sizes: Sizes, fill: Any) -> Tensor:
    """Return a copy in which everything but the rows themselves is overwritten.

    Args:
        padded: Shape (B, ...).
        dims: Which dimensions of a row are padded.
        sizes: Of each row in these dimensions, shape (B, number of dims).
        fill: What is written there.
    """
    out = torch.full_like(padded, fill)
    for target, row, size in zip(out.unbind(0), padded.unbind(0), sizes.tolist(), strict=True):
        inside(target, dims, size).copy_(inside(row, dims, size))
    return out


def inside(padded: Tensor, dims: Dims, sizes: Sequence[int], before: int = 0) -> Tensor:
    """Return the part of a padded row that is so large, a view; `before`: dimensions before it."""
    for (dim, left), size in zip(dims, sizes, strict=True):
        at = dim + before
        padded = padded.narrow(at, padded.shape[at] - size if left else 0, size)
    return padded
