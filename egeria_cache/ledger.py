"""Whether skipping pays: whole training steps, served and computed, side by side.

The gate believes measurements alone. A step is taken from one request for a batch to the next:
waiting, forward, backward and optimizer together, so that it holds on a device that runs behind the
host, and whatever the dataset costs. Medians over recent steps, per sample.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["Ledger"]

_RECENT = 64
_MIN_HITS, _MIN_COMPUTED = 16, 4
_WORTH = 1.05
"""Skipping goes on while a served sample costs less than this multiple of a computed one."""


class Ledger:
    """Costs per sample of one loader's steps under one boundary. Pure; seconds."""

    def __init__(self) -> None:
        """Start without experience."""
        self._computed: deque[float] = deque(maxlen=_RECENT)
        self._served: deque[float] = deque(maxlen=_RECENT)
        self.saved_s = 0.0
        """Time saved so far, against computing every served sample; negative if it was lost."""

    def computed(self, seconds: float, num_samples: int) -> None:
        """Note a batch that was loaded and computed whole."""
        self._computed.append(seconds / num_samples)

    def served(self, seconds: float, num_samples: int) -> None:
        """Note a batch that was served whole."""
        self._served.append(seconds / num_samples)
        if self._computed:
            self.saved_s += num_samples * statistics.median(self._computed) - seconds

    @property
    def has_computed(self) -> bool:
        """Whether a computed step was noted."""
        return bool(self._computed)

    @property
    def has_any(self) -> bool:
        """Whether any step was noted."""
        return bool(self._computed or self._served)

    @property
    def is_served_enough(self) -> bool:
        """Whether a median of served steps means something."""
        return len(self._served) >= _MIN_HITS

    def worse_than(self, other: Ledger) -> str | None:
        """Say so if being served costs more here than at another cut."""
        if not (self.is_served_enough and other.is_served_enough):
            return None
        here, there = statistics.median(self._served), statistics.median(other._served)
        if here <= there:
            return None
        return (
            f"a sample costs {here * 1e6:.0f} us there, {there * 1e6:.0f} us served at the frozen "
            "boundary"
        )

    def inherit(self, other: Ledger) -> None:
        """Take over what computed steps cost: that does not depend on the cut."""
        self._computed.extend(other._computed)

    @property
    def verdict(self) -> tuple[bool, str]:
        """Whether to go on skipping, and why."""
        if len(self._served) < _MIN_HITS or len(self._computed) < _MIN_COMPUTED:
            return True, "skipping until there is enough to compare"
        served, computed = statistics.median(self._served), statistics.median(self._computed)
        text = (
            f"a sample costs {served * 1e6:.0f} us from the cache, {computed * 1e6:.0f} us computed"
        )
        return served < _WORTH * computed, text
