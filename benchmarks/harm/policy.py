"""Whole runs under the budget policy, of the seeds that were branched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from egeria_core import FreezeController, History
from egeria_core.policies import BudgetPolicy

from .branch import Trainer
from .tasks import Task, make_data

__all__ = ["VARIANTS", "Variant", "run_policy", "saved_steps"]


@dataclass(frozen=True)
class Variant:
    """How the policy is set."""

    about: str
    seeds: tuple[int, ...]
    """Of those that were branched."""
    told: bool = True
    """Whether it is given the scheduler."""
    budget: float | None = None


VARIANTS = {
    "default": Variant("defaults, the scheduler given", (0, 1)),
    "steps": Variant("defaults, only total_steps given", (0,), told=False),
    "budget-0.03": Variant("a budget of 0.03, the scheduler given", (0,), budget=0.03),
}


def run_policy(task: Task, variant: Variant, seed: int) -> dict[str, Any]:
    """Return one run's final result, what was predicted for it, and the steps it saved."""
    trainer = Trainer(task, seed, make_data(task.data))
    with FreezeController(
        trainer.model,
        trainer.optimizer,
        total_steps=task.steps,
        lr_scheduler=trainer.schedule if variant.told else None,
        harm_budget=variant.budget,
    ) as controller:
        for loss in trainer.train(task.steps):
            controller.step(loss)
        policy = controller.policy
        assert isinstance(policy, BudgetPolicy)
        moves = controller.history.of("boundary")
        return {
            "result": trainer.result(),
            "predicted": policy.spent,
            "budget": policy.budget,
            "moves": [[move["step"], move["boundary"]] for move in moves],
            "unfrozen": sum(move["boundary"] is None for move in moves),
            "saved": saved_steps(controller.history) / task.steps,
        }


def saved_steps(history: History) -> float:
    """Return what all moves of a budget saved, in steps, by its own count."""
    freezes = (note for note in history.of("decision") if note["decision"] == "freeze")
    tried = [(note, candidate) for note in freezes for candidate in note["candidates"]]
    return float(sum(one["saving"] for note, one in tried if one["frozen"] == note["frozen"]))
