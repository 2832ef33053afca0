"""Samples in company: how many are compared with what they are alone, and how long each is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from egeria_cache.batch import Axis

MAX_SHARE = 0.02
"""Of the time that loading takes, for comparing samples with what they are alone."""
FREE_S = 0.05
"""What that may take besides, in each process that loads."""
_MAX_DEPTH, _MAX_PARTS = 3, 16
"""Of what a data set gives for a sample, as far as it is searched for what tells a length."""

Gauge = tuple[Any, ...]
"""What tells how long a sample is: keys that lead to a part of it, and a dimension of that (None:
its length); or a mask, the path of a leaf of the batch and what it is padded with."""
Told = dict[Gauge, list[int]]
"""What gauges tell of the samples of a batch."""


class Company:
    """What one process knows of samples and their company.

    They are compared with what they are alone, all of a batch where that takes `MAX_SHARE` of the
    time that loading takes, or less; else some, in turns. The first `FREE_S` are free.

    Where batches are padded, a sample's length is what it has alone. What told the lengths of all
    samples that were collated alone is believed; until something has, all are.
    """

    def __init__(self) -> None:
        self.loaded_s = self.spent_s = 0.0
        self._each_s = 0.0
        self._turns = random.Random(0)
        self._gauges: dict[Axis, list[Gauge]] = {}

    def choose(self, size: int, axes: Sequence[Axis]) -> list[int]:
        """Return the rows of a batch whose turn it is to be collated alone."""
        if not self._each_s or not all(map(self._gauges.get, axes)):
            return list(range(size))
        left = FREE_S + MAX_SHARE * self.loaded_s - self.spent_s
        return self._turns.sample(range(size), max(0, min(size, int(left / self._each_s))))

    def compared(self, number: int, seconds: float) -> None:
        """Note what it has taken to compare so many."""
        self.spent_s += seconds
        self._each_s += (seconds / number - self._each_s) * (0.2 if self._each_s else 1.0)

    def ask_samples(self, axes: Sequence[Axis], samples: Sequence[Any]) -> Told:
        """Return what parts of some samples tell of their lengths, before they are collated."""
        if all(axis in self._gauges for axis in axes):
            known = {g for axis in axes for g in self._gauges[axis] if not isinstance(g[0], str)}
            return {gauge: [_size(one, *gauge) for one in samples] for gauge in known}
        sizes = [dict(_sizes(one, ())) for one in samples]
        shared = [gauge for gauge in sizes[0] if all(gauge in one for one in sizes)]
        return {gauge: [one[gauge] for one in sizes] for gauge in shared}

    def ask_masks(self, axes: Sequence[Axis], together: Mapping[str, Any]) -> Told:
        """Return what masks in a batch, given by its leaves, tell of the lengths of its samples."""
        asked = set[Gauge]()
        for axis in axes:
            known = self._gauges.get(axis)
            asked.update(_masks(axis.leaf, together[axis.leaf]) if known is None else known)
        masks = [gauge for gauge in asked if isinstance(gauge[0], str)]
        return {(leaf, fill): (together[leaf] != fill).sum(1).tolist() for leaf, fill in masks}

    def learn(
        self, axes: Sequence[Axis], told: Told, own: Mapping[int, Sequence[int]]
    ) -> str | None:
        """Believe what has told the lengths of samples that were collated alone, and nothing else.

        Args:
            axes: Along which they are padded.
            told: What gauges tell of the samples of the batch.
            own: Lengths along these axes, by row.

        Returns:
            A leaf along which samples were as long as nothing had told.
        """
        for i, axis in enumerate(axes):
            known = self._gauges.get(axis)
            if known is None and len({lengths[i] for lengths in own.values()}) < 2:
                continue  # too many things would have told this
            asked = told if known is None else known
            right = [g for g in asked if all(told[g][row] == each[i] for row, each in own.items())]
            self._gauges[axis] = [g for g in right if not isinstance(g[0], str)] or right
            if known and not right:
                return axis.leaf
        return None

    def lengths(self, axes: Sequence[Axis], told: Told) -> npt.NDArray[np.int64] | None:
        """Return the lengths of the samples of a batch, shape (B, axes); None if gauges differ."""
        found = [[told[gauge] for gauge in self._gauges[axis]] for axis in axes]
        if any(one != each[0] for each in found for one in each):
            return None
        return np.array([each[0] for each in found], np.int64).T


def _size(value: Any, keys: Sequence[Any], dim: int | None) -> int:
    for key in keys:
        value = value[key]
    return len(value) if dim is None else value.shape[dim]


def _sizes(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[Gauge, int]]:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        yield from (((keys, dim), size) for dim, size in enumerate(shape))
    elif isinstance(value, list | tuple | dict) and len(keys) <= _MAX_DEPTH:
        if not isinstance(value, dict):
            yield (keys, None), len(value)
        if len(value) <= _MAX_PARTS:
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from _sizes(value[key], (*keys, key))


def _masks(path: str, leaf: Tensor) -> list[Gauge]:
    """Return what a padded leaf may be padded with if it only says where something stands."""
    if leaf.dim() != 2 or leaf.is_floating_point():
        return []
    values = torch.unique(leaf).tolist()
    return [(path, value) for value in values] if len(values) == 2 else []
