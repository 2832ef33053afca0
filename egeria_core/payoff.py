"""Whether a move pays: what it saves over the steps that are left, against what moves cost here.

A move costs by itself: the optimizer's and the allocator's memory settle anew, a wrapper's reducer
is rebuilt, a cache proves where the model can be cut. It is measured as the time by which the
first steps after a move exceed the usual one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["ASSUMED_COST", "StepClock"]

ASSUMED_COST = 3.0
"""Steps that a move is taken to cost until one was measured: a step and two forwards, and some."""
RECENT = 32
AFTER_A_MOVE = 3
"""Steps in which a move still shows: a cache proves its cut in the two that follow."""
OUTLIER = 8.0
"""Steps of more than so many medians count as that many: someone evaluated."""
MOVES_KEPT = 8


class StepClock:
    """Times training steps, from one `tick` to the next, and what moves add to them.

    Args:
        fixed_cost: Steps that a move costs, instead of the measured cost.
        now: Clock, in seconds.
    """

    def __init__(
        self, fixed_cost: float | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._fixed, self._now = fixed_cost, now
        self._last: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._after: list[float] = []
        self._watching = False
        self._costs: deque[float] = deque(maxlen=MOVES_KEPT)

    def tick(self) -> None:
        """One more training step is done."""
        now, last = self._now(), self._last
        self._last = now
        if last is None:
            return
        if not self._watching:
            self._steps.append(now - last)
            return
        self._after.append(now - last)
        if len(self._after) > AFTER_A_MOVE:
            # Steps are shorter now: what comes fourth is what the first three would have been.
            usual = min(self._after[-1], self.step_s or self._after[-1])
            excess = (min(s, OUTLIER * usual) - usual for s in self._after[:-1])
            cost = sum(max(0.0, s) for s in excess)
            if usual > 0:
                self._costs.append(cost / usual)
            self._watching = False
            self._steps.clear()
            self._steps.append(self._after[-1])

    def moved(self) -> None:
        """The boundary has moved since the last `tick`: the next step has it in it."""
        self._watching, self._after = True, []

    @property
    def step_s(self) -> float | None:
        """Median time of the recent steps, in seconds; None before there were any."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def cost(self) -> float:
        """Steps that a move costs: given, or the median of those measured, or assumed."""
        if self._fixed is not None:
            return self._fixed
        return statistics.median(self._costs) if self._costs else ASSUMED_COST

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured."""
        return {"steps": list(self._steps), "costs": list(self._costs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the time in between is no step."""
        self._steps = deque(state["steps"], maxlen=RECENT)
        self._costs = deque(state["costs"], maxlen=MOVES_KEPT)
        self._last, self._watching, self._after = None, False, []
