"""Which hits are recomputed from their raw samples and compared: a rate, and a floor under it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_MAX_COST = 0.01
"""Part of the time saved that the floor may cost, beyond one sample an epoch."""


@dataclass(slots=True)
class _Course:
    """Where one loader stands at one cut."""

    last_number: int = -1
    num_served: int = 0
    """Batches with hits in this epoch."""


class AuditPlan:
    """Chooses the samples. Used from the training thread.

    Whatever the rate, one hit is recomputed at the start of every epoch (and thus of whatever was
    cut anew), and one more with the 4th, 16th, 64th, ... batch of hits as long as that costs at
    most a hundredth of the time saved.

    Args:
        rate: Fraction of the hits.
        saved_s: Tells how much time was saved so far.
    """

    def __init__(self, rate: float, saved_s: Callable[[], float]) -> None:
        self.cost_s = 0.0
        """What audits have taken so far."""
        self._rate = rate
        self._saved_s = saved_s
        self._random = random.Random(0)
        self._courses: dict[tuple[str, int], _Course] = {}

    def choose(
        self, loader: str, cut: int, number: int, hit: np.ndarray
    ) -> tuple[np.ndarray, bool] | None:
        """Return the hits to recompute: bool, shape (B,), and whether they are the first of an
        epoch; None for none.

        Args:
            loader: Which loader's batch it is.
            cut: Identifies where it enters.
            number: The batch's number in its epoch; a smaller one than before begins another.
            hit: Bool, shape (B,).
        """
        num_hits = int(np.count_nonzero(hit))
        count = int(self._rate * num_hits + self._random.random())
        count = min(num_hits, max(count, self._floor(loader, cut, number)))
        if not count:
            return None
        rows = np.zeros(len(hit), bool)
        rows[self._random.sample(np.flatnonzero(hit).tolist(), count)] = True
        return rows, self._courses[loader, cut].num_served == 1

    def _floor(self, loader: str, cut: int, number: int) -> int:
        course = self._courses.setdefault((loader, cut), _Course())
        if number <= course.last_number:
            course.num_served = 0
        course.last_number = number
        course.num_served += 1
        served = course.num_served
        is_turn = served.bit_count() == 1 and served.bit_length() % 2 == 1
        if not is_turn or (served > 1 and self.cost_s > _MAX_COST * self._saved_s()):
            return 0
        return 1
