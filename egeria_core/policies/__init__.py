"""Freezing policies: pure state machines, with a method card each in METHODS.md.

`base` is all that a policy of a user's needs, and `StaticPolicy`, which does as it is told.
`budget` freezes what it predicts to be harmless, `plasticity` is the paper's Algorithm 1. Nothing
here knows of a model.
"""

from __future__ import annotations

from egeria_core.config import ControllerConfig
from egeria_core.policies.base import Measure, Policy, PolicyError, Prospect, Reading, StaticPolicy
from egeria_core.policies.budget import BudgetPolicy, HarmEstimate, Movement
from egeria_core.policies.plasticity import PlasticityPolicy
from egeria_core.rules import parse_rule

__all__ = [
    "BudgetPolicy", "HarmEstimate", "Measure", "Movement", "PlasticityPolicy", "Policy",
    "PolicyError", "Prospect", "Reading", "StaticPolicy", "make_policy",
]  # fmt: skip


def make_policy(policy: str | Policy, config: ControllerConfig) -> Policy:
    """Return the policy itself, or the one that a name stands for.

    Raises:
        ValueError: Unknown name.
        TypeError: An object that lacks a method of `Policy`.
    """
    if policy == "budget":
        return BudgetPolicy(config.harm_budget)
    if policy == "plasticity":
        return PlasticityPolicy(config.window, config.tolerance, parse_rule(config.unfreeze_rule))
    if isinstance(policy, str):
        raise ValueError(
            f"unknown policy {policy!r}; known by name: budget, plasticity; others (StaticPolicy, "
            "your own, those in the project's benchmarks/rivals) are passed as objects"
        )
    if not isinstance(policy, Policy):
        raise TypeError(
            f"{type(policy).__name__} is no policy: it needs measure, bind, observe, state_dict "
            "and load_state_dict"
        )
    return policy
