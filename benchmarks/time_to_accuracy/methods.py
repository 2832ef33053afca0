"""The methods that are compared: what freezes, and whether the frozen front is cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn, optim

from benchmarks.rivals import (
    AutoFreezePolicy,
    FreezeOutPolicy,
    LinearPolicy,
    PipeTransformerPolicy,
    SkipConvPolicy,
    SmartPipePolicy,
)
from egeria_core import Bootstrap, FreezeController, StaticPolicy

from .tasks import Task

__all__ = ["METHODS", "Method"]

GRADIENTS: dict[str, Any] = {"autofreeze": AutoFreezePolicy, "smartpipe": SmartPipePolicy}


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    about: str
    policy: str | None = None
    """None: nothing freezes."""
    cached: bool = False
    seeds: int = 3
    """How many, from 0 on."""

    def control(
        self,
        task: Task,
        model: nn.Module,
        optimizer: optim.Optimizer,
        cache: Any,
        schedule: optim.lr_scheduler.LRScheduler,
        *,
        per_epoch: int,
        total: int,
    ) -> FreezeController | None:
        """Return the controller of one run of `total` steps; None for plain."""
        options: dict[str, Any] = {"total_steps": total, "layers": task.layers}
        policy: Any = self.policy
        if policy is None:
            return None
        if policy == "default":
            return FreezeController(model, optimizer, cache, lr_scheduler=schedule, **options)
        options["evaluator"] = "inline"
        if policy == "static":
            policy = StaticPolicy({int(task.static_start * total): task.static_boundary})
        elif policy == "linear":
            policy = LinearPolicy(per_epoch)
        elif policy == "pipetransformer":
            policy = PipeTransformerPolicy(per_epoch)
            options["evaluate_every"] = per_epoch
        elif policy in GRADIENTS:
            # Both look at gradients over parts of an epoch, not at single steps.
            policy, options["evaluate_every"] = GRADIENTS[policy](), per_epoch
        elif policy == "freezeout":
            policy = FreezeOutPolicy()
        elif policy in ("plasticity", "skipconv"):
            options |= {"reference": "fp32", **task.plasticity}
            if policy == "skipconv":
                names = ("window", "tolerance")
                settings = {name: options.pop(name) for name in names if name in options}
                policy = SkipConvPolicy(**settings)
                options.setdefault("bootstrap", Bootstrap())
        return FreezeController(model, optimizer, cache, policy, **options)


METHODS = {
    method.name: method
    for method in (
        Method("egeria", "the default policy, no cache", "default", seeds=5),
        Method("egeria+cache", "the default policy, front cached", "default", True, seeds=5),
        Method("plain", "PyTorch, nothing frozen", seeds=5),
        Method("plasticity", "Algorithm 1 of the paper, no cache", "plasticity"),
        Method("plasticity+cache", "Algorithm 1, front cached", "plasticity", True),
        Method("static", "boundary given or suggested", "static"),
        Method("static+cache", "the same, front cached", "static", True, seeds=5),
        Method("linear", "Composer's linear schedule", "linear"),
        Method("freezeout", "FreezeOut's cubic schedule, layers annealed", "freezeout"),
        Method("pipetransformer", "PipeTransformer, alpha = 1/3", "pipetransformer"),
        Method("autofreeze", "AutoFreeze, one interval an epoch", "autofreeze"),
        Method("skipconv", "Skip-Conv norm in Algorithm 1", "skipconv"),
        Method("smartpipe", "SmartPipe, one reading an epoch", "smartpipe"),
        Method(
            "shortened", "plain, its whole schedule cut to another method's processor time", seeds=5
        ),
    )
}
"""By name; `shortened` comes last, since it needs to know how long another took."""
