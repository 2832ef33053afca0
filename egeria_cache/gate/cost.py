"""Where to cut, at or before the frozen boundary: chosen once, from shapes and timings.

Skipping saves the forward of the prefix, and costs the reading of what is stored in its place
(paper, section 4.3: prefetching is off while the front is cheap). An early activation may be five
times the input and a later one one and a half, so the last frozen module is not always the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from egeria_cache.skip import Step

_MIN_GAIN = 0.05
"""Part of the prefix that another cut must save more: below it, noise decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What reading a sample's activation costs the training thread."""

    fetch_s_per_byte: float = 1 / 2e9
    """Decode and copy, of raw bytes."""
    fetch_s_per_sample: float = 20e-6
    """Lookup and bookkeeping per sample."""
    overlap: float = 0.5
    """Part of the fetching that runs while the device computes, in [0, 1]."""

    def fetch_s(self, num_bytes: int) -> float:
        """Seconds that the training thread waits for one sample's activation."""
        return (1 - self.overlap) * (self.fetch_s_per_sample + num_bytes * self.fetch_s_per_byte)


def choose(steps: Sequence[Step], costs: Costs) -> str | None:
    """Choose among the modules that returned before the frozen boundary did; None: compute all.

    Args:
        steps: `Cut.profile`, in execution order; the last one is the frozen boundary.
        costs: Costs per sample.
    """
    possible = [step for step in steps if step.row_bytes > 0]
    if not possible:
        return None
    least, last = _MIN_GAIN * steps[-1].seconds_per_sample, steps[-1]
    best = max(possible, key=lambda step: _saving(step, costs))
    if last in possible and _saving(best, costs) - _saving(last, costs) <= least:
        best = last
    return best.name if _saving(best, costs) > least else None


def _saving(step: Step, costs: Costs) -> float:
    return step.seconds_per_sample - costs.fetch_s(step.row_bytes)
