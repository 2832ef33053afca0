"""Whether a loader is served and from which cut: decided by whole steps.

Pure: it is told what happened, and answers with a `Turn` where something should change. What is
measured, and why whole steps have the last word: part J of docs/architecture.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from egeria_cache.gate.cost import Costs, choose
from egeria_cache.gate.schedule import Schedule
from egeria_cache.gate.steps import Kind, StepTimer
from egeria_cache.prefetch import PlannedEntry, View
from egeria_cache.skip import Step


@dataclass(frozen=True, slots=True)
class Turn:
    """What should change after a step."""

    kind: Literal["stop", "earlier"]
    """Compute this loader from now on; cut before the frozen boundary."""
    why: str
    where: str | None = None
    """The earlier module."""


class ServingPolicy:
    """Keeps the step timers of one cache, and what they say. Training thread only.

    Args:
        mode: "auto" decides by what is measured; "always" and "never" only keep the figures.
        overlap: Part of reading that costs the training thread nothing. On the CPU the readers
            take cores (and the interpreter) from what is computed.
    """

    def __init__(self, mode: str, overlap: float) -> None:
        self.mode = mode
        self.stopped: dict[str, str] = {}
        """Loaders for which skipping did not pay under this boundary, and why."""
        self.proof_s = 0.0
        """What proofs have taken so far."""
        self.beside_s = 0.0
        """What the cache has taken between two passes."""
        self._unnoted_s = 0.0
        """Of it, what belongs to a step that has not ended."""
        self._may_postpone = mode == "auto" and os.environ.get("EGERIA_POSTPONE") != "0"
        self._costs = Costs(overlap=overlap)
        self._earlier: str | None = None
        self._has_chosen = False
        self._timers: dict[tuple[str, str], StepTimer] = {}
        self._schedules: dict[str, Schedule] = {}
        self.idle: dict[str, str] = {}
        """Loaders whose batches are computed plainly for the rest of the epoch, and why."""

    def moved(self) -> None:
        """The frozen boundary is another one: decide anew."""
        self.stopped.clear()
        self.idle.clear()
        for loader, known in self._schedules.items():  # what was measured was of the other one
            self._schedules[loader] = Schedule(known.num_batches, known.epoch, hits=known.hits)
        self._earlier, self._has_chosen = None, False

    # ---- is it worth a proof? -----------------------------------------------------------------

    def begins(self, loader: str, epoch: int, num_batches: int | None) -> None:
        """A loader's pass begins.

        Args:
            loader: Which.
            epoch: The number of the pass.
            num_batches: In it, if that is known.
        """
        if not self._may_postpone or num_batches is None:
            return
        schedule = self._schedules.setdefault(loader, Schedule(num_batches))
        schedule.epoch = epoch
        if schedule.why_not(padded=False) is None:
            self.idle.pop(loader, None)

    def wants_timing(self, loader: str) -> bool:
        """Whether a batch is to be computed plainly before anything is proved, to be timed."""
        schedule = self._schedules.get(loader)
        return schedule is not None and schedule.wants_timing

    def timed(self, loader: str, front_s: float, forward_s: float) -> None:
        """A batch was computed plainly: its front, and all of the model, in so many seconds."""
        self._schedules[loader].fronts.append(front_s)
        self._schedules[loader].forwards.append(forward_s)

    def loaded(self, loader: str, seconds: float) -> None:
        """A batch took so many seconds of processor time to load, those of workers included."""
        self._schedules[loader].loads.append(seconds)

    def postpones(self, loader: str, *, padded: bool, hits: float = 1.0) -> str | None:
        """Say why this loader should be computed plainly for the rest of the epoch.

        Args:
            loader: Which.
            padded: Whether its samples are.
            hits: Part of its samples that are expected to be hits once all are stored.
        """
        schedule = self._schedules.get(loader)
        if schedule is None:
            return None
        schedule.hits = hits
        why = schedule.why_not(padded=padded)
        if why is not None:
            self.idle[loader] = why
        return why

    def is_postponed(self, loader: str) -> bool:
        """Whether this loader is computed plainly as yet."""
        return loader in self.idle

    def took_beside(self, seconds: float) -> None:
        """All that was done beside loading or computing a batch: nothing that computing costs."""
        self._unnoted_s += seconds

    # ---- whole steps --------------------------------------------------------------------------

    def wants_control(self, loader: str, boundary: str) -> bool:
        """Whether a batch that could be served should be computed, for comparison."""
        return self.mode == "auto" and self._timer(loader, boundary).wants_control()

    def step(
        self,
        loader: str,
        boundary: str,
        frozen: str,
        view: View | None,
        seconds: float,
        num_samples: float,
        entry: PlannedEntry | None,
        *,
        is_control: bool,
    ) -> Turn | None:
        """Note what a whole training step cost; say what should change, if anything.

        Args:
            loader: Whose batch it was.
            boundary: The boundary as the user named it.
            frozen: The last frozen module, as the model names it.
            view: Where the loader's batches enter now.
            seconds: From one request for a batch to the next.
            num_samples: Of the batch.
            entry: Its hits; None if it was computed whole.
            is_control: It could have been served.
        """
        timer = self._timer(loader, boundary)
        proof_s, self._unnoted_s = min(self._unnoted_s, seconds), 0.0
        kind = _kind(entry, is_control=is_control or view is None)
        timer.step(kind, seconds, num_samples, proof_s=proof_s)
        if self.mode != "auto" or view is None:
            return None
        if kind == "served":
            return self._judge(loader, timer) if timer.is_due else None
        return self._choose(view.cut.profile) if view.cut.boundary == frozen else None

    def _judge(self, loader: str, timer: StepTimer) -> Turn | None:
        pays, why = timer.verdict
        if pays:
            return None
        self.stopped[loader] = why
        return Turn("stop", why)

    def _choose(self, profile: tuple[Step, ...]) -> Turn | None:
        """Look once for a cut before the frozen boundary."""
        if self._has_chosen or not profile:
            return None
        self._has_chosen = True
        where, last = choose(profile, self._costs), profile[-1]
        if where in (None, last.name):
            return None
        there = next(step for step in profile if step.name == where)
        self._earlier = (
            f"cut at {where!r}, whose output is smaller: {there.row_bytes:,} bytes a sample, "
            f"{last.row_bytes:,} at {last.name!r}"
        )
        return Turn("earlier", self._earlier, where)

    # ---- figures ------------------------------------------------------------------------------

    def sentence(self, boundary: str | None) -> str:
        """Say in words what was decided under this boundary, for the statistics."""
        found = dict(self._decisions(boundary))
        named = len(found) > 1
        said = [f"{name!r} {what}" if named else what for name, what in found.items()]
        return "; ".join([*said, self._earlier] if self._earlier else said)

    def _decisions(self, boundary: str | None) -> Iterator[tuple[str, str]]:
        for loader, why in self.idle.items():
            yield loader.rpartition("#")[0], f"postponed: {why}"
        for (loader, at), timer in self._timers.items():
            if at == boundary and not self.is_postponed(loader):
                how = "off" if loader in self.stopped else "on"
                why = self.stopped.get(loader) or timer.verdict[1]
                yield loader.rpartition("#")[0], f"{how}: {why}"

    @property
    def saved_s(self) -> float:
        """Training time saved so far, net of all that the cache took; negative if lost."""
        return sum(timer.saved_s for timer in self._timers.values()) - self.beside_s

    def _timer(self, loader: str, boundary: str) -> StepTimer:
        timer = self._timers.get((loader, boundary))
        if timer is None:
            timer = self._timers[loader, boundary] = StepTimer()
        return timer


def _kind(entry: PlannedEntry | None, *, is_control: bool) -> Kind:
    if entry is None:
        return "computed" if is_control else "captured"
    return "served" if entry.serves_most else "partial"
