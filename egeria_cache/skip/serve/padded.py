"""Tensors of the model that are padded: rows that are stored without, outputs that users see.

How a size inside the model follows the lengths of a batch, learnt from runs of it.

A hidden state is as long as its tokens; an image of patches is one longer; strided convolutions,
any number of them, give floor((L - o) / s). A rule keeps all such functions that agree with what
was seen, and says a size only where they agree with each other: it never guesses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from egeria_cache.batch import Lengths
from egeria_cache.ragged import Dims, PaddedRows, blank, pad_rows, widen

_MULTIPLES = np.concatenate([np.arange(1, 65), np.ones(4095, np.int64)])
"""Of a length, that a size may be (several rows of a batch that was folded, say), and after that
the ones that go with the strides."""
_STRIDES = np.concatenate([np.ones(64, np.int64), np.arange(2, 4097)])
_MAX_KNOWN = 4096
Whole = tuple[int, ...]


class Rule:
    """The functions of the lengths along some axes that one size may be.

    They are floor((multiple * length - o) / stride) along one axis, for every o from `low` to
    `high`; either the stride or the multiple is 1.

    Args:
        seen: Lengths of batches -> the size in each.
    """

    def __init__(self, seen: Mapping[Whole, int]) -> None:
        self._seen = dict(seen)
        self._answers: dict[Whole, tuple[int, int] | None] = {}
        self._functions = self._explaining()
        """Axes, multiples, strides, low and high: int64, shape (5, N)."""

    @classmethod
    def longer_by(cls, offset: int, axis: int) -> Rule:
        """Return the rule of what is so much longer than the samples along an axis."""
        rule = cls({})
        rule._functions = np.array([[axis], [1], [1], [-offset], [-offset]])
        return rule

    @property
    def explains(self) -> bool:
        """Whether some function agrees with all runs."""
        return bool(self._functions.size)

    def at(self, lengths: Whole) -> int | None:
        """Return the size for a batch of these lengths; None if that is not certain."""
        found = self._range(lengths)
        return found[0] if found is not None and found[0] == found[1] else None

    def within(self, lengths: Whole) -> tuple[int, int]:
        """Return the smallest and the largest size that is possible for these lengths."""
        found = self._range(lengths)
        assert found is not None
        return found

    def axis_among(self, preferred: Collection[int]) -> int:
        """Return an axis that it may follow, one of these if it can."""
        axes: list[int] = self._functions[0].tolist()
        return next((axis for axis in axes if axis in preferred), axes[0])

    def _range(self, lengths: Whole) -> tuple[int, int] | None:
        if lengths in self._seen:
            return self._seen[lengths], self._seen[lengths]
        if lengths not in self._answers:
            if len(self._answers) >= _MAX_KNOWN:
                self._answers.clear()
            axes, multiples, strides, low, high = self._functions
            product = multiples * np.array(lengths)[axes]
            least, most = (product - high) // strides, (product - low) // strides
            self._answers[lengths] = (int(least.min()), int(most.max())) if self.explains else None
        return self._answers[lengths]

    def _explaining(self) -> np.ndarray:
        """Return all that explain what was seen, exact multiples first."""
        sizes, found = np.array(list(self._seen.values())), [np.empty((5, 0), np.int64)]
        for axis, lengths in enumerate(np.array(list(self._seen)).T):
            if (lengths == lengths[0]).all():
                continue
            rests = np.outer(_MULTIPLES, lengths) - np.outer(_STRIDES, sizes)  # in [o, o + stride)
            low, high = rests.max(1) - _STRIDES + 1, rests.min(1)
            every = np.stack([np.full_like(low, axis), _MULTIPLES, _STRIDES, low, high])
            found.append(every[:, low <= high])
        functions = np.concatenate(found, 1)
        return functions[:, np.argsort(functions[2] > 1, kind="stable")]


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
            [
                min(rule.within(tuple(own))[1], most)
                for rule, most in zip(self.rules, wide, strict=True)
            ]
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
        sizes = self.surely(lengths) if surely else self.stripped(rows, lengths).sizes
        return blank(rows, self.dims, sizes, self.fill)

    def surely(self, lengths: Lengths) -> np.ndarray:
        """Return how large samples are at least: int64, shape (B, number of `dims`)."""
        own = map(tuple, lengths.own.tolist())
        return np.array([[rule.within(one)[0] for rule in self.rules] for one in own], np.int64)

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
