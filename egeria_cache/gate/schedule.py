"""Whether a run is long enough to win back the proof that serving it begins with.

A loader tells how many batches it has in an epoch and how many epochs were run; how many are to
come, only the last run in this directory can tell. So a few batches are computed plainly, timed,
and then, at every epoch as long as nothing is proved, it is asked: would so many hits as may be
expected win back what a proof costs?
"""

from __future__ import annotations

from dataclasses import dataclass, field

_PROOF_FORWARDS = {False: 10, True: 16}
_PROOF_S = 0.15
"""What a proof costs, for samples of one length and padded ones, in forwards of the whole model and
beside them: 8 of a ResNet-32, 13 of a ResNet-50 on 64 pixels, where float64 has to decide what is
rounding; 17 and 15 of BERT of 4 and 12 layers (seconds of the processor, one thread). Beside them:
copies, code that is read, the data set's fingerprint: 0.1 s more where 1,000 rows are in memory."""
_HIT_S = {False: 1e-3, True: 3e-3}
"""What a served step costs beside what is computed in it, for samples of one length
(benchmarks.small_step) and padded ones (benchmarks.short)."""
_MIXED_S, _MIXED_PART = 4e-3, 0.1
"""What one costs where some of its samples are new each time, and stored (docs/augmentation.md),
and what its front takes longer for them than that part of its time for a whole batch."""
_STORED_S = 3e-3
"""What it costs beside that to store a batch, for either (benchmarks.short)."""
_MIN_EPOCHS, _LATER = {False: 2, True: 4}, 4
"""Epochs that are expected, more where samples are random: who augments trains for long. Who ran so
many goes on for one: a proof late in a run is lost."""
_NUM_TIMED = 2
"""The least of these counts: the first warms up. What is timed is not stored."""


@dataclass(slots=True)
class Schedule:
    """What is known of one loader's part in a run. Pure; seconds."""

    num_batches: int
    """In an epoch."""
    epoch: int = 0
    """The present one; they are counted from 0."""
    fronts: list[float] = field(default_factory=list)
    """What the frozen front took in batches that were computed plainly."""
    forwards: list[float] = field(default_factory=list)
    """What the whole model took for them."""
    loads: list[float] = field(default_factory=list)
    """What it took to load a batch: processor time of the training thread and the workers."""
    hits: float = 1.0
    """Part of an epoch's samples that may be hits: random draws are made anew in turns."""
    padded: bool = False
    """Whether the samples are, as far as is known."""
    is_stored: bool = False
    """Whether an earlier run has left something: there may be hits in the present one, too."""
    num_passes: int = 0
    """Begun by loaders like it."""
    num_epochs: int = 0
    """Of the last run in this directory, if there was one."""

    def forget(self) -> None:
        """What was measured does not hold any more."""
        for times in (self.fronts, self.forwards, self.loads):
            times.clear()
        self.padded = False

    @property
    def wants_timing(self) -> bool:
        """Whether the next batch is to be computed plainly, to know what it costs: not if already
        the first, which warms up, tells that a proof would not be won back.
        """
        return not self.fronts or (len(self.fronts) < _NUM_TIMED and self.why_not() is None)

    def why_not(self) -> str | None:
        """Say why a proof would not be won back; None if it would."""
        front_s, load_s = min(self.fronts, default=0.0), min(self.loads, default=0.0)
        is_random = self.hits < 1
        known = self.num_epochs - self.epoch - 1
        to_come = max(_MIN_EPOCHS[is_random], known, self.epoch // _LATER)
        steps = self.num_batches * (to_come + self.is_stored)
        served_s = _MIXED_S + _MIXED_PART * front_s if is_random else _HIT_S[self.padded]
        gain_s = steps * max(0.0, self.hits * (front_s + load_s) - served_s)
        proof_s = _PROOF_FORWARDS[self.padded] * min(self.forwards, default=0.0) + _PROOF_S
        proof_s += 0.0 if self.is_stored else self.num_batches * _STORED_S
        if gain_s >= proof_s:
            return None
        return (
            f"{self.num_batches} batches an epoch, whose frozen front takes {front_s * 1e3:.1f} ms "
            f"each, would hardly win back a proof of some {proof_s:.1f} s (gate='always' does not "
            "wait)"
        )
