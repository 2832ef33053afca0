"""Whether a loader is served and from which cut: decided by whole steps.

Pure: it is told what happened, and answers where something should change. What is measured, and why
whole steps have the last word: part J of docs/architecture.md.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

from egeria_cache.gate.schedule import Schedule
from egeria_cache.gate.steps import Kind, StepTimer
from egeria_cache.skip import Step

_MIN_GAIN = 0.05
"""Part of the prefix that another cut must save more: below it, noise decides."""
_READ_S, _READ_S_PER_BYTE = 20e-6, 0.5e-9
"""What it costs to look a sample up, and to decode and copy a byte of its activation."""


def choose(profile: Sequence[Step], overlap: float) -> Step | None:
    """Choose where to cut among the modules that returned before the frozen boundary did.

    Skipping saves the forward of the prefix, and costs the reading of what is stored in its place.
    An early activation may be five times the input and a later one one and a half, so the last
    frozen module is not always the best.

    Args:
        profile: `Cut.profile`, in execution order; the last one is the frozen boundary.
        overlap: Part of the reading that runs while the model computes, in [0, 1].

    Returns:
        None where no cut saves enough.
    """

    def saving(step: Step) -> float:
        read_s = _READ_S + step.row_bytes * _READ_S_PER_BYTE
        return step.seconds_per_sample - (1 - overlap) * read_s

    possible = [step for step in profile if step.row_bytes > 0]
    if not possible:
        return None
    least, last = _MIN_GAIN * profile[-1].seconds_per_sample, profile[-1]
    best = max(possible, key=saving)
    if last in possible and saving(best) - saving(last) <= least:
        best = last
    return best if saving(best) > least else None


class ServingPolicy:
    """Keeps the step timers of one cache, and what they say. Training thread only.

    Args:
        mode: "auto" decides by what is measured; "always" and "never" only keep the figures.
        overlap: Part of reading that costs the training thread nothing. On the CPU the readers
            take cores (and the interpreter) from what is computed.
        is_stored: Whether an earlier run has left something.
    """

    def __init__(self, mode: str, overlap: float, *, is_stored: bool = False) -> None:
        self.num_epochs = dict[str, int]()
        """How many the last run had, by a loader's name and its number of batches."""
        self.mode = mode
        self.stopped = set[str]()
        """Loaders for which skipping did not pay under this boundary."""
        self.idle: dict[str, str] = {}
        """Loaders whose batches are computed plainly for the rest of the epoch, and why; the
        `stopped` ones for longer."""
        self.proof_s = 0.0
        """What proofs have taken so far."""
        self.beside_s = 0.0
        """What the cache has taken between two passes."""
        self.seeks_cut = mode == "auto"
        """Whether it was not yet looked for a cut before the frozen boundary."""
        self._loaders = set[str]()
        """Which have begun a pass."""
        self._unnoted_s = 0.0
        """Taken by the cache in a step that has not ended."""
        self._may_postpone = mode == "auto" and os.environ.get("EGERIA_POSTPONE") != "0"
        self._overlap, self._is_stored = overlap, is_stored
        self._earlier: str | None = None
        self._timers = defaultdict[tuple[str, str], StepTimer](StepTimer)
        self.schedules: dict[str, Schedule] = {}
        """By loader."""
        self._shared: dict[str, Schedule] = {}

    def moved(self) -> None:
        """The frozen boundary is another one: decide anew."""
        self.stopped.clear()
        self.idle.clear()
        for known in self.schedules.values():  # what was measured was of the other one
            known.forget()
        self._earlier, self.seeks_cut = None, self.mode == "auto"

    # ---- is it worth a proof? -----------------------------------------------------------------

    def begins(self, loader: str, epoch: int, num_batches: int | None) -> None:
        """A loader's pass begins, of so many batches, if that is known."""
        self._loaders.add(loader)
        if not self._may_postpone or num_batches is None:
            return
        # Scripts make a loader anew for every epoch: one of its name and length was known before.
        alike = f"{loader.rpartition('#')[0]}, {num_batches}"
        known = self.num_epochs.get(alike, 0)
        new = Schedule(num_batches, is_stored=self._is_stored, num_epochs=known)
        schedule = self.schedules.setdefault(loader, self._shared.setdefault(alike, new))
        schedule.epoch = max(epoch, schedule.num_passes)
        schedule.num_passes += 1
        self.num_epochs[alike] = schedule.epoch + 1
        if loader not in self.stopped and schedule.why_not() is None:
            self.idle.pop(loader, None)

    @property
    def is_idle(self) -> bool:
        """Whether all loaders are `idle`."""
        return self._loaders <= self.idle.keys()

    def wants_timing(self, loader: str) -> bool:
        """Whether a batch is to be computed plainly before anything is proved, to be timed."""
        schedule = self.schedules.get(loader)
        return schedule is not None and schedule.wants_timing

    def timed(self, loader: str, front_s: float, forward_s: float) -> None:
        """A batch was computed plainly: its front, and all of the model, in so many seconds."""
        self.schedules[loader].fronts.append(front_s)
        self.schedules[loader].forwards.append(forward_s)

    def postpones(self, loader: str, *, padded: bool, hits: float = 1.0) -> str | None:
        """Say why this loader should be computed plainly for the rest of the epoch.

        Args:
            loader: Which.
            padded: Whether its samples are.
            hits: Part of its samples that are expected to be hits once all are stored.
        """
        schedule = self.schedules.get(loader)
        if schedule is None:
            return None
        schedule.hits, schedule.padded = hits, padded
        why = schedule.why_not()
        if why is not None:
            self.idle[loader] = why
        return why

    def took_beside(self, seconds: float) -> None:
        """All that was done beside loading or computing a batch: nothing that computing costs."""
        self._unnoted_s += seconds

    # ---- whole steps --------------------------------------------------------------------------

    def wants_control(self, loader: str, boundary: str) -> bool:
        """Whether a batch that could be served should be computed, for comparison."""
        return self.mode == "auto" and self._timers[loader, boundary].wants_control()

    def step(
        self, loader: str, boundary: str, kind: Kind, seconds: float, num_samples: float
    ) -> str | None:
        """Note what a whole training step cost; say why to stop serving its loader, if so.

        Args:
            loader: Whose batch it was.
            boundary: The boundary as the user named it.
            kind: What became of the batch.
            seconds: From one request for a batch to the next.
            num_samples: Of the batch.
        """
        timer = self._timers[loader, boundary]
        proof_s, self._unnoted_s = min(self._unnoted_s, seconds), 0.0
        timer.step(kind, seconds, num_samples, proof_s=proof_s)
        if kind != "served" or self.mode != "auto" or not timer.is_due:
            return None
        pays, why = timer.verdict
        if pays or timer.measures_anew():
            return None
        self.stopped.add(loader)
        self.idle[loader] = why
        return why

    def look_earlier(self, profile: tuple[Step, ...]) -> tuple[str, str] | None:
        """Look once for a cut before the frozen boundary; return where and why, if there is one."""
        self.seeks_cut = not profile
        found = choose(profile, self._overlap)
        if found is None or found is profile[-1]:
            return None
        last = profile[-1]
        self._earlier = (
            f"cut at {found.name!r}, whose output is smaller: {found.row_bytes:,} bytes a sample, "
            f"{last.row_bytes:,} at {last.name!r}"
        )
        return found.name, self._earlier

    # ---- figures ------------------------------------------------------------------------------

    def sentence(self, boundary: str | None) -> str:
        """Say in words what was decided under this boundary, for the statistics."""
        how = dict.fromkeys(self.stopped, "off")
        found = {one: f"{how.get(one, 'postponed')}: {why}" for one, why in self.idle.items()}
        for (loader, at), timer in sorted(self._timers.items(), key=lambda one: one[1].num_served):
            if at == boundary and loader not in self.idle:
                found[loader] = f"on: {timer.verdict[1]}"
        named = {loader.rpartition("#")[0]: what for loader, what in found.items()}
        said = [f"{name!r} {what}" if len(named) > 1 else what for name, what in named.items()]
        return "; ".join([*said, self._earlier] if self._earlier else said)

    @property
    def saved_s(self) -> float:
        """Training time saved so far, net of all that the cache took; negative if lost."""
        return sum(timer.saved_s for timer in self._timers.values()) - self.beside_s
