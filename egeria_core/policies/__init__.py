"""Freezing policies: pure state machines, one file each, with a method card beside it."""

from __future__ import annotations

from egeria_core.config import ControllerConfig
from egeria_core.learning_rate import parse_rule
from egeria_core.policies.base import Measure, Policy, Reading
from egeria_core.policies.plasticity import PlasticityPolicy
from egeria_core.policies.static import StaticPolicy

__all__ = ["Measure", "PlasticityPolicy", "Policy", "Reading", "StaticPolicy", "make_policy"]


def make_policy(policy: str | Policy, config: ControllerConfig) -> Policy:
    """Return the policy itself, or the one that a name stands for."""
    if not isinstance(policy, str):
        return policy
    if policy == "plasticity":
        return PlasticityPolicy(config.window, config.tolerance, parse_rule(config.unfreeze_rule))
    raise ValueError(f"unknown policy {policy!r}; known: 'plasticity'")
