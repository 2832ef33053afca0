"""Rows of different sizes: padded into one tensor, and taken out of it again. Pure.

A dimension of a row that is padded is given as (dimension, whether the padding stands on the left);
dimension 0 is the first one behind the samples'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return PaddedRows(self.padded[row], self.dims, self.sizes[row])
        return inside(self.padded[row], self.dims, self.sizes[row].tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the rows alone."""
        whole = np.array([self.padded.shape[dim + 1] for dim, _ in self.dims])
        share = float((self.sizes / np.maximum(whole, 1)).prod(1).sum()) / max(len(self), 1)
        return round(self.padded.nbytes * share)


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
    out.fill_(fill)
    for target, row in zip(out.unbind(0), rows, strict=True):
        inside(target, dims, [row.shape[dim] for dim, _ in dims]).copy_(row)
    return out


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
