"""Which random draw of a sample an epoch uses, and its seed. Pure.

A sample's augmentation depends on (seed, sample ID, draw) and on nothing else: not on the worker
that loads it, the number of workers, the order of the epoch, or a resume. That is what makes an
activation cacheable at all: the same key must always mean the same input. A draw is a number: it is
part of the seed, and of the name under which the sample's activation is stored. A draw that took
another's place has another number, so that no activation of an old one can be served for it.

Drawing anew in every epoch leaves nothing to serve; one draw for ever is no augmentation. Between
them a draw is used for some epochs and then replaced, each sample in a turn of its own, so that
every batch holds about as many new draws as any other (data echoing, Choi et al. 2019; refurbished
samples, Lee et al., USENIX ATC 2021, which keep what the first transforms gave, not the layers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from egeria_cache.batch import SampleId

DEFAULT_REUSE = 4
"""Epochs: docs/augmentation.md has the figures."""
NO_DRAW = (1 << 32) - 1
"""A number that no draw ever has."""
_GOLDEN, _PHASE, _CHOICE = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
_MASK = (1 << 64) - 1


def sample_seed(seed: int, sample_id: SampleId, draw: int = 0) -> int:
    """Return the 64-bit seed of one sample's random augmentation.

    Args:
        seed: The run's augmentation seed.
        sample_id: Int, string, or tuple of them. `1` and `"1"` are different samples.
        draw: Number of the sample's random draw (see `EgeriaLoader`).

    Returns:
        An int in [0, 2**64), the same on every machine and in every process.
    """
    text = f"{seed}|{draw}|{sample_id!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Clock:
    """Where a pass stands among all passes over a loader's samples."""

    tick: int = 0
    """Number of the pass, those of earlier runs included whose draws are gone on with."""
    since: int = 0
    """The tick since which a boundary has been set; `tick` itself while there is none."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The schedule of one loader."""

    seed: int
    reuse: int | None
    """For how many epochs a draw is the newest one of its sample; None: for ever."""
    kept: int = 1
    """Draws of each sample that are in use at a time: the newest ones, of which each epoch that
    makes no new one takes any."""

    def at(self, ids: Sequence[SampleId], clock: Clock) -> npt.NDArray[np.int64]:
        """Return the draw of each sample in this pass: int64, shape (B,), never negative.

        A function of the seed, the sample and the clock alone: not of the batch, the worker or the
        order. In the tick since which a boundary has been set, as in all before it, all samples
        have the draw of that number.
        """
        passed = clock.tick - clock.since
        if passed <= 0:
            return np.full(len(ids), clock.tick, np.int64)
        numbers = _numbers(self.seed, ids)
        newest = self._newest(numbers, passed)
        if self.kept > 1:
            before = self._newest(numbers, passed - 1)
            chosen = _mixed(numbers ^ np.uint64(_CHOICE * (clock.tick + 1) & _MASK))
            back = (chosen % np.minimum(newest + 1, self.kept).astype(np.uint64)).astype(np.int64)
            newest = newest - np.where(newest > before, 0, back)
        return clock.since + newest

    def _newest(self, numbers: npt.NDArray[np.uint64], passed: int) -> npt.NDArray[np.int64]:
        if self.reuse is None:
            return np.full(len(numbers), min(passed, self.kept - 1), np.int64)
        turn = (_mixed(numbers ^ np.uint64(_PHASE)) % np.uint64(self.reuse)).astype(np.int64)
        return (passed + turn) // self.reuse

    @property
    def served(self) -> float:
        """Part of the samples of an epoch whose draw is not new, in the long run."""
        return 1.0 if self.reuse is None else 1 - 1 / self.reuse

    def superseded(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the draws that are used no more once these are made; None if all are kept."""
        if self.reuse is None:
            return None
        return np.where(draws < self.kept, NO_DRAW, draws - self.kept)

    def told(self, drawn_from: str, num_bytes: int) -> str:
        """Say for people what is done with random samples, what it costs and what it saves."""
        kept = f"{self.kept} draws of each are" if self.kept > 1 else "One draw of each is"
        how = f", used for {self.reuse} epochs each and then made anew, in turns"
        return (
            f"its samples draw random numbers ({drawn_from}). {kept} kept"
            f"{' for ever' if self.reuse is None else how}: about {self.served:.0%} of the frozen "
            f"front's forward is saved, for {num_bytes / 1e6:.1f} MB on disk, uncompressed. "
            "EgeriaLoader(reuse=...) chooses otherwise: 1 draws anew in every epoch and is served "
            "nothing, None keeps the first draws for ever"
        )


def _numbers(seed: int, ids: Sequence[SampleId]) -> npt.NDArray[np.uint64]:
    """Return 64 bits per sample, the same in whatever company."""
    if set(map(type, ids)) == {int}:
        with suppress(OverflowError):
            plain = np.array(ids, np.int64)
            return _mixed(plain.view(np.uint64) ^ np.uint64(sample_seed(seed, ())))
    if len(ids) == 1:
        return np.array([sample_seed(seed, ids[0])], np.uint64)
    return np.array([_numbers(seed, [one])[0] for one in ids], np.uint64)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread 64 bits over 64 bits (the finaliser of SplitMix64)."""
    numbers = numbers + np.uint64(_GOLDEN)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
