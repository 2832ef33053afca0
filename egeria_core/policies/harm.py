"""What freezing the first layers now would cost, in units of the loss, before anything is frozen.

H_k = phi_k G. G is what training still has to gain: how fast the loss falls per unit of learning
rate, times the learning rate that is left. phi_k is the part of it that the first k layers bring
lately, with one standard error. Pure: it sees numbers, and the same numbers give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from egeria_core.remembered import Remembered

AT_REST, PATIENCE, LEAST = 0.2, 3, 15
"""A layer rests when its speed is at most so much of its own highest for so many readings in a row;
nothing is said before so many readings (benchmarks/results/harm.json)."""
SMOOTHING = 5
"""Readings whose speeds of a layer are averaged, as far as it was read in them."""
LEAST_IN_WINDOW = 4
"""A line through fewer readings has no error that could be told."""
MOST_KEPT = 512
"""Readings: no more are looked back on."""


@dataclass(frozen=True, slots=True)
class Movement:
    """What was read over some training steps, per layer, front first; None: not read."""

    loss: float
    """Mean training loss of these steps."""
    rate: float
    """Sum of the learning rate up to their middle."""
    decrease: tuple[float | None, ...]
    """-g . d: how much of the loss the layer's own step took away, to first order."""
    speed: tuple[float | None, ...]
    """|d| / |theta|."""

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Movement:
        """Return what `MovementMeter` packed into a verdict.

        Raises:
            ValueError: There are no values of whole layers.
        """
        if len(values) < 2 or len(values) % 2 or values[0] is None or values[1] is None:
            raise ValueError(f"{len(values)} values are no movement")
        count = (len(values) - 2) // 2
        return cls(values[0], values[1], tuple(values[2 : 2 + count]), tuple(values[2 + count :]))


class HarmEstimate(Remembered):
    """Collects movements; answers what freezing would cost, and which layers have come to rest."""

    remembers = ("_movements", "_seen", "first_loss", "_recent", "_peaks", "_resting")

    def __init__(self, first_loss: float | None = None) -> None:
        self._movements: list[list[Any]] = []
        self._recent: list[list[float | None]] = []
        self._peaks: list[float] = []
        self._resting: list[int] = []
        self._seen = 0
        self.first_loss = first_loss
        """Mean loss of the first reading; of a run that begins again, of its first life."""

    @property
    def ready(self) -> bool:
        """Whether there are readings enough."""
        return self._seen >= LEAST

    def observe(self, movement: Movement) -> None:
        """Take one reading; one with a loss that is not finite is none."""
        if not math.isfinite(movement.loss):
            return
        if not self._seen:
            count = len(movement.speed)
            self._recent = [[] for _ in range(count)]
            self._peaks, self._resting = [0.0] * count, [0] * count
        self._seen += 1
        if self.first_loss is None:
            self.first_loss = movement.loss
        self._movements = [*self._movements, list(astuple(movement))][-MOST_KEPT:]
        for layer, speed in enumerate(movement.speed):
            recent = self._recent[layer] = [*self._recent[layer], speed][-SMOOTHING:]
            known = [value for value in recent if value is not None]
            if not known:
                continue
            mean = sum(known) / len(known)
            self._peaks[layer] = max(self._peaks[layer], mean)
            rests = mean <= AT_REST * self._peaks[layer]
            self._resting[layer] = self._resting[layer] + 1 if rests else 0

    def rests(self, layer: int) -> bool:
        """Whether a layer has been slow for long enough."""
        return layer < len(self._resting) and self._resting[layer] >= PATIENCE

    def _window(self) -> list[Movement]:
        """Return the last third."""
        lately = self._movements[-max(LEAST_IN_WINDOW, self._seen // 3) :]
        return [Movement(*row) for row in lately]

    def shares(self, frozen: int) -> list[float] | None:
        """Return phi_k for every k: the part of the fall that layers `frozen` to k - 1 bring, with
        one standard error: it is read from single steps, of layers that were read in turns.

        None where the last readings tell nothing of it: a layer was not read, or the layers'
        parts do not add up to a fall.
        """
        read = np.array([m.decrease for m in self._window()], dtype=np.float64)[:, frozen:]
        known = np.isfinite(read)
        if not known.any(0).all():
            return None
        means = np.where(known, read, 0.0).sum(0) / np.maximum(1, known.sum(0))
        total = float(means.sum())
        if total <= 0 or not math.isfinite(total):
            return None
        # A layer that lately made the loss rise is no reason to trust the others less.
        share = np.minimum(1.0, np.maximum(0.0, means).cumsum() / total)
        filled = np.where(known, read, means)  # what was not read tells of no scatter
        rest = filled.cumsum(1) - share * filled.sum(1, keepdims=True)
        error = rest.std(0, ddof=1) / math.sqrt(len(rest)) / total
        shares: list[float] = np.minimum(1.0, share + error).tolist()
        return [0.0] * (frozen + 1) + shares

    def gain(self, remaining_rate: float) -> float:
        """Return G: what the loss may still fall by, with one standard error."""
        if remaining_rate <= 0:
            return 0.0
        rates, losses = np.array([(m.rate, m.loss) for m in self._window()]).T
        slope, error = 0.0, math.inf
        if np.ptp(rates) > 0:
            (slope, _), covariance = np.polyfit(rates - rates.mean(), losses, 1, cov=True)
            error = math.sqrt(covariance[0, 0])
        gain = max(0.0, error - slope) * remaining_rate
        # A loss that cannot be negative cannot fall by more than it is.
        return float(min(losses.mean(), gain) if losses.min() > 0 else gain)

    def assumed_rate(self, steps: int, every: int) -> float:
        """Return what is left of the learning rate if it stays as it is lately.

        Args:
            steps: Optimizer steps left.
            every: Optimizer steps between two readings.
        """
        if len(self._movements) < 2:
            return math.inf
        before, last = self._window()[-2:]
        return (last.rate - before.rate) / every * steps
