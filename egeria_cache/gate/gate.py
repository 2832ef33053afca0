"""Where to cut, at or before the frozen boundary, or not at all: a cost model without effects.

Skipping saves the forward of the prefix, and costs the reading of what is stored in its place
(paper, section 4.3: prefetching is off while the front is cheap). An early activation may be five
times the input and a later one one and a half, so the last frozen module is not always the best.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from egeria_cache.skip import Step

__all__ = ["CostMeter", "Costs", "Decision", "Gate", "choose"]

_MIN_GAIN = 0.05
"""Part of the prefix that must be saved: below it, noise decides."""
_EPOCHS = 5
"""What is paid once for each sample (writing, filling a store anew) is spread over so many."""
_RECENT = 64
_MIN_READS = 3
_MAX_LOOKUP_S = 20e-6
"""Of a read's time, what may be laid to the sample and not to its bytes while one size is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What moving a sample's activation costs the training thread, as measured so far."""

    fetch_s_per_byte: float = 1 / 2e9
    """Decode and copy, of raw bytes; assumed until measured."""
    fetch_s_per_sample: float = 20e-6
    """Lookup and bookkeeping per sample."""
    overlap: float = 0.5
    """Part of the fetching that runs while the device computes, in [0, 1]."""
    write_s_per_byte: float = 0.0
    """Capture and hand-over to the writer, once for each sample that is stored."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be in [0, 1], got {self.overlap}")
        if min(self.fetch_s_per_byte, self.fetch_s_per_sample, self.write_s_per_byte) < 0:
            raise ValueError("costs must not be negative")

    def fetch_s(self, num_bytes: int) -> float:
        """Seconds that the training thread waits for one sample's activation."""
        return (1 - self.overlap) * (self.fetch_s_per_sample + num_bytes * self.fetch_s_per_byte)


class CostMeter:
    """Collects what fetching, writing and computing cost, as training runs. Pure; seconds.

    Args:
        max_overlap: Bound on the part of the fetching that costs the training thread nothing. On
            the CPU the readers take cores (and the interpreter) from what is computed.
    """

    def __init__(self, max_overlap: float = 0.5) -> None:
        self.max_overlap = max_overlap
        self._reads: dict[int, deque[float]] = {}
        self._waits: deque[float] = deque(maxlen=_RECENT)
        self._writes: deque[float] = deque(maxlen=_RECENT)
        self._fronts: dict[str, deque[float]] = {}

    def read(self, seconds: float, num_samples: int, row_bytes: int) -> None:
        """Note one batch read by a reader thread: store to rows."""
        if num_samples and row_bytes:
            recent = self._reads.get(row_bytes)
            if recent is None:
                recent = self._reads[row_bytes] = deque(maxlen=_RECENT)
            recent.append(seconds / num_samples)

    def waited(self, seconds: float, num_samples: int) -> None:
        """Note for how long the training thread was held up by a batch of hits."""
        self._waits.append(seconds / num_samples)

    def wrote(self, seconds: float, num_bytes: int) -> None:
        """Note what storing a batch cost the training thread."""
        if num_bytes:
            self._writes.append(seconds / num_bytes)

    def computed(self, boundary: str, seconds: float, num_samples: int) -> None:
        """Note the time from the model's start until `boundary` returned."""
        recent = self._fronts.setdefault(boundary, deque(maxlen=_RECENT))
        recent.append(seconds / num_samples)

    @property
    def num_reads(self) -> int:
        """Batches read so far, of the recent ones."""
        return sum(map(len, self._reads.values()))

    @property
    def is_enough(self) -> bool:
        """Whether reading has been measured."""
        return self.num_reads >= _MIN_READS

    @property
    def costs(self) -> Costs:
        """The costs as measured so far; what was not is assumed."""
        if not self._reads:
            return Costs(write_s_per_byte=self._write_s)
        by_size = sorted((size, statistics.median(times)) for size, times in self._reads.items())
        (small, small_s), (large, large_s) = by_size[0], by_size[-1]
        per_byte = (large_s - small_s) / (large - small) if large >= 2 * small else 0.0
        lookup_s = min(_MAX_LOOKUP_S, small_s / 2)
        if per_byte > 0:
            lookup_s = max(0.0, small_s - per_byte * small)
        else:
            per_byte = max(0.0, large_s - lookup_s) / large
        overlap = self.max_overlap
        if self._waits:
            overlap = 1 - statistics.median(self._waits) / max(large_s, 1e-12)
        return Costs(
            fetch_s_per_byte=per_byte,
            fetch_s_per_sample=lookup_s,
            write_s_per_byte=self._write_s,
            overlap=min(self.max_overlap, max(0.0, overlap)),
        )

    @property
    def _write_s(self) -> float:
        return statistics.median(self._writes) if self._writes else 0.0

    def profile(self, steps: Sequence[Step]) -> list[Step]:
        """Correct a profile taken once by what its last step was measured to cost since."""
        recent = self._fronts.get(steps[-1].name) if steps else None
        if not recent or len(recent) < _MIN_READS or steps[-1].seconds_per_sample <= 0:
            return list(steps)
        factor = statistics.median(recent) / steps[-1].seconds_per_sample
        return [replace(s, seconds_per_sample=factor * s.seconds_per_sample) for s in steps]

    def __str__(self) -> str:
        """Say what was measured, for people."""
        if not self._reads:
            return "nothing read yet"
        costs = self.costs
        return (
            f"{self.num_reads} reads: {costs.fetch_s_per_sample * 1e6:.0f} us a sample and "
            f"{costs.fetch_s_per_byte * 1e9:.2f} s per GB, {costs.overlap:.0%} of it beside the "
            f"computation; writing {costs.write_s_per_byte * 1e9:.2f} s per GB"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to cut, and why."""

    boundary: str | None
    """None: compute everything."""
    saved_s: float
    """Expected seconds saved per sample served from the cache."""
    reason: str


class Gate:
    """Looks for a better cut than the frozen boundary, and goes back at most once. Pure.

    It looks when reading has been measured, and again when served steps have been; it moves at most
    once per boundary, and what it did is confirmed or undone by whole steps (`ledger.py`).
    """

    def __init__(self, meter: CostMeter) -> None:
        self.meter = meter
        self.reset()

    def reset(self) -> None:
        """The frozen boundary moved: begin anew. What was measured stays."""
        self._num_looks = 0
        self._decision: Decision | None = None
        self.earlier: str | None = None
        """Where the model is cut instead of at the frozen boundary."""
        self._undone = ""

    @property
    def is_settled(self) -> bool:
        """Whether a first decision was taken under this boundary."""
        return self._num_looks > 0

    def look(self, steps: Sequence[Step], *, was_served: bool) -> str | None:
        """Return an earlier module to cut at; None to stay.

        Args:
            steps: `Cut.profile` of the cut at the frozen boundary.
            was_served: Whether whole steps were served from it, so that its store is filled.
        """
        wanted = 2 if was_served else 1
        if self._num_looks >= wanted or self._undone or self.earlier or not steps:
            return None
        if not self.meter.is_enough:
            return None
        self._num_looks = wanted
        costs, steps = self.meter.costs, self.meter.profile(steps)
        refill_s = max(0.0, _saving(steps[-1], costs)) / _EPOCHS if was_served else 0.0
        self._decision = choose(steps, costs, refill_s=refill_s)
        if self._decision.boundary not in (None, steps[-1].name):
            self.earlier = self._decision.boundary
        return self.earlier

    def undo(self, why: str) -> bool:
        """Go back to the frozen boundary, if the model is cut before it."""
        if self.earlier is None:
            return False
        self._undone = f"gone back from {self.earlier!r}: {why}"
        self.earlier = None
        return True

    def __str__(self) -> str:
        """Say what was decided and why, for people."""
        if self._decision is None:
            return ""
        return f"{self._undone or self._decision.reason} ({self.meter})"


def choose(steps: Sequence[Step], costs: Costs, *, refill_s: float = 0.0) -> Decision:
    """Choose among the modules that returned before the frozen boundary did.

    Args:
        steps: `Cut.profile`, in execution order; the last one is the frozen boundary.
        costs: Costs per sample.
        refill_s: By how much another cut than the last must be better, per sample.

    Raises:
        ValueError: No steps.
    """
    if not steps:
        raise ValueError("there is no module to choose from")
    last = steps[-1]
    possible = [step for step in steps if step.row_bytes > 0]
    if not possible:
        return Decision(None, 0.0, "nothing that a store could keep crosses any boundary")
    best = max(possible, key=lambda step: _saving(step, costs))
    if best is not last and last in possible:
        # Another cut is filled anew, so it must be better by more than noise.
        gain = _saving(best, costs) - _saving(last, costs)
        best = best if gain > max(refill_s, _MIN_GAIN * last.seconds_per_sample) else last
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
    written = costs.write_s_per_byte * step.row_bytes / _EPOCHS
    return step.seconds_per_sample - costs.fetch_s(step.row_bytes) - written
