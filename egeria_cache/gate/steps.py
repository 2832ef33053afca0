"""What whole training steps cost, served and computed.

A step is taken from one request for a batch to the next: waiting, forward, backward and optimizer
together, so that it holds on a device that runs behind the host, and whatever the dataset costs.
With it goes all that the cache itself does in its course: proofs, captures, audits.

A batch of misses costs more than it would without a cache, since it is captured and written. So a
few batches that could be served are computed all the same, ever fewer of them: the controls. Their
results are what would have been served. They come in twos, for a step that is computed after served
ones finds neither its memory nor its code warm: the second counts.

Most batches of random samples are mixed for ever: some of their draws are new. Where at least half
of a batch is read, it counts as served, with all that its misses took.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import Literal

import numpy as np

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
_OUTLIER = 8.0
"""Steps of more than so many typical ones count as that many: someone saved a checkpoint."""


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
        first = self._num_planned & ~1  # the 16th and the next, the 64th and the next, ...
        return first >= _FIRST_CONTROL and first.bit_count() == first.bit_length() % 2 == 1

    @property
    def saved_s(self) -> float:
        """What steps with hits would have taken if they had been computed, less what they took, and
        less what was proved and stored in the others.

        Where all samples were read by then, the first steps tell what a computed one takes.
        """
        credited_s = self._computed_s or min(self._warm, default=0.0)
        captured_s = median_low(self._recent.get("captured", (credited_s,)))
        stored_s = (captured_s - credited_s) * self._num_captured
        return self._earlier_s + credited_s * self._num_samples - self._spent_s - stored_s

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
    def is_due(self) -> bool:
        """Whether so many were served since the last verdict that it may be another one."""
        return self.num_served % _BETWEEN_VERDICTS == 0

    @property
    def verdict(self) -> tuple[bool, str]:
        """Whether to go on skipping, and why: unless more than an error dearer than computing."""
        served = np.array(self._recent.get("served", ()))
        if len(served) < _MIN_SERVED or not self._computed_s:
            return True, "until there is enough to compare"
        served = np.minimum(served, _OUTLIER * np.median(served))
        per_sample = float(served.mean())
        text = (
            f"{per_sample * 1e6:,.0f} us a sample from the cache, "
            f"{self._computed_s * 1e6:,.0f} computed"
        )
        error = float(served.std(ddof=1)) / math.sqrt(len(served))
        return per_sample - error < self._computed_s, text
