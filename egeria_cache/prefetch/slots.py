"""Which sample lies in which slot: the host's side of the table on the device. Pure.

All of a batch at once, by arrays: per-sample objects cost 0.7 ms for a batch of 256. Slots are
given out in a circle, so that what is read together lies together, and the oldest rows go first;
never one that a batch still needs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["NOBODY", "Placed", "Slots"]

Numbers = npt.NDArray[np.int64]
Slot = npt.NDArray[np.int32]
NOBODY = 0
"""The slot that is never given out: what is resident nowhere lies there."""


class Placed(NamedTuple):
    """What was given slots."""

    rows: Numbers | slice
    """Positions, among those that were to be placed, of the rows that are not there yet."""
    slots: Numbers
    """One each; mostly neighbours."""
    evicted: Numbers
    """Samples that lie nowhere from now on."""


class Slots:
    """A direct-address table from sample numbers to slots, and what is known of each slot.

    Not thread-safe. Of each sample one random draw is resident: a newer one takes its place.

    Args:
        num_slots: How many rows there is room for; they are numbered from 1.
        num_samples: Sample numbers are below this.
    """

    def __init__(self, num_slots: int, num_samples: int) -> None:
        self.num_slots, self.num_samples = num_slots, num_samples
        # Zeroed memory is taken page by page, as samples are seen.
        self._slot_of = np.zeros(num_samples, np.int32)
        self._sample_at = np.full(num_slots + 1, -1, np.int64)
        self._draw_at = np.zeros(num_slots + 1, np.int64)
        self._stamp_at = np.zeros(num_slots + 1, np.int64)
        self._needed_by = np.full(num_slots + 1, -1, np.int64)
        self._latest, self._oldest_needed, self._hand, self._stamp = 0, 0, 0, 0

    def find(self, samples: Numbers, draws: Numbers) -> Slot:
        """Return the slots of samples, NOBODY for those that are not resident; shape (B,)."""
        slots = self._slot_of[samples]
        slots *= self._draw_at[slots] == draws
        return slots

    def adopt(self, batch: int, samples: Numbers, draws: Numbers) -> Numbers:
        """Keep what is resident of a batch until it was used.

        Returns:
            Positions of the others, each sample once.
        """
        slots = self.find(samples, draws)
        if batch < self._latest:  # readers run side by side
            self._needed_by[slots] = np.maximum(self._needed_by[slots], batch)
        else:
            self._latest = batch
            self._needed_by[slots] = batch
        missing = np.flatnonzero(slots == NOBODY)
        if len(missing):
            missing = missing[_one_of_each(self._slot_of, samples[missing])]
        return missing

    def place(self, batch: int, samples: Numbers, draws: Numbers) -> Placed | None:
        """Give slots to rows of a batch, each sample once; None, and no change: there is no room.

        What is there by now (another thread has read it, too) is kept as it is.
        """
        new: Numbers | slice = slice(None)
        before = self._slot_of[samples]
        if before.any():
            new = self.adopt(batch, samples, draws)
            samples, draws, before = samples[new], draws[new], before[new]
        slots = self._take(len(samples))
        if slots is None:
            return None
        if before.any():  # other draws of these samples
            before = before[before != NOBODY]
            self._sample_at[before], self._stamp_at[before], self._needed_by[before] = -1, 0, -1
        evicted = self._sample_at[slots]
        evicted = evicted[evicted >= 0]
        self._slot_of[evicted] = NOBODY
        self._slot_of[samples] = slots
        self._stamp += 1
        self._sample_at[slots], self._draw_at[slots] = samples, draws
        self._stamp_at[slots], self._needed_by[slots] = self._stamp, batch
        return Placed(new, slots, evicted)

    def stamps(self, slots: Slot) -> Numbers:
        """Return what changes when a slot is given to other rows, or its sample to another slot."""
        return self._stamp_at[slots]

    def release_before(self, batch: int) -> None:
        """Rows that only batches numbered below `batch` need may be evicted from now on."""
        self._oldest_needed = max(self._oldest_needed, batch)

    def _take(self, count: int) -> Numbers | None:
        """Return the next slots in the circle that no batch needs."""
        first, end = self._hand + 1, self._hand + 1 + count
        if end <= self.num_slots + 1 and (self._needed_by[first:end] < self._oldest_needed).all():
            self._hand += count
            return np.arange(first, end)
        ahead = (self._hand + np.arange(self.num_slots)) % self.num_slots + 1
        free = ahead[self._needed_by[ahead] < self._oldest_needed][:count]
        if len(free) < count:
            return None
        self._hand = int(free[-1]) if count else self._hand
        return free


def _one_of_each(table: Slot, samples: Numbers) -> npt.NDArray[np.bool_]:
    """Mark one position of each sample. The table serves as paper, and is as before."""
    before, positions = table[samples], np.arange(len(samples), dtype=np.int32)
    table[samples] = positions
    is_one: npt.NDArray[np.bool_] = table[samples] == positions
    table[samples] = before
    return is_one
