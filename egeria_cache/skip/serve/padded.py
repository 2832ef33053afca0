"""Tensors of the model that are padded: rows that are stored without, outputs that users see.

How a size inside the model follows the lengths of a batch, learnt from runs of it.

A hidden state is as long as its tokens; an image of patches is one longer; strided convolutions,
any number of them, give floor((L - o) / s). A rule keeps all such functions that agree with what
was seen, and says a size only where they agree with each other: it never guesses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from egeria_cache.batch import Lengths
from egeria_cache.ragged import Dims, PaddedRows, blank, pad_rows, widen

_MULTIPLES = np.arange(1, 65)
"""Of a length, that a size may be: several rows of a batch that was folded, say."""
_STRIDES = np.arange(2, 4097)
_MAX_KNOWN = 4096
Whole = tuple[int, ...]


class _Functions(NamedTuple):
    """floor((multiple * length - o) / stride) along one axis, for every o from `low` to `high`.

    Either all strides or all multiples are 1.
    """

    axis: int
    multiples: np.ndarray
    strides: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def range(self, lengths: Whole) -> tuple[int, int]:
        product = self.multiples * lengths[self.axis]
        least, most = (product - self.high) // self.strides, (product - self.low) // self.strides
        return int(least.min()), int(most.max())

    @classmethod
    def explaining(cls, axis: int, lengths: np.ndarray, sizes: np.ndarray) -> list[_Functions]:
        """Return those that give these sizes, exact multiples first, then roundings."""
        if (lengths == lengths[0]).all():
            return []
        lengths, sizes, one = lengths[:, None], sizes[:, None], np.ones(1, np.int64)
        functions = []
        for multiples, strides in ((_MULTIPLES, one), (one, _STRIDES)):
            rests = multiples * lengths - strides * sizes  # in [o, o + stride)
            low, high = rests.max(0) - strides + 1, rests.min(0)
            found = low <= high
            if found.any():
                those = [np.broadcast_to(a, found.shape)[found] for a in (multiples, strides)]
                functions.append(cls(axis, those[0], those[1], low[found], high[found]))
        return functions

    @property
    def is_exact(self) -> bool:
        return bool(self.strides[0] == 1)


class Rule:
    """The functions of the lengths along some axes that one size may be.

    Args:
        seen: Lengths of batches -> the size in each.
    """

    def __init__(self, seen: Mapping[Whole, int]) -> None:
        self._seen = dict(seen)
        self._answers: dict[Whole, tuple[int, int] | None] = {}
        self._functions = self._explaining()

    @classmethod
    def longer_by(cls, offset: int, axis: int) -> Rule:
        """Return the rule of what is so much longer than the samples along an axis."""
        rule, one = cls({}), np.ones(1, np.int64)
        rule._functions = [_Functions(axis, one, one, -offset * one, -offset * one)]
        return rule

    def add(self, lengths: Whole, size: int) -> bool:
        """Learn from one run; return whether any function is left that explains all runs."""
        if self._seen.get(lengths, size) != size:
            return False
        if lengths not in self._seen:
            self._seen[lengths] = size
            self._answers.clear()
            self._functions = self._explaining()
        return self.explains

    @property
    def explains(self) -> bool:
        """Whether some function agrees with all runs."""
        return bool(self._functions)

    def at(self, lengths: Whole) -> int | None:
        """Return the size for a batch of these lengths; None if that is not certain."""
        found = self._range(lengths)
        return found[0] if found is not None and found[0] == found[1] else None

    def most(self, lengths: Whole) -> int:
        """Return the largest size that is possible for these lengths."""
        found = self._range(lengths)
        assert found is not None
        return found[1]

    def least(self, lengths: Whole) -> int:
        """Return the smallest size that is possible for these lengths."""
        found = self._range(lengths)
        assert found is not None
        return found[0]

    def axis_among(self, preferred: Collection[int]) -> int:
        """Return an axis that it may follow, one of these if it can."""
        axes = [functions.axis for functions in self._functions]
        return next((axis for axis in axes if axis in preferred), axes[0])

    def _range(self, lengths: Whole) -> tuple[int, int] | None:
        if lengths in self._seen:
            return self._seen[lengths], self._seen[lengths]
        if lengths not in self._answers:
            if len(self._answers) >= _MAX_KNOWN:
                self._answers.clear()
            ranges = [functions.range(lengths) for functions in self._functions]
            low, high = zip(*ranges, strict=True) if ranges else ((), ())
            self._answers[lengths] = (min(low), max(high)) if ranges else None
        return self._answers[lengths]

    def _explaining(self) -> list[_Functions]:
        """Return all that explain what was seen, exact multiples first."""
        sizes = np.array(list(self._seen.values()))
        by_axis = enumerate(np.array(list(self._seen)).T)
        found = [one for axis, own in by_axis for one in _Functions.explaining(axis, own, sizes)]
        return sorted(found, key=lambda one: not one.is_exact)


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
