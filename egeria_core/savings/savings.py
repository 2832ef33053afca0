"""Whether a move pays: what it saves over the steps that are left, against what moves cost here.

Every policy's moves pass here: one whose saving is below its cost is not made. Both are counted in
steps and nothing is timed, so that runs and ranks answer alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from egeria_core.learning_rate import MeanRate
from egeria_core.policies import Prospect
from egeria_core.ranks import Ranks
from egeria_core.remembered import Remembered
from egeria_core.savings.schedule import Remaining, Schedule
from egeria_core.watch import LayerMap

RISE = 2.0
"""A rate that will be so many times the present one is a rise."""
BACKWARD_SHARE = 2 / 3
"""A backward computes two products for each one of the forward."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """One move, weighed."""

    saving_steps: float
    """Over the rest of the schedule."""
    cost_steps: float
    left_steps: int

    @property
    def pays(self) -> bool:
        """Whether it saves at least what it costs."""
        return self.saving_steps >= self.cost_steps

    def __str__(self) -> str:
        return f"saves {self.saving_steps:.3g} of the {self.left_steps} steps left"


def saved_parts(parts: Sequence[float] | None, sizes: Sequence[int]) -> list[float]:
    """Return, for k = 0 to L - 1, the part of a step that freezing the first k layers saves.

    Their backward; a cache that spares their forward as well is not counted on.

    Args:
        parts: Part of the forward's arithmetic in front of each boundary. None: it is taken to go
            with the number of parameters.
        sizes: Parameters of each layer.
    """
    if parts is None:
        parts = [size / max(1, sum(sizes)) for size in accumulate(sizes)]
    return [*accumulate((BACKWARD_SHARE * part for part in parts[:-1]), max, initial=0.0)]


class Savings(Remembered):
    """Joins the schedule and the count of a forward.

    Args:
        optimizer: Its optimizer.
        layers: Its layers.
        schedule: The learning rates to come.
        ranks: Who has to answer alike.
        move_cost: Steps that a move costs.
    """

    remembers = ("_saves", "schedule")

    def __init__(
        self, optimizer: Any, layers: LayerMap, schedule: Schedule, ranks: Ranks, move_cost: float
    ) -> None:
        self._mean_rate = MeanRate(optimizer)
        self._layers, self._ranks, self.schedule = layers, ranks, schedule
        self._move_cost = move_cost
        self._saves: list[float] | None = None

    def resolve(self) -> None:
        """The layers are settled, by one forward that was counted. On every rank."""
        if self._saves is None:
            sizes = [sum(p.numel() for p in own) for own in self._layers.parameters_of_layers()]
            self._saves = self._ranks.agree(*saved_parts(self._layers.parts, sizes))

    def take(self, saves: Sequence[float]) -> None:
        """Take what freezing the first k layers saves, as parts of a step, from who knows."""
        self._saves = list(saves)

    def _remaining(self, step: int) -> Remaining | None:
        return self.schedule.remaining(step, self._mean_rate())

    def prospect(self, step: int, every: int) -> Prospect | None:
        """Return what a policy may weigh after `step` steps; None: it is not known."""
        left = self._remaining(step)
        if left is None or self._saves is None:
            return None
        rate = self._mean_rate()
        prefixes = map(self._layers.prefix, self._layers.boundaries[:-1])
        return Prospect(
            steps=left.steps,
            rate=left.rate,
            rises=left.rate is not None and left.highest > RISE * rate,
            saves=tuple(self._saves),
            draws=(0, *(len(prefix.drawing) for prefix in prefixes)),
            cost=self._move_cost,
            every=every,
        )

    def weigh(self, step: int, frozen: int, wanted: int) -> MoveCost | None:
        """Weigh freezing up to `wanted` where `frozen` are; None: not known. On every rank."""
        left = self._remaining(step)
        if left is None or self._saves is None:
            return None
        part = self._saves[wanted] - self._saves[frozen]
        return MoveCost(part * left.steps, self._move_cost, left.steps)
