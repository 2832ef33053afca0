"""The methods that are compared: what freezes, and whether the frozen front is cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn, optim

from egeria_core import FreezeController, LinearPolicy, StaticPolicy

from .tasks import Task

__all__ = ["METHODS", "Method"]


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    about: str
    policy: str | None = None
    cached: bool = False

    def control(
        self, task: Task, model: nn.Module, optimizer: optim.Optimizer, cache: Any, per_epoch: int
    ) -> FreezeController | None:
        """Return the controller of one run of `per_epoch` steps an epoch; None for plain."""
        total = per_epoch * task.epochs
        options: dict[str, Any] = {
            "total_steps": total,
            "evaluator": "inline",
            "layers": task.layers,
        }
        policy: Any = self.policy
        if policy is None:
            return None
        if policy == "static":
            policy = StaticPolicy({int(task.static_start * total): task.static_boundary})
        elif policy == "linear":
            policy = LinearPolicy(per_epoch)
        elif policy in ("autofreeze", "smartpipe"):
            # Both look at gradients over parts of an epoch, not at single steps.
            bootstrap = {key: task.plasticity[key] for key in task.plasticity if key == "bootstrap"}
            options |= {"evaluate_every": per_epoch, **bootstrap}
        elif policy in ("plasticity", "skipconv"):
            options |= {"reference": "fp32", **task.plasticity}
        return FreezeController(model, optimizer, cache, policy, **options)


METHODS = {
    method.name: method
    for method in (
        Method("plain", "PyTorch, nothing frozen"),
        Method("static", "boundary given by hand", "static"),
        Method("static+cache", "boundary given by hand, front cached", "static", cached=True),
        Method("linear", "Composer's linear schedule", "linear"),
        Method("freezeout", "FreezeOut's cubic schedule", "freezeout"),
        Method("autofreeze", "AutoFreeze, one interval an epoch", "autofreeze"),
        Method("skipconv", "Skip-Conv norm in Algorithm 1", "skipconv"),
        Method("smartpipe", "SmartPipe, one reading an epoch", "smartpipe"),
        Method("egeria", "plasticity, no cache", "plasticity"),
        Method("egeria+cache", "plasticity, front cached", "plasticity", cached=True),
        Method("shortened", "plain, its whole schedule fitted into egeria+cache's wall time"),
    )
}
"""By name; `shortened` comes last, since it needs to know how long others took."""
