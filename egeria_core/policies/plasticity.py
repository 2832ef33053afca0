"""Algorithm 1 of the paper: freeze a layer once its plasticity has been stationary for a while."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from egeria_core.config import ControllerConfig
from egeria_core.policies.base import Measure, Reading
from egeria_core.rules import Remembered, TenfoldDrop, UnfreezeRule

MIN_WINDOW = 3
"""Halving stops here: a line through two points fits anything."""
CALIBRATION = 3
"""Readings whose largest slope sets a layer's tolerance (section 4.2.2); none of them is stale."""


class PlasticityPolicy(Remembered):
    """Smooth, fit, compare, count; freeze after `window` consecutive stale readings.

    Args:
        window: W, in evaluations: length of the history, and how many stale readings freeze.
        tolerance: Part of the largest early |slope| below which a reading is stale.
        rule: When to train the frozen layers again; W is halved each time.
    """

    measure: Measure = "plasticity"
    remembers = (
        "frozen", "window", "threshold", "_readings", "_smooth", "_num_readings", "_stale", "rule",
    )  # fmt: skip

    def __init__(
        self, window: int = 10, tolerance: float = 0.2, rule: UnfreezeRule | None = None
    ) -> None:
        ControllerConfig(window=window, tolerance=tolerance)  # refuses what is out of range
        self.window, self.tolerance = window, tolerance
        self.rule: UnfreezeRule = TenfoldDrop() if rule is None else rule
        self.frozen = 0
        self.reason = ""
        """Why the front moved last, in words."""
        self._restart_layer()

    def _restart_layer(self) -> None:
        """Forget the curve: another layer, or the same one in another life."""
        self._readings: list[float] = []
        self._smooth: list[float] = []
        self._num_readings = 0
        self._stale = 0
        self.threshold = 0.0

    def bind(self, boundaries: Sequence[str]) -> None:
        """Layers are only counted here."""

    def observe(self, reading: Reading) -> int:
        """Take one reading; see the class."""
        if self.rule.should_unfreeze(reading.step, reading.lr, self.frozen):
            self.frozen = 0
            self.reason = f"{type(self.rule).__name__} at learning rate {max(reading.lr):.3g}"
            self.window = max(min(MIN_WINDOW, self.window), self.window // 2)
            self._restart_layer()
            return 0
        # The last layer is never frozen, and a reading of a layer that has meanwhile moved
        # behind or ahead of the front says nothing about the front.
        is_front = reading.layer == self.frozen < reading.num_layers - 1
        if not is_front or reading.value is None or not math.isfinite(reading.value):
            return self.frozen
        self._stale = self._stale + 1 if self._is_stale(reading.value) else 0
        if self._stale >= self.window:
            self.reason = f"{self._stale} readings in a row with a slope below {self.threshold:.3g}"
            self.frozen += 1
            self._restart_layer()
        return self.frozen

    def _is_stale(self, value: float) -> bool:
        self._readings = [*self._readings, value][-self.window :]
        # As printed, equation 2 sums W+1 terms over W, and divides by zero at the first reading.
        self._smooth = [*self._smooth, statistics.fmean(self._readings)][-self.window :]
        self._num_readings += 1
        slope = 0.0
        if len(self._smooth) > 1:
            slope = abs(statistics.linear_regression(range(len(self._smooth)), self._smooth).slope)
        if self._num_readings <= CALIBRATION:
            self.threshold = max(self.threshold, self.tolerance * slope)
            return False
        # Exactly flat is stale even where the early readings were flat too (threshold 0): a
        # layer without trainable weights must not hold up the ones behind it.
        return slope < self.threshold or slope == 0.0
