"""Freeze what can be frozen within a budget: so much may the final loss be worse, and no more.

What freezing the first layers now would cost is predicted before anything is frozen, in units of
the loss: H_k = phi_k G. G is what training still has to gain: how fast the loss falls per unit of
learning rate, times the learning rate that is left. phi_k is the part of it that the first k layers
bring lately, with one standard error. Pure: it sees numbers, and the same numbers give the same
answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from egeria_core.policies.base import Measure, Prospect, Reading
from egeria_core.rules import RISE, Remembered

AT_REST, PATIENCE, LEAST = 0.2, 3, 15
"""A layer rests when its speed is at most so much of its own highest for so many readings in a row;
nothing is said before so many readings (benchmarks/results/harm.json)."""
SMOOTHING = 5
"""Readings whose speeds of a layer are averaged, as far as it was read in them."""
LEAST_IN_WINDOW = 4
"""A line through fewer readings has no error that could be told."""
MOST_KEPT = 512
"""Readings: no more are looked back on."""


class Movement(NamedTuple):
    """What was read over some training steps, per layer, front first; None: not read."""

    loss: float
    """Mean training loss of these steps."""
    rate: float
    """Sum of the learning rate up to their middle."""
    decrease: tuple[float | None, ...]
    """-g . d: how much of the loss the layer's own step took away, to first order."""
    speed: tuple[float | None, ...]
    """|d| / |theta|."""

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Movement:
        """Return what `MovementMeter` packed into a verdict.

        Raises:
            ValueError: There are no values of whole layers.
        """
        if len(values) < 2 or len(values) % 2 or values[0] is None or values[1] is None:
            raise ValueError(f"{len(values)} values are no movement")
        count = (len(values) - 2) // 2
        return cls(values[0], values[1], tuple(values[2 : 2 + count]), tuple(values[2 + count :]))


class HarmEstimate(Remembered):
    """Collects movements; answers what freezing would cost, and which layers have come to rest."""

    remembers = ("_movements", "seen", "first_loss", "_recent", "_peaks", "_resting")

    def __init__(self, first_loss: float | None = None) -> None:
        self._movements: list[list[Any]] = []
        self._recent: list[list[float | None]] = []
        self._peaks: list[float] = []
        self._resting: list[int] = []
        self.seen = 0
        """Readings."""
        self.first_loss = first_loss
        """Mean loss of the first reading; of a run that begins again, of its first life."""

    def observe(self, movement: Movement) -> None:
        """Take one reading; one with a loss that is not finite is none."""
        if not math.isfinite(movement.loss):
            return
        if not self.seen:
            count = len(movement.speed)
            self._recent = [[] for _ in range(count)]
            self._peaks, self._resting = [0.0] * count, [0] * count
        self.seen += 1
        if self.first_loss is None:
            self.first_loss = movement.loss
        self._movements = [*self._movements, list(movement)][-MOST_KEPT:]
        for layer, speed in enumerate(movement.speed):
            recent = self._recent[layer] = [*self._recent[layer], speed][-SMOOTHING:]
            known = [value for value in recent if value is not None]
            if not known:
                continue
            mean = sum(known) / len(known)
            self._peaks[layer] = max(self._peaks[layer], mean)
            rests = mean <= AT_REST * self._peaks[layer]
            self._resting[layer] = self._resting[layer] + 1 if rests else 0

    def rests(self, layer: int) -> bool:
        """Whether a layer has been slow for long enough."""
        return layer < len(self._resting) and self._resting[layer] >= PATIENCE

    def _window(self) -> list[Movement]:
        """Return the last third."""
        return [Movement(*row) for row in self._movements[-max(LEAST_IN_WINDOW, self.seen // 3) :]]

    def shares(self, frozen: int) -> list[float] | None:
        """Return phi_k for every k: the part of the fall that layers `frozen` to k - 1 bring, with
        one standard error: it is read from single steps, of layers that were read in turns.

        None where the last readings tell nothing of it: a layer was not read, or the layers'
        parts do not add up to a fall.
        """
        read = np.array([m.decrease for m in self._window()], dtype=np.float64)[:, frozen:]
        known = np.isfinite(read)
        if not known.any(0).all():
            return None
        means = np.where(known, read, 0.0).sum(0) / np.maximum(1, known.sum(0))
        total = float(means.sum())
        if total <= 0 or not math.isfinite(total):
            return None
        # A layer that lately made the loss rise is no reason to trust the others less.
        share = np.minimum(1.0, np.maximum(0.0, means).cumsum() / total)
        filled = np.where(known, read, means)  # what was not read tells of no scatter
        rest = filled.cumsum(1) - share * filled.sum(1, keepdims=True)
        error = rest.std(0, ddof=1) / math.sqrt(len(rest)) / total
        shares: list[float] = np.minimum(1.0, share + error).tolist()
        return [0.0] * (frozen + 1) + shares

    def gain(self, remaining_rate: float) -> float:
        """Return G: what the loss may still fall by, with one standard error."""
        if remaining_rate <= 0:
            return 0.0
        rates, losses = np.array([(m.rate, m.loss) for m in self._window()]).T
        slope, error = 0.0, math.inf
        if np.ptp(rates) > 0:
            (slope, _), covariance = np.polyfit(rates - rates.mean(), losses, 1, cov=True)
            error = math.sqrt(covariance[0, 0])
        gain = max(0.0, error - slope) * remaining_rate
        # A loss that cannot be negative cannot fall by more than it is.
        return float(min(losses.mean(), gain) if losses.min() > 0 else gain)

    def assumed_rate(self, steps: int, every: int) -> float:
        """Return what is left of the learning rate if it stays as it is lately.

        Args:
            steps: Optimizer steps left.
            every: Optimizer steps between two readings.
        """
        before, last = self._window()[-2:]
        return (last.rate - before.rate) / every * steps


DEFAULT_BUDGET = 0.01
"""In nats this is below the deviation between two seeds of a small language model (0.014)."""
OF_FIRST_LOSS = 0.01
"""The default budget is no more than this part of the loss at the start: losses have units."""
SAFETY = 2.0
"""A move must save so many times what it costs."""


Candidate = dict[str, Any]
"""What freezing the first `frozen` layers now would bring and cost, as in the history.

- `harm`: predicted, in units of the loss;
- `saving`: over the rest of the schedule, in steps;
- `total`: the same with what is left of the budget spent on the best later, deeper move;
- `verdict`: `freeze`, or what speaks against it.
"""


class BudgetPolicy(Remembered):
    """Freeze up to k when the harm predicted for it fits into what is left of the budget.

    And when every layer up to k rests, the move pays, and waiting would not save more: harm falls
    about with the square of the steps that remain, so what does not fit now fits later.

    Args:
        budget: By how much the final loss may be worse, in units of the loss. None: 0.01, or a
            hundredth of the loss at the start where that is less.
    """

    measure: Measure = "movement"
    remembers = ("frozen", "spent", "reason", "_rate_at_freeze", "_last_note", "estimate")

    def __init__(self, budget: float | None = None) -> None:
        if budget is not None and not (budget > 0 and math.isfinite(budget)):
            raise ValueError(f"the budget must be a positive number, got {budget}")
        self._given = budget
        self.estimate = HarmEstimate()
        self.frozen = 0
        self.spent = 0.0
        """Sum of the harm predicted for what is frozen."""
        self.reason = ""
        """Why the front moved last, in words."""
        self._rate_at_freeze = 0.0
        self._notes: list[dict[str, Any]] = []
        self._last_note: list[Any] | None = None

    @property
    def budget(self) -> float:
        """What the run may lose."""
        if self._given is not None:
            return self._given
        first = self.estimate.first_loss
        if first is None or first <= 0:
            return DEFAULT_BUDGET
        return min(DEFAULT_BUDGET, OF_FIRST_LOSS * first)

    def bind(self, boundaries: Sequence[str]) -> None:
        """What was read of other layers says nothing of these."""
        self.estimate = HarmEstimate(self.estimate.first_loss)

    def observe(self, reading: Reading) -> int:
        """Take one reading; see the class."""
        if reading.values is None or reading.prospect is None:
            return self.frozen
        self.estimate.observe(Movement.of(reading.values))
        prospect, rate = reading.prospect, max(reading.lr)
        if self.frozen and rate > RISE * self._rate_at_freeze:
            # The prediction took it to fall: everything is given back.
            self.frozen = 0
            self.reason = f"the learning rate rose to {rate:.3g} from {self._rate_at_freeze:.3g}"
            self._note("unfreeze")
            self.estimate = HarmEstimate(self.estimate.first_loss)
            return 0
        is_over = self.frozen >= reading.num_layers - 1 or prospect.steps <= 0
        if is_over or self.estimate.seen < LEAST:
            return self.frozen
        harms = None if prospect.rises else self._harms(prospect)
        if harms is None:
            rises = "the learning rate will rise"
            self._note(rises if prospect.rises else "nothing can be predicted")
            return self.frozen
        candidates = self._candidates(harms, prospect, reading.num_layers)
        may_freeze = (c for c in candidates if c["verdict"] == "freeze")
        # What can be had now is better than the same later.
        chosen = max(may_freeze, key=lambda c: (round(c["total"], 6), c["frozen"]), default=None)
        if chosen is None:
            self._note("wait", candidates)
        else:
            harm: float = chosen["harm"]
            self.frozen, self.spent = chosen["frozen"], self.spent + harm
            self._rate_at_freeze = rate
            self.reason = f"predicted cost {harm:.2g} of {self.budget:.2g}"
            if self.spent > harm:
                self.reason += f", {self.spent:.2g} spent"
            self._note("freeze", candidates, harm)
        return self.frozen

    def _harms(self, prospect: Prospect) -> list[float] | None:
        """Return H_k for k = 0 to L; None where it cannot be told."""
        shares, rate = self.estimate.shares(self.frozen), prospect.rate
        if rate is None:
            rate = self.estimate.assumed_rate(prospect.steps, prospect.every)
        gain = self.estimate.gain(rate)
        return [share * gain for share in shares] if shares and math.isfinite(gain) else None

    def _candidates(
        self, harms: Sequence[float], prospect: Prospect, num_layers: int
    ) -> list[Candidate]:
        left = self.budget - self.spent
        saved = [part - prospect.saves[self.frozen] for part in prospect.saves]
        # Without the noise of a dropout all layers learn something else from then on, and what that
        # costs cannot be told from how the loss falls: so it is not done.
        draws = prospect.draws
        quiet = sum(count == draws[self.frozen] for count in draws[self.frozen :])
        depths = range(self.frozen + 1, self.frozen + quiet)

        def beyond(k: int) -> float:
            """What a later, deeper move saves of which k is done already, and leaves less for."""
            deeper, room = (j for j in depths if j > k), left - harms[k]
            ways = ((saved[j] - saved[k]) * _later(harms[j] - harms[k], room) for j in deeper)
            return max(ways, default=0.0) * prospect.steps

        found, resting, waiting = [], True, beyond(self.frozen)
        for k in range(self.frozen + 1, num_layers):
            resting = resting and self.estimate.rests(k - 1)
            saving = saved[k] * prospect.steps
            total = saving + beyond(k)
            against = {
                "would switch a dropout off": k not in depths,
                "still moves": not resting,
                "above the budget": harms[k] > left,
                "does not pay": saving < SAFETY * prospect.cost,
                "waiting saves more": round(total, 6) < round(waiting, 6),
            }
            verdict = next((why for why, speaks in against.items() if speaks), "freeze")
            known = {"frozen": k, "harm": harms[k], "saving": saving, "total": total}
            found.append(known | {"verdict": verdict})
        return found

    def _note(self, what: str, candidates: Sequence[Candidate] = (), harm: float = 0.0) -> None:
        words = [what, self.frozen, *(c["verdict"] for c in candidates)]
        if words != self._last_note:  # else the same for the same reasons
            self._last_note = words
            told = {"decision": what, "frozen": self.frozen, "harm": harm, "spent": self.spent}
            self._notes.append(told | {"budget": self.budget, "candidates": list(candidates)})

    def take_notes(self) -> list[dict[str, Any]]:
        """Return what was newly decided since the last call, and against what, for the history."""
        notes, self._notes = self._notes, []
        return notes


def _later(harm: float, left: float) -> float:
    """Return the part of the remaining steps for which harm fits, if it falls with their square."""
    if harm <= 0:
        return 1.0
    return min(1.0, math.sqrt(max(0.0, left) / harm))
