"""Where to cut, at or before the frozen boundary, or not at all: a cost model without effects.

Skipping saves the forward of the prefix, and costs the reading of what is stored in its place
(paper, section 4.3: prefetching is off while the front is cheap). An early activation may be five
times the input and a later one one and a half, so the last frozen module is not always the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from egeria_cache.cut import Step

__all__ = ["Costs", "Decision", "choose"]

_MIN_GAIN = 0.05
"""Part of the prefix that must be saved: below it, noise decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What moving a sample's activation costs the training thread, as measured so far."""

    fetch_s_per_byte: float = 1 / 2e9
    """Decode and copy, of raw bytes; assumed until measured."""
    fetch_s_per_sample: float = 20e-6
    """Lookup and bookkeeping per sample."""
    overlap: float = 0.5
    """Part of the fetching that runs while the device computes, in [0, 1]."""
    sample_s: float = 0.0
    """Time to produce a raw sample, which a hit does not need either; overlapped the same way."""
    free_bytes_per_sample: float = float("inf")
    """Room left under the byte limit, divided by the number of samples."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be in [0, 1], got {self.overlap}")
        if min(self.fetch_s_per_byte, self.fetch_s_per_sample, self.sample_s) < 0:
            raise ValueError("costs must not be negative")

    def fetch_s(self, num_bytes: int) -> float:
        """Seconds that the training thread waits for one sample's activation."""
        return (1 - self.overlap) * (self.fetch_s_per_sample + num_bytes * self.fetch_s_per_byte)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to cut, and why."""

    boundary: str | None
    """None: compute everything."""
    saved_s: float
    """Expected seconds saved per sample served from the cache."""
    reason: str


def choose(steps: Sequence[Step], costs: Costs, mode: str = "auto") -> Decision:
    """Choose among the modules that returned before the frozen boundary did.

    Args:
        steps: `Cut.profile`, in execution order; the last one is the frozen boundary.
        costs: Costs per sample.
        mode: "auto" chooses by cost, "always" takes the last step, "never" none.

    Raises:
        ValueError: Unknown mode, or no steps.
    """
    if mode not in ("auto", "always", "never"):
        raise ValueError(f"gate must be 'auto', 'always' or 'never', got {mode!r}")
    if not steps:
        raise ValueError("there is no module to choose from")
    if mode == "never":
        return Decision(None, 0.0, "gate='never'")
    last = steps[-1]
    if mode == "always":
        return Decision(last.name, _saving(last, costs), "gate='always'")
    fitting = [step for step in steps if 0 < step.row_bytes <= costs.free_bytes_per_sample]
    if not fitting:
        return Decision(
            None, 0.0,
            f"a sample needs {last.row_bytes} bytes and the limit leaves "
            f"{costs.free_bytes_per_sample:.0f}",
        )  # fmt: skip
    best = max(fitting, key=lambda step: _saving(step, costs))
    saved = _saving(best, costs)
    if saved <= _MIN_GAIN * last.seconds_per_sample:
        return Decision(
            None, saved,
            f"computing the prefix takes {last.seconds_per_sample * 1e6:.0f} us a sample, reading "
            f"{best.row_bytes} bytes back {costs.fetch_s(best.row_bytes) * 1e6:.0f} us",
        )  # fmt: skip
    where = "the frozen boundary" if best is last else f"before the frozen boundary {last.name!r}"
    return Decision(
        best.name, saved,
        f"{best.name!r}, {where}, saves {saved * 1e6:.0f} us a sample at {best.row_bytes} bytes",
    )  # fmt: skip


def _saving(step: Step, costs: Costs) -> float:
    hidden = (1 - costs.overlap) * costs.sample_s
    return step.seconds_per_sample + hidden - costs.fetch_s(step.row_bytes)
