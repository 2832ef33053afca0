"""Tensors of the model that are padded: rows that are stored without, outputs that users see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from egeria_cache.batch import Lengths
from egeria_cache.ragged import Dims, PaddedRows, blank, pad_rows, widen
from egeria_cache.skip.serve.rule import Rule

__all__ = ["OutputAxis", "Proof", "RowGrowth"]

Whole = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowGrowth:
    """How the rows of one cached tensor follow the lengths of their samples."""

    dims: Dims
    """Of a row as it is stored."""
    rules: tuple[Rule, ...]
    """One for each."""
    fill: Any
    """What is written where a sample is padded: nothing that reaches the loss."""

    def stripped(self, rows: Tensor, lengths: Lengths) -> PaddedRows:
        """Return rows, shape (B, ...), without what was computed for padding."""
        wide = [rows.shape[dim + 1] for dim, _ in self.dims]
        sizes = [
            [min(rule.most(tuple(own)), most) for rule, most in zip(self.rules, wide, strict=True)]
            for own in lengths.own.tolist()
        ]
        return PaddedRows(rows, self.dims, np.array(sizes, np.int64))

    def blanked(self, rows: Tensor, lengths: Lengths, *, surely: bool = False) -> Tensor:
        """Return a copy of rows, shape (B, ...), with what was computed for padding filled.

        Args:
            rows: Of a batch.
            lengths: Of the batch.
            surely: Fill also what may be padding, where rules leave a doubt; else it is kept, as
                it is in what is stored.
        """
        stripped = self.stripped(rows, lengths)
        if surely:
            own = lengths.own.tolist()
            sizes = [[rule.least(tuple(one)) for rule in self.rules] for one in own]
            stripped = PaddedRows(rows, self.dims, np.array(sizes, np.int64))
        return blank(rows, self.dims, stripped.sizes, self.fill)

    def sizes(self, whole: Whole) -> list[int]:
        """Return how large rows are along `dims` in a batch of these lengths.

        Raises:
            LookupError: That is not known.
        """
        known = [size for size in (rule.at(whole) for rule in self.rules) if size is not None]
        if len(known) < len(self.rules):
            raise LookupError(f"no batch of lengths {whole} was seen yet")
        return known

    def padded(
        self, rows: Tensor | Sequence[Tensor], whole: Whole | None, *, pin_memory: bool = False
    ) -> Tensor:
        """Put stored rows together for a batch of these lengths; None: no larger than need be.

        Raises:
            LookupError: It is not known how large they are then.
        """
        if whole is None:
            sizes = [max(row.shape[dim] for row in rows) for dim, _ in self.dims]
        else:
            sizes = self.sizes(whole)
        if isinstance(rows, Tensor):
            return widen(rows, self.dims, sizes, self.fill)
        return pad_rows(rows, self.dims, sizes, self.fill, pin_memory=pin_memory)


@dataclass(slots=True)
class Proof:
    """Whether the loss reads what a model gives where its batch is padded: see `unread.py`."""

    missing: float = 0.0
    """What gradients have yet to show, in computed calls: none comes from padding."""
    num_watched: int = 0
    """Calls whose gradient was waited for, or could have been, since one has shown something."""
    seen: Any = None
    """What came of the last of them."""


@dataclass(frozen=True, slots=True)
class OutputAxis:
    """Where one leaf of the model's output is padded: users see it, and may use it."""

    dim: int
    """Behind that of the samples, once these come first; at least 1."""
    rule: Rule
    """How its size follows the lengths."""
    left: bool
    form: str = "rows"
    """"rows": samples come first; "time": they come second; "folded": samples and positions are one
    dimension."""

    def fits(self, leaf: Any, lengths: Lengths) -> bool:
        """Whether a leaf of an output may have a gradient, and is as long as this batch."""
        size, batch_size = self.rule.at(lengths.whole), len(lengths.own)
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or size is None:
            return False
        if self.form == "folded":
            return leaf.shape[:1] == (batch_size * size,)
        if self.form == "time":
            return leaf.shape[:2] == (size, batch_size)
        return leaf.shape[:1] == (batch_size,) and leaf.shape[self.dim : self.dim + 1] == (size,)

    def arranged(self, tensor: Tensor, batch_size: int) -> Tensor:
        """Return a view whose first dimension are samples, and whose second is this one."""
        if self.form == "folded":
            return tensor.reshape(batch_size, -1, *tensor.shape[1:])
        return tensor.transpose(0, 1) if self.form == "time" else tensor.movedim(self.dim, 1)

    def is_padding(self, lengths: Lengths, size: int) -> np.ndarray:
        """Return where samples are padded: bool, shape (B, size)."""
        sizes = [self.rule.most(tuple(own)) for own in lengths.own.tolist()]
        own = np.clip(np.array(sizes), 0, size)[:, None]
        at = np.arange(size)[None]
        return np.asarray(at < size - own if self.left else at >= own)
