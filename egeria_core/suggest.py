"""Which front can stay frozen from the first step on: asked by short trainings of copies.

What freezing a front costs a fine-tuned model's validation cannot be read off its training loss or
its gradients (docs/controller.md). So it is tried: for each boundary the user's own loop trains a
copy with the front frozen, and one with nothing frozen, under the same random numbers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from egeria_cache.skip import RandomState, is_sharded
from egeria_cache.tables import as_text
from egeria_core.policies import StaticPolicy
from egeria_core.ranks import unwrap, without_hooks


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A short training with everything up to `boundary` frozen from its first step on."""

    boundary: str
    score: float
    """What `validate` returned at its end."""
    harm: float
    """By how much the score is worse than with nothing frozen; below 0: it is better."""
    frozen_parameters: float
    """Part of the parameters that is frozen."""

    def __str__(self) -> str:
        return f"harm {self.harm:+.4f}; {self.frozen_parameters:.0%} of the parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """What `suggest_boundary` returns."""

    trials: tuple[Trial, ...]
    """One per boundary, front first."""
    boundary: str | None
    """The deepest boundary whose harm is within the budget; or None."""
    harm_budget: float

    def policy(self) -> StaticPolicy:
        """Return a controller's policy that freezes the suggested front from the first step on."""
        return StaticPolicy({0: self.boundary})

    def __str__(self) -> str:
        """Return a line per boundary, and a sentence."""
        lines = as_text({trial.boundary: str(trial) for trial in self.trials})
        what = "nothing" if self.boundary is None else f"up to {self.boundary}"
        told = f"freeze {what} from the start, with a harm of at most {self.harm_budget:g}"
        return f"{lines}\n{told}".lstrip()


def suggest_boundary(
    model: nn.Module,
    train: Callable[[nn.Module, StaticPolicy], Any],
    validate: Callable[[nn.Module], float],
    *,
    higher_is_better: bool = True,
    harm_budget: float = 0.01,
) -> Suggestion:
    """Measure which front of `model` can be static from step 0, and what that costs.

    Args:
        model: As training would begin with it, before its first forward. Copies of it are trained,
            one at a time; it stays as it is, and so do the random generators. Where several ranks
            train together ask on one, and tell the others what it says.
        train: Called with (copy, policy), trains the copy for a while under a `FreezeController`
            with this policy. The longer, the more the trials are like the training itself; at a
            rate that falls to zero each is a whole schedule in small.
        validate: Called with a trained copy in inference mode, returns the metric that counts.
        higher_is_better: Whether `validate` grows as the model learns.
        harm_budget: By how much the score may be worse, in its own unit.

    Returns:
        The trials, and the deepest boundary whose harm is within the budget. `print` shows both;
        `FreezeController(..., policy=suggestion.policy())` follows it.

    Raises:
        ValueError: `fully_shard` has cut the model, or `train` makes no controller with its policy.
    """
    model, _ = unwrap(model)
    if any(map(is_sharded, model.parameters())):
        raise ValueError("fully_shard has cut the model over ranks, so it cannot be copied")
    generators, log = RandomState.now(), logging.getLogger("egeria")
    level = log.level
    log.setLevel(logging.ERROR)  # the training's own controller will say it, where it matters

    def tried(boundary: str | None) -> tuple[float, float, list[str]]:
        torch.manual_seed(0)  # the order and dropout are the same in all trials
        with without_hooks([model]):
            copied = copy.deepcopy(model).train()
        policy = StaticPolicy({0: boundary})
        train(copied, policy)
        sizes = [(p.numel(), p.requires_grad) for p in copied.parameters()]
        frozen = 1 - sum(n for n, trains in sizes if trains) / sum(n for n, _ in sizes)
        return float(validate(copied.eval())), frozen, policy.boundaries

    try:
        plain, _, names = tried(None)
        if not names:
            raise ValueError("train(model, policy) made no FreezeController with this policy")
        worse, trials = -1.0 if higher_is_better else 1.0, list[Trial]()
        for name in names:
            score, frozen, _ = tried(name)
            harm = worse * (score - plain)
            trials.append(Trial(boundary=name, score=score, harm=harm, frozen_parameters=frozen))
    finally:
        log.setLevel(level)
        generators.restore()
    allowed = [trial.boundary for trial in trials if trial.harm <= harm_budget]
    boundary = allowed[-1] if allowed else None
    return Suggestion(trials=tuple(trials), boundary=boundary, harm_budget=harm_budget)
