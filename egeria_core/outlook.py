"""What is left of a run, and what freezing would still save of it.

Every policy's moves pass here: one whose saving over the steps that are left is below its cost is
not made. All ranks answer alike: what is counted or measured is rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from egeria_core.distributed import Ranks
from egeria_core.forward_cost import ForwardCost, saved_parts
from egeria_core.payoff import StepClock
from egeria_core.pieces import layer_parameters
from egeria_core.policies import Prospect
from egeria_core.prefix import LayerMap
from egeria_core.remaining import Remaining, Schedule, mean_rate

__all__ = ["Outlook", "Payoff"]

RISE = 2.0
"""A rate that will be so many times the present one is a rise."""


@dataclass(frozen=True, slots=True)
class Payoff:
    """One move, weighed."""

    saving: float
    """Over the rest of the schedule, in steps."""
    cost: float
    """In steps."""
    left: int
    """Steps left."""
    step_s: float | None
    """Seconds that a step takes at present."""

    @property
    def pays(self) -> bool:
        """Whether it saves at least what it costs."""
        return self.saving >= self.cost

    def fields(self) -> dict[str, Any]:
        """Return what the history keeps: steps, and seconds where they are known."""
        seconds = self.step_s
        found: dict[str, Any] = {
            "saving_steps": self.saving,
            "cost_steps": self.cost,
            "left_steps": self.left,
        }
        if seconds is not None:
            found |= {
                "saving_s": self.saving * seconds,
                "cost_s": self.cost * seconds,
                "left_s": self.left * seconds,
            }
        return found

    def __str__(self) -> str:
        if self.step_s is None:
            return f"saves {self.saving:.3g} of the {self.left} steps left"
        saving, left = self.saving * self.step_s, self.left * self.step_s
        return f"saves {_seconds(saving)} of the {_seconds(left)} left"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


class Outlook:
    """Joins the schedule, the count of a forward, and the clock.

    Args:
        model: The bare model.
        optimizer: Its optimizer.
        layers: Its layers.
        schedule: The learning rates to come.
        ranks: Who has to answer alike.
        move_cost: Steps that a move costs, instead of the measured cost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        layers: LayerMap,
        schedule: Schedule,
        ranks: Ranks,
        move_cost: float | None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._layers, self._ranks = layers, ranks
        self.schedule = schedule
        self.clock = StepClock(move_cost)
        self._saves: tuple[float, ...] | None = None
        self._count: ForwardCost | None = None
        compiled = any(m._compiled_call_impl is not None for m in model.modules())
        if schedule.has_end and not compiled and not layers.resolved:
            names = [name for layer in layers.layers for name in layer.modules]
            self._count = ForwardCost(model, names)

    def tick(self, step: int) -> None:
        """One more training step is done."""
        self.clock.tick()
        self.schedule.look(step)

    def resolve(self) -> None:
        """The layers are settled and one forward was seen: take its count. On every rank."""
        if self._saves is None:
            own = layer_parameters(self._model, self._layers)
            sizes = [sum(p.numel() for p in parameters) for parameters in own]
            saves = saved_parts(self._layers.boundaries, self._count, sizes)
            self._saves = tuple(self._ranks.agree_all(list(saves)))
        self.close()

    def take(self, saves: Sequence[float]) -> None:
        """Take what freezing the first k layers saves, as parts of a step, from who knows."""
        self._saves = tuple(saves)
        self.close()

    def _remaining(self, step: int) -> Remaining | None:
        return self.schedule.remaining(step, mean_rate(self._optimizer.param_groups))

    def prospect(self, step: int, every: int) -> Prospect | None:
        """Return what a policy may weigh after `step` steps; None: it is not known."""
        left = self._remaining(step)
        # Exchanged on every rank or on none: what is known so far is the same everywhere.
        if left is None or self._saves is None:
            return None
        rate = mean_rate(self._optimizer.param_groups)
        return Prospect(
            steps=left.steps,
            rate=left.rate,
            rises=left.rate is not None and left.highest > RISE * rate,
            saves=self._saves,
            draws=(0, *(len(self._layers.prefix(b).drawing) for b in self._layers.boundaries[:-1])),
            cost=self._ranks.agree(self.clock.cost),
            every=every,
        )

    def weigh(self, step: int, frozen: int, wanted: int) -> Payoff | None:
        """Weigh freezing up to `wanted` where `frozen` are; None: not known. On every rank."""
        left = self._remaining(step)
        if left is None or self._saves is None:
            return None
        part = self._saves[wanted] - self._saves[frozen]
        cost = self._ranks.agree(self.clock.cost)
        return Payoff(part * left.steps, cost, left.steps, self.clock.step_s)

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted and measured."""
        return {
            "saves": None if self._saves is None else list(self._saves),
            "clock": self.clock.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._saves = None if state["saves"] is None else tuple(state["saves"])
        self.clock.load_state_dict(state["clock"])
        self.schedule.load_state_dict(state["schedule"])
        if self._saves is not None:
            self.close()

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        if self._count is not None:
            self._count.close()
            self._count = None
