"""What is asked of those who load samples, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from egeria_cache.batch import Axis, SampleId
from egeria_cache.pystate import Portrait
from egeria_cache.samples.company import Company


class Places(NamedTuple):
    """Where the samples of a batch stand in it."""

    order: list[int]
    """Which sample stands in each row."""
    mixed: frozenset[str]
    """Leaves that are not, row by row, what the samples are alone."""
    made: frozenset[str] = frozenset()
    """Those of them that are as large in company as alone: no padding, nothing along it."""


class Task(NamedTuple):
    """Samples to load for one batch."""

    number: int
    """The batch's number in the order of the epoch."""
    indices: Any
    """What the sampler drew, a list, as `__getitem__` takes each; None if nothing is needed."""
    ids: Sequence[SampleId]
    draws: Sequence[int]
    """Which random draw of each sample this is (`draws.py`)."""
    seed: int | None
    """The run's augmentation seed; None leaves the random generators alone."""
    seeds_all: bool = True
    """Whether torch's generator is seeded also for samples that were not seen to draw from it: they
    may read its seed (`torch.initial_seed()`). Not while nothing is frozen, for it takes time."""
    looks: bool = False
    """Whether the samples are to be described (`Look`) instead of given."""
    before: Portrait | bool = False
    """Whether what loading them moves is to be described, too: the data set as it is, if it is this
    process's."""
    axes: tuple[Axis, ...] = ()
    """Along which each sample is to be measured: it is collated alone for that."""
    places: bool = False
    """Whether each sample is to be looked for in its batch: it is collated alone for that, too."""
    compares: bool = False
    """Whether samples are to be collated alone as well, as many as `Company` allows."""

    def take(self, rows: np.ndarray) -> Task:
        """Return the task of loading the masked rows again: bool, shape (B,)."""
        return self.at(np.flatnonzero(rows).tolist())._replace(seeds_all=True)

    def behind(self, other: Task) -> Task:
        """Return the task of another's samples, and these behind them."""
        return self._replace(
            indices=[*other.indices, *self.indices],
            ids=[*other.ids, *self.ids],
            draws=[*other.draws, *self.draws],
        )

    def at(self, rows: Sequence[int]) -> Task:
        """Return the task of the samples at some positions."""
        return self._replace(
            indices=[self.indices[i] for i in rows],
            ids=[self.ids[i] for i in rows],
            draws=[self.draws[i] for i in rows],
        )


class Loaded(NamedTuple):
    """What comes back for a task; a named tuple, so that pinning looks inside."""

    number: int
    data: Any
    """The collated batch, or a `Look`; None where the task held no samples."""
    drawn: frozenset[str]
    """What the data set draws from, as far as is known: see `SampleLoader.drawn`."""
    axes: tuple[Axis, ...] = ()
    """The task's."""
    lengths: npt.NDArray[np.int64] | None = None
    """Of the samples along these axes, shape (B, axes); None if they were not measured."""
    differs: str | None = None
    """A leaf in which a sample is not in its place what it is alone, where that was looked at."""
    places: Places | None = None
    """Where the samples stand in the batch, if they were looked for."""
    load_s: float = 0.0
    """Processor time that loading and collating took, without what is asked besides."""
    company: Company | None = None
    """Whether samples are compared with what they are alone, and what that has taken."""
