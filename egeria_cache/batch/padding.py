"""How a loader pads its samples to a batch: which leaves, where, and with what.

An *axis* is one dimension of one leaf whose size differs from sample to sample. A batch is as long
along an axis as the longest of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from egeria_cache.ragged import Dims, PaddedRows, pad_rows, widen


@dataclass(frozen=True, slots=True, order=True)
class Axis:
    """A dimension of a leaf along which samples are padded."""

    leaf: str
    dim: int
    """Of a row; 0 is the first one behind the samples'."""
    left: bool = False
    """Whether the padding stands before the sample."""


@dataclass(frozen=True, slots=True)
class Padding:
    """How a collate function pads."""

    axes: tuple[Axis, ...]
    values: Mapping[str, Any]
    """What each padded leaf is padded with."""

    def positions(self, leaf: str) -> list[int]:
        """Return which of the axes are this leaf's."""
        return [i for i, axis in enumerate(self.axes) if axis.leaf == leaf]

    def dims(self, leaf: str) -> Dims:
        """Return the padded dimensions of a leaf's row."""
        return tuple((axis.dim, axis.left) for axis in self.axes if axis.leaf == leaf)

    def sizes(self, leaves: Mapping[str, Any]) -> tuple[int, ...]:
        """Return how long a batch with these leaves is along each axis."""
        return tuple(leaves[axis.leaf].shape[axis.dim + 1] for axis in self.axes)

    def padded(self, leaf: str, rows: Any, whole: Sequence[int]) -> Any:
        """Put the rows of a leaf together in a batch of these lengths, as the collate function
        would; other leaves stay as they are.
        """
        if leaf not in self.values:
            return rows
        rest = self.dims(leaf), [whole[i] for i in self.positions(leaf)], self.values[leaf]
        return widen(rows, *rest) if isinstance(rows, Tensor) else pad_rows(list(rows), *rest)

    def shape(self, leaf: str, row: Tensor, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that a row, given as a meta tensor (1, ...), has in a batch."""
        shape = list(row.shape[1:])
        for i in self.positions(leaf):
            shape[self.axes[i].dim] = whole[i]
        return tuple(shape)

    def row_meta(self, leaf: str, rows: Tensor) -> Tensor:
        """Return a meta tensor that stands for one row, of size 1 along the axes."""
        shape = self.shape(leaf, rows, [1] * len(self.axes))
        return torch.empty((1, *shape), dtype=rows.dtype, device="meta")

    @property
    def fields(self) -> dict[str, Any]:
        """What tells it from another, JSON values."""
        return {
            axis.leaf or "batch": {
                "dims": [[dim, "left" if left else "right"] for dim, left in self.dims(axis.leaf)],
                "value": value if math.isfinite(value := self.values[axis.leaf]) else str(value),
            }
            for axis in self.axes
        }


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """How long the samples of one batch are, and the batch itself."""

    padding: Padding
    own: npt.NDArray[np.int64]
    """Of each sample along each axis, shape (B, axes)."""
    whole: tuple[int, ...]
    """Of the batch, shape (axes,)."""

    @property
    def are_tight(self) -> bool:
        """Whether the batch is as long as its longest samples."""
        return tuple(self.own.max(0).tolist()) == self.whole

    def select(self, rows: npt.NDArray[np.int64]) -> Lengths:
        """Return those of some rows; they stay as wide as they are."""
        return Lengths(self.padding, self.own[rows], self.whole)

    def widened(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Pad the rows of leaves to the lengths of this batch."""
        return {path: self.padding.padded(path, rows, self.whole) for path, rows in leaves.items()}

    def rows(self, leaf: str, values: Any) -> Any:
        """Return the rows of a leaf without their padding; of another leaf as they are."""
        if leaf not in self.padding.values or not isinstance(values, Tensor):
            return values
        at = self.padding.positions(leaf)
        return PaddedRows(values, self.padding.dims(leaf), self.own[:, at])
