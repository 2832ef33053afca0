"""Samples in company: how many are compared with what they are alone."""

from __future__ import annotations

import random

MAX_SHARE = 0.02
"""Of the time that loading takes, for comparing samples with what they are alone."""
FREE_S = 0.05
"""What that may take besides, in each process that loads."""


class Company:
    """How many samples one process compares with what they are alone, and what that has taken.

    All of a batch where that takes `MAX_SHARE` of the time that loading takes, or less; else some,
    drawn by lot. The first `FREE_S` are free.
    """

    def __init__(self) -> None:
        self.loaded_s = self.spent_s = 0.0
        self._each_s = 0.0
        self._turns = random.Random(0)

    def choose(self, size: int) -> list[int]:
        """Return the rows of a batch whose turn it is to be collated alone."""
        if not self._each_s:
            return list(range(size))
        left = FREE_S + MAX_SHARE * self.loaded_s - self.spent_s
        return self._turns.sample(range(size), max(0, min(size, int(left / self._each_s))))

    def compared(self, number: int, seconds: float) -> None:
        """Note what it has taken to compare so many."""
        self.spent_s += seconds
        if number:
            self._each_s += (seconds / number - self._each_s) * (0.2 if self._each_s else 1.0)
