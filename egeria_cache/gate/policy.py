"""Whether a loader is served and from which cut: decided by whole steps, which are counted here.

A step is taken from one request for a batch to the next: waiting, forward, backward and optimizer
together, so that it holds on a device that runs behind the host, and whatever the dataset costs.
With it goes all that the cache itself does in its course: proofs, captures, audits. What is told
of steps is taken down by `Counters`, timed by a `StepTimer` for each loader and boundary, and
decided upon by the `ServingPolicy`; which hits are computed again, an `AuditPlan` says. Why whole
steps have the last word: part J of docs/architecture.md.

A batch of misses costs more than it would without a cache, since it is captured and written. So a
few batches that could be served are computed all the same, ever fewer of them: the controls. Their
results are what would have been served. They come in twos, for a step that is computed after served
ones finds neither its memory nor its code warm: the second counts. Where no step was computed
before, say in a second run over the same directory, they come in fours.

Most batches of random samples are mixed for ever: some of their draws are new. Where at least half
of a batch is read, it counts as served, with all that its misses took; what is computed for several
together is shared out over their steps.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median_low
from typing import Literal

import numpy as np

from egeria_cache.batch import Batch, Entry
from egeria_cache.gate.schedule import Schedule
from egeria_cache.gate.stats import CacheStats
from egeria_cache.skip import Step

log = logging.getLogger("egeria")
MAX_COST = 0.01
"""Part of the time that the audits' floor may take, beyond the first hit."""
_NUM_DOUBTED = 8
"""Hits of an earlier run that are recomputed first of all."""
_MIN_GAIN = 0.05
"""Part of the prefix that another cut must save more: below it, noise decides."""
_READ_S, _READ_S_PER_BYTE = 20e-6, 0.5e-9
"""What it costs to look a sample up, and to decode and copy a byte of its activation."""
Kind = Literal["served", "computed", "captured", "partial"]
"""Read, at least half of it; loaded and computed as without a cache; computed and stored; mostly
that, with some rows that were read."""
_COMPUTED: tuple[Kind, ...] = ("computed", "captured")
_NUM_WARM = 3
"""Steps that warm up what the others find warm; they count for what their proofs took alone."""
_RECENT = 64
_MIN_SERVED = 16
_FIRST_CONTROL = 16
_NUM_ASKED = 4
"""Controls before serving is given up: what was computed long ago had a machine that was less busy,
perhaps."""
_BETWEEN_VERDICTS = 8
"""Served batches; a verdict takes longer than any other part of the gate."""
_OUTLIER, _SLOW = 8.0, 2.0
"""Steps of more than so many typical ones count as that many in what was saved, for somebody saved
a checkpoint; and where served ones are compared with a few computed ones that had no such luck."""


class Counters:
    """Keeps one cache's counts. Used from the training thread."""

    def __init__(self) -> None:
        """Start at zero."""
        self.counts = CacheStats()
        self.num_calls = 0
        """Of the model."""
        self.is_compiled = False
        """Whether it was last called as code that was compiled whole: it is served nothing."""
        self.passing: str | None = None
        """Why nothing is served, until something is, or is proved."""
        self.unserved: str | None = None
        """Why calls were not, until some are."""

    def batch(self, num_samples: int, hit: np.ndarray | None, *, is_random: bool = False) -> None:
        """Note what a batch consists of: yielded without hits, or served with some."""
        num_hits = 0 if hit is None else int(np.count_nonzero(hit))
        if num_hits and self.counts.why_not in (self.passing, self.unserved):
            self.counts.why_not = None
        self.counts.hits += num_hits
        self.counts.misses += num_samples - num_hits
        self.counts.random_samples += num_samples if is_random else 0
        self.counts.fresh_samples += num_samples - num_hits if is_random else 0
        self.counts.hit_batches += num_hits == num_samples
        self.counts.miss_batches += num_hits == 0
        self.counts.partial_batches += 0 < num_hits < num_samples

    def goes_on(self) -> None:
        """Something is served again, or will be."""
        if self.counts.why_not == self.passing:
            self.counts.why_not = None

    def tell(self, why: str, text: str = "%s", *, level: int = logging.WARNING) -> None:
        """Say why nothing is served, until there is another reason."""
        if self.counts.why_not != why:
            log.log(level, text, why)
        self.counts.why_not = why

    def model_called(self) -> None:
        """Note that the model was called (its cost is taken by whole steps: `StepTimer`)."""
        self.num_calls, self.is_compiled = self.num_calls + 1, False


class AuditPlan:
    """Chooses the hits that are computed again, and compared. Used from the training thread.

    Whatever the rate, one hit is recomputed at the start of whatever was cut anew, eight where an
    earlier run has stored them, and as long as audits took at most a hundredth of the time since
    the first, one more at the start of every epoch and with its 4th, 16th, 64th, ... batch of hits.

    Args:
        rate: Fraction of the hits.
    """

    def __init__(self, rate: float) -> None:
        self.cost_s = 0.0
        """What audits have taken so far."""
        self._rate = rate
        self._began: float | None = None
        self._random = random.Random(0)
        self._served: dict[tuple[str, int], tuple[int, int]] = {}
        """Of each loader at each cut: the last batch's number, and how many had hits so far in this
        epoch."""
        self.doubted = set[tuple[str, int]]()
        """Loaders at cuts at which an earlier run has stored."""

    def choose(self, batch: Batch, entry: Entry) -> tuple[np.ndarray, bool] | None:
        """Return the hits to recompute: bool, shape (B,), and whether they are the first of an
        epoch, which begins with a batch of a smaller number than before; None for none, or where
        the samples are not what they were when the batch was given out, as far as known.
        """
        hit, number = entry.hit, batch.context.task.number
        num_hits, at = int(np.count_nonzero(hit)), (batch.loader_name, id(entry.cut))
        last, served = self._served.get(at, (-1, 0))
        served = 1 if number <= last else served + 1
        self._served[at] = number, served
        count = int(self._rate * num_hits + self._random.random())
        if served.bit_count() == 1 and served.bit_length() % 2 == 1:  # a power of 4
            now = time.perf_counter()
            self._began = now if self._began is None else self._began
            count = max(count, last < 0 or self.cost_s <= MAX_COST * (now - self._began))
        if at in self.doubted:
            self.doubted.remove(at)
            count = max(count, _NUM_DOUBTED)
        if not (count and num_hits) or batch.context.is_outdated:
            return None
        rows = np.zeros(len(hit), bool)
        rows[self._random.sample(np.flatnonzero(hit).tolist(), min(num_hits, count))] = True
        return rows, served == 1


class StepTimer:
    """Costs per sample of one loader's steps under one boundary. Pure; seconds."""

    def __init__(self) -> None:
        """Start without experience."""
        self._recent: dict[Kind, deque[float]] = {}
        self._computed_s = 0.0
        """Of a sample. A miss takes no less than a control: the lower of the two medians, for both
        are of few steps, of two the lower."""
        self._warm: list[float] = []
        """What the first steps took, of a sample."""
        self._was_computed = True
        """The last step."""
        self._num_planned = self.num_served = self._num_asked = self._sure_until = 0
        self._num_samples = self._spent_s = 0.0
        """Of steps with hits; and what was proved beside in the others."""
        self._num_captured = 0.0
        """Samples."""
        self._earlier_s = 0.0
        """Saved before all was measured anew."""

    def step(self, kind: Kind, seconds: float, num_samples: float, *, proof_s: float = 0.0) -> None:
        """Note a whole step.

        Args:
            kind: What became of its batch.
            seconds: How long it took.
            num_samples: In the batch.
            proof_s: Part of the seconds that went into proofs and storing: none of it is what a
                computed step costs.
        """
        is_computed = kind in _COMPUTED
        is_warm = self._was_computed or not is_computed
        self._was_computed = is_computed
        if len(self._warm) < _NUM_WARM:
            self._warm.append(max(seconds - proof_s, 0.0) / num_samples)
            self._spent_s += proof_s
            return
        proof_s = proof_s if is_computed else 0.0  # what serves is paid for by what is served
        per_sample = max(seconds - proof_s, 0.0) / num_samples
        if is_warm:
            self._recent.setdefault(kind, deque(maxlen=_RECENT)).append(per_sample)
        self.num_served += kind == "served"
        if is_computed:
            self._spent_s += proof_s
            self._num_captured += num_samples * (kind == "captured")
            if is_warm:
                known = filter(None, map(self._recent.get, _COMPUTED))
                self._computed_s = min(map(median_low, known))
            return
        if self._computed_s:
            per_sample = min(per_sample, _OUTLIER * self._computed_s)
        self._num_samples += num_samples
        self._spent_s += per_sample * num_samples

    def wants_control(self) -> bool:
        """Whether the batch that is planned now, and would be served, should be computed."""
        self._num_planned += 1
        if self._num_asked:
            self._num_asked -= 1
            return True
        # The 16th and the next, the 64th and the next, ...; more where nothing else tells.
        first = self._num_planned & (~1 if self._computed_s else ~3)
        return first >= _FIRST_CONTROL and first.bit_count() == first.bit_length() % 2 == 1

    @property
    def saved_s(self) -> float:
        """What steps with hits would have taken if they had been computed, less what they took, and
        less what was proved and stored in the others.

        Where all samples were read by then, the first steps tell what a computed one takes.
        """
        credited_s = self._credited_s * self._num_samples
        return self._earlier_s + credited_s - self._spent_s - self.stored_s

    @property
    def stored_s(self) -> float:
        """What steps that stored took beyond what computed ones take."""
        captured_s = median_low(self._recent.get("captured", (self._credited_s,)))
        return (captured_s - self._credited_s) * self._num_captured

    @property
    def _credited_s(self) -> float:
        return self._computed_s or min(self._warm, default=0.0)

    def measures_anew(self) -> bool:
        """Whether a verdict against serving is not followed yet, for all is measured anew, side by
        side; the next verdict is.
        """
        if self.num_served <= self._sure_until:
            return False
        self._sure_until, self._num_asked = self.num_served + _RECENT, _NUM_ASKED
        self._earlier_s, self._warm = self.saved_s, [self._computed_s] * _NUM_WARM
        self._recent.clear()
        self._computed_s = self._num_samples = self._spent_s = self._num_captured = 0.0
        return True

    @property
    def verdict(self) -> tuple[bool, str]:
        """Whether to go on skipping, and why: unless more than an error dearer than computing."""
        served = np.array(self._recent.get("served", ()))
        if len(served) < _MIN_SERVED or not self._computed_s:
            return True, "until there is enough to compare"
        served = np.minimum(served, _SLOW * np.median(served))
        per_sample = float(served.mean())
        text = (
            f"{per_sample * 1e6:,.0f} us a sample from the cache, "
            f"{self._computed_s * 1e6:,.0f} computed"
        )
        error = float(served.std(ddof=1)) / math.sqrt(len(served))
        return per_sample - error < self._computed_s, text


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
        self.unnoted_s = 0.0
        """Taken by the cache in a step that has not ended, beside loading or computing a batch."""
        self._may_postpone = mode == "auto" and os.environ.get("EGERIA_POSTPONE") != "0"
        self._overlap, self._is_stored = overlap, is_stored
        self.earlier: str | None = None
        """Where the model is cut before that, and why, if it is."""
        self.timers = defaultdict[tuple[str, str], StepTimer](StepTimer)
        """By loader and boundary."""
        self.schedules: dict[str, Schedule] = {}
        """By loader."""
        self._shared: dict[str, Schedule] = {}

    def moved(self) -> None:
        """The frozen boundary is another one: decide anew."""
        self.stopped.clear()
        self.idle.clear()
        for known in self.schedules.values():  # what was measured was of the other one
            known.forget()
        self.earlier, self.seeks_cut = None, self.mode == "auto"

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

    # ---- whole steps --------------------------------------------------------------------------

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
        timer = self.timers[loader, boundary]
        proof_s, self.unnoted_s = min(self.unnoted_s, seconds), 0.0
        timer.step(kind, seconds, num_samples, proof_s=proof_s)
        is_due = kind == "served" and timer.num_served % _BETWEEN_VERDICTS == 0
        if not is_due or self.mode != "auto":
            return None
        pays, why = timer.verdict
        if pays or timer.measures_anew():
            return None
        self.stopped.add(loader)
        self.idle[loader] = why
        return why

    def look_earlier(self, profile: tuple[Step, ...]) -> str | None:
        """Look once for a cut before the frozen boundary; return where, if there is one."""
        self.seeks_cut = not profile
        found = choose(profile, self._overlap)
        if found is None or found is profile[-1]:
            return None
        self.earlier = (
            f"cut at {found.name!r}, whose output is smaller: {found.row_bytes:,} bytes a sample, "
            f"{profile[-1].row_bytes:,} at {profile[-1].name!r}"
        )
        return found.name

    # ---- figures ------------------------------------------------------------------------------

    def sentence(self, boundary: str | None) -> str:
        """Say in words what was decided under this boundary, for the statistics."""
        how = dict.fromkeys(self.stopped, "off")
        found = {one: f"{how.get(one, 'postponed')}: {why}" for one, why in self.idle.items()}
        for (loader, at), timer in sorted(self.timers.items(), key=lambda one: one[1].num_served):
            if at == boundary and loader not in self.idle:
                found[loader] = f"on: {timer.verdict[1]}"
        named = {loader.rpartition("#")[0]: what for loader, what in found.items()}
        said = [f"{name!r} {what}" if len(named) > 1 else what for name, what in named.items()]
        return "; ".join([*said, self.earlier] if self.earlier else said)

    def saved_s(self, writing_s: float) -> float:
        """Training time saved so far, net of all that the cache took; negative if lost.

        Storing slows steps by no more than the writer works: they were slower for other reasons.
        """
        timers = self.timers.values()
        not_stored_s = max(0.0, sum(timer.stored_s for timer in timers) - writing_s)
        return sum(timer.saved_s for timer in timers) + not_stored_s - self.beside_s


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
