"""Which front can stay frozen from the first step on: asked by short trainings of copies.

What freezing a front costs a fine-tuned model's validation cannot be read off its training loss or
its gradients (docs/controller.md). So it is tried: for each boundary the user's own loop trains a
copy with the front frozen, and one with nothing frozen, under the same random numbers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from egeria_cache.skip import RandomState
from egeria_core.policies import StaticPolicy
from egeria_core.ranks import unwrap
from egeria_core.reference import without_hooks


def suggest_boundary(
    model: nn.Module,
    train: Callable[[nn.Module, StaticPolicy], Any],
    validate: Callable[[nn.Module], float],
    *,
    higher_is_better: bool = True,
) -> dict[str, float]:
    """Measure which front of `model` can be static from step 0, and what that costs.

    Args:
        model: As training would begin with it. Copies of it are trained, one at a time; it stays as
            it is, and so do the random generators. Where several ranks train together ask on one,
            and tell the others what it says.
        train: Called with (copy, policy), trains the copy for a while under a `FreezeController`
            with this policy. The longer, the more the trials are like the training itself; at a
            rate that falls to zero each is a whole schedule in small.
        validate: Called with a trained copy in inference mode, returns the metric that counts.
        higher_is_better: Whether `validate` grows as the model learns.

    Returns:
        By boundary, front first: by how much the score is worse, in its own unit, with everything
        up to there frozen from the first step on than with nothing frozen; below 0: it is better.
        `FreezeController(..., policy=StaticPolicy({0: boundary}))` follows the one that you choose.

    Raises:
        ValueError: The model cannot be copied, or `train` makes no controller with its policy.
    """
    generators, log = RandomState.now(), logging.getLogger("egeria")
    level = log.level
    log.setLevel(logging.ERROR)  # the training's own controller will say it, where it matters

    def score(policy: StaticPolicy) -> float:
        torch.manual_seed(0)  # the order and dropout are the same in all trials
        copied = _copied(unwrap(model)[0])
        train(copied.train(), policy)
        return float(validate(copied.eval()))

    try:
        nothing = StaticPolicy({0: None})
        plain = score(nothing)
        if not nothing.boundaries:
            raise ValueError("train(model, policy) made no FreezeController with this policy")
        worse = -1.0 if higher_is_better else 1.0
        return {
            name: worse * (score(StaticPolicy({0: name})) - plain) for name in nothing.boundaries
        }
    finally:
        log.setLevel(level)
        generators.restore()


def _copied(model: nn.Module) -> nn.Module:
    try:
        with without_hooks([model]):
            return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied for the probe "
            f"({type(error).__name__}: {error}); call suggest_boundary before the first forward, "
            "on a model without tensors that autograd has made"
        ) from error
