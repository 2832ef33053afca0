"""AutoFreeze (Liu et al. 2021): freeze the front layers whose gradients change least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from egeria_core.policies import Measure, Reading
from egeria_core.watch import Meter, Watched

from .gradients import GradientMeter

__all__ = ["AutoFreezePolicy"]


class AutoFreezePolicy:
    """Per interval, freeze every layer in front of the first that changes more than most.

    Args:
        percentile: Of the active layers' changes; the first layer at or above it stays active
            with all behind it (the paper's 50).
    """

    measure: Measure = "own"
    per_layer = True

    def __init__(self, percentile: float = 50.0) -> None:
        if not 0 <= percentile <= 100:
            raise ValueError(f"percentile must lie between 0 and 100, got {percentile}")
        self.percentile = percentile
        self.frozen = 0
        self._previous: list[float | None] | None = None

    def make_meter(self, watched: Watched) -> Meter:
        """Return what adds gradients up."""
        return GradientMeter(watched, "gradient_sum")

    def bind(self, boundaries: Sequence[str]) -> None:
        """Layers are only counted here."""

    def observe(self, reading: Reading) -> int:
        """Compare this interval's gradient sums with the last one's."""
        if reading.values is None:
            return self.frozen
        previous, self._previous = self._previous, list(reading.values)
        if previous is None:
            return self.frozen  # the first interval only records
        changes = [_change(old, new) for old, new in zip(previous, reading.values, strict=True)][
            self.frozen :
        ]
        known = sorted(change for change in changes if change is not None)
        if not known:
            return self.frozen
        threshold = percentile_of(known, self.percentile)
        for offset, change in enumerate(changes):
            if change is None or change >= threshold:
                self.frozen = min(self.frozen + offset, reading.num_layers - 1)
                break
        return self.frozen

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        return {"frozen": self.frozen, "previous": self._previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.frozen, self._previous = state["frozen"], state["previous"]


def _change(old: float | None, new: float | None) -> float | None:
    """Return |old - new| / old; None where there is nothing to compare."""
    if old is None or new is None:
        return None
    return abs(old - new) / old if old > 0 else 0.0


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """Return the percentile of sorted values, interpolated linearly (NumPy's default)."""
    position = (len(values) - 1) * percentile / 100
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)
