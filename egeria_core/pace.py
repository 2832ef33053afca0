"""How often something may be done beside the training, to take no more than a part of its time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Pace"]

FIRST, RECENT = 4, 16
"""Readings before the first look at what they cost, and between two later ones."""


class Pace:
    """Measures what readings cost and says how much rarer they must become: 1, 2, 4, ... times.

    Powers of two, so that two runs on one machine hardly ever differ.

    Args:
        most: Part of the time that readings may take; None: nothing is measured.
        now: Clock, in seconds.
    """

    def __init__(
        self, most: float | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most, self._now = most, now
        self.rarer = 1
        self._last: float | None = None
        self._begun = 0.0
        self._steps: deque[float] = deque(maxlen=2 * RECENT)
        self._costs: list[float] = []
        self._enough = FIRST

    def step(self) -> float:
        """A training step ends now; return the time."""
        if self._most is None:
            return 0.0
        now = self._now()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        return now

    def begun(self, start: float) -> None:
        """The first half of a reading has begun at `start` and is done."""
        if self._most is not None:
            self._begun = self._now() - start

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Time the second half."""
        start = self._now() if self._most is not None else 0.0
        yield
        if self._most is not None:
            self._costs.append(self._begun + self._now() - start)
            if len(self._costs) >= self._enough:
                self._settle(self._most)

    def _settle(self, most: float) -> None:
        cost, step = statistics.median(self._costs), statistics.median(self._steps)
        self._costs, self._enough = [], RECENT
        while cost > most * step * self.rarer:
            self.rarer *= 2
        while self.rarer > 1 and cost < most * step * self.rarer / 4:
            self.rarer //= 2
