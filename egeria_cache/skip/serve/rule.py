"""How a size inside the model follows the lengths of a batch, learnt from runs of it.

A hidden state is as long as its tokens; an image of patches is one longer; strided convolutions,
any number of them, give floor((L - o) / s). A rule keeps all such functions that agree with what
was seen, and says a size only where they agree with each other: it never guesses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Rule"]

MAX_MULTIPLE = 64
"""Of a length, that a size may be: several rows of a batch that was folded, say."""
MAX_STRIDE = 4096
_MAX_KNOWN = 4096


class _Linear(NamedTuple):
    """multiple * length + offset"""

    axis: int
    multiple: int
    offset: int

    def range(self, lengths: Sequence[int]) -> tuple[int, int]:
        size = self.multiple * lengths[self.axis] + self.offset
        return size, size


class _Floor(NamedTuple):
    """floor((length - o) / stride) for every o from `low` to `high`"""

    axis: int
    stride: int
    low: int
    high: int

    def range(self, lengths: Sequence[int]) -> tuple[int, int]:
        length = lengths[self.axis]
        return (length - self.high) // self.stride, (length - self.low) // self.stride


class Rule:
    """The functions of the lengths along some axes that one size may be."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}
        self._functions: list[_Linear | _Floor] = []
        self._answers: dict[tuple[int, ...], tuple[int, int] | None] = {}

    @classmethod
    def longer_by(cls, offset: int, axis: int) -> Rule:
        """Return the rule of what is so much longer than the samples along an axis."""
        rule = cls()
        rule._functions = [_Linear(axis, 1, offset)]
        return rule

    def add(self, lengths: tuple[int, ...], size: int) -> bool:
        """Learn from one run; return whether any function is left that explains all runs."""
        if self._seen.get(lengths, size) != size:
            return False
        if lengths not in self._seen:
            self._seen[lengths] = size
            self._answers.clear()
            self._functions = _functions(self._seen)
        return self.explains

    @property
    def is_constant(self) -> bool:
        """Whether no run has given another size than the others."""
        return len(set(self._seen.values())) == 1

    @property
    def explains(self) -> bool:
        """Whether some function agrees with all runs; one run agrees with any."""
        return bool(self._functions) or len(self._seen) < 2

    @property
    def axis(self) -> int:
        """The first axis that it may follow."""
        return self._functions[0].axis

    def at(self, lengths: tuple[int, ...]) -> int | None:
        """Return the size for a batch of these lengths; None if that is not certain."""
        found = self._range(lengths)
        return found[0] if found is not None and found[0] == found[1] else None

    def most(self, lengths: tuple[int, ...]) -> int:
        """Return the largest size that is possible for these lengths."""
        found = self._range(lengths)
        assert found is not None
        return found[1]

    def least(self, lengths: tuple[int, ...]) -> int:
        """Return the smallest size that is possible for these lengths."""
        found = self._range(lengths)
        assert found is not None
        return found[0]

    def axis_among(self, preferred: Collection[int]) -> int:
        """Return an axis that it may follow, one of these if it can."""
        axes = [function.axis for function in self._functions]
        return next((axis for axis in axes if axis in preferred), axes[0])

    def in_doubt(self, lengths: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return those lengths at which the size is not certain."""
        return [one for one in lengths if self.at(one) is None]

    def telling(self, shortest: int, longest: int) -> list[int]:
        """Return lengths along its axis at which a run would halve what a rounding may be."""
        found = []
        for function in self._functions[:1]:
            if isinstance(function, _Floor):
                middle = (function.low + function.high + 1) // 2
                first = -(-(shortest - middle) // function.stride)
                last = (longest - middle) // function.stride
                found += [middle + step * function.stride for step in (first, last)]
        return [length for length in found if shortest <= length <= longest]

    def _range(self, lengths: tuple[int, ...]) -> tuple[int, int] | None:
        if lengths in self._seen:
            return self._seen[lengths], self._seen[lengths]
        if lengths not in self._answers:
            if len(self._answers) >= _MAX_KNOWN:
                self._answers.clear()
            ranges = [function.range(lengths) for function in self._functions]
            low = min((low for low, _ in ranges), default=0)
            high = max((high for _, high in ranges), default=0)
            self._answers[lengths] = (low, high) if ranges else None
        return self._answers[lengths]


def _functions(seen: dict[tuple[int, ...], int]) -> list[_Linear | _Floor]:
    """Return all that explain what was seen; exact multiples before roundings."""
    sizes = np.array(list(seen.values()))
    linear: list[_Linear | _Floor] = []
    floors: list[_Linear | _Floor] = []
    for axis, lengths in enumerate(np.array(list(seen)).T):
        if len(set(lengths.tolist())) < 2:
            continue
        for multiple in range(1, MAX_MULTIPLE + 1):
            offsets = sizes - multiple * lengths
            if (offsets == offsets[0]).all():
                linear.append(_Linear(axis, multiple, int(offsets[0])))
        strides = np.arange(2, MAX_STRIDE + 1)
        rests = lengths[:, None] - strides * sizes[:, None]  # in [o, o + stride)
        low, high = rests.max(0) - strides + 1, rests.min(0)
        floors += [
            _Floor(axis, int(strides[i]), int(low[i]), int(high[i]))
            for i in np.flatnonzero(low <= high)
        ]
    return linear or floors
