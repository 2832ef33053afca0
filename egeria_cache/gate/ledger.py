"""Whether skipping pays: whole training steps, served and computed, side by side.

The gate believes measurements alone. A step is taken from one request for a batch to the next:
waiting, forward, backward and optimizer together, so that it holds on a device that runs behind the
host, and whatever the dataset costs.

A batch of misses costs more than it would without a cache, since it is captured and written. So a
few batches that could be served are computed all the same, for comparison: the controls. Their
results are what would have been served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["Ledger"]

_RECENT = 64
_MIN_HITS, _MIN_COMPUTED = 16, 4
_NUM_CONTROLS = 6
_BETWEEN_CONTROLS = 4
"""Batches; a control is loaded beside batches that are served, as it would be without a cache."""
_BETWEEN_VERDICTS = 8
"""Served batches; a verdict takes longer than any other part of the gate."""
_OUTLIER = 8.0
"""Steps of more than so many medians count as that many: someone saved a checkpoint."""


class Ledger:
    """Costs per sample of one loader's steps under one boundary. Pure; seconds."""

    def __init__(self) -> None:
        """Start without experience."""
        self._computed: deque[float] = deque(maxlen=_RECENT)
        self._controls: deque[float] = deque(maxlen=_RECENT)
        self._served: deque[float] = deque(maxlen=_RECENT)
        self._baseline_s: float | None = None
        self._num_planned = self._num_served = 0
        self.saved_s = 0.0
        """Time saved so far, against computing every served sample; negative if it was lost."""

    def computed(self, seconds: float, num_samples: float, *, is_control: bool = False) -> None:
        """Note a batch that was loaded and computed whole, and captured unless it is a control."""
        (self._controls if is_control else self._computed).append(seconds / num_samples)
        self._baseline_s = None

    def served(self, seconds: float, num_samples: float) -> None:
        """Note a batch that was served whole."""
        self._served.append(seconds / num_samples)
        self._num_served += 1
        if self.has_computed:
            self.saved_s += num_samples * self._computed_s - seconds

    def wants_control(self) -> bool:
        """Whether the batch that is planned now, all of it hits, should be computed instead."""
        if not self._served or len(self._controls) >= _NUM_CONTROLS:
            return False
        self._num_planned += 1
        return self._num_planned % _BETWEEN_CONTROLS == 0

    @property
    def _computed_s(self) -> float:
        """What a computed sample costs; at most, as long as there are too few controls."""
        if self._baseline_s is None:  # asked for with every served step, and rarely another
            enough = len(self._controls) >= _MIN_COMPUTED
            self._baseline_s = _mean(self._controls if enough else self._computed)
        return self._baseline_s

    @property
    def has_computed(self) -> bool:
        """Whether a computed step was noted."""
        return bool(self._computed or len(self._controls) >= _MIN_COMPUTED)

    @property
    def has_any(self) -> bool:
        """Whether any step was noted."""
        return bool(self._computed or self._controls or self._served)

    @property
    def is_served_enough(self) -> bool:
        """Whether a mean of served steps means something."""
        return len(self._served) >= _MIN_HITS

    @property
    def is_due(self) -> bool:
        """Whether so many were served since the last verdict that it may be another one."""
        return self._num_served % _BETWEEN_VERDICTS == 0

    def worse_than(self, other: Ledger) -> str | None:
        """Say so if being served costs more here than at another cut."""
        if not (self.is_served_enough and other.is_served_enough):
            return None
        here, there = _mean(self._served), _mean(other._served)
        if here <= there:
            return None
        return (
            f"a sample costs {here * 1e6:.0f} us there, {there * 1e6:.0f} us served at the frozen "
            "boundary"
        )

    def inherit(self, other: Ledger) -> None:
        """Take over what computed steps cost: that does not depend on the cut."""
        self._computed.extend(other._computed)
        self._controls.extend(other._controls)
        self._baseline_s = None

    @property
    def verdict(self) -> tuple[bool, str]:
        """Whether to go on skipping, and why."""
        num_computed = max(len(self._computed), len(self._controls))
        if len(self._served) < _MIN_HITS or num_computed < _MIN_COMPUTED:
            return True, "skipping until there is enough to compare"
        served, computed = _mean(self._served), self._computed_s
        text = (
            f"a sample costs {served * 1e6:.0f} us from the cache, {computed * 1e6:.0f} us computed"
        )
        return served < computed, text


def _mean(values: Iterable[float]) -> float:
    """Mean, for the first step of an epoch waits for its rows; but without outliers."""
    values = sorted(values)  # with every served step: `statistics` would take ten times as long
    half, odd = divmod(len(values), 2)
    most = _OUTLIER * (values[half] if odd else (values[half - 1] + values[half]) / 2)
    if values[-1] > most:
        values = [min(value, most) for value in values]
    return sum(values) / len(values)
