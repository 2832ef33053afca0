"""Freezing policies: pure state machines, one file each, with a method card in METHODS.md."""

from __future__ import annotations

from collections.abc import Callable

from egeria_core.config import ControllerConfig
from egeria_core.learning_rate import UnfreezeRule, parse_rule
from egeria_core.policies.autofreeze import AutoFreezePolicy
from egeria_core.policies.base import Measure, Movement, Policy, Prospect, Reading, SetsRates
from egeria_core.policies.budget import BudgetPolicy
from egeria_core.policies.freezeout import FreezeOutPolicy
from egeria_core.policies.linear import LinearPolicy
from egeria_core.policies.pipetransformer import PipeTransformerPolicy
from egeria_core.policies.plasticity import PlasticityPolicy
from egeria_core.policies.skipconv import SkipConvPolicy
from egeria_core.policies.smartpipe import SmartPipePolicy
from egeria_core.policies.static import StaticPolicy

__all__ = [
    "AutoFreezePolicy",
    "BudgetPolicy",
    "FreezeOutPolicy",
    "LinearPolicy",
    "Measure",
    "Movement",
    "PipeTransformerPolicy",
    "PlasticityPolicy",
    "Policy",
    "Prospect",
    "Reading",
    "SetsRates",
    "SkipConvPolicy",
    "SmartPipePolicy",
    "StaticPolicy",
    "make_policy",
]


def make_policy(policy: str | Policy, config: ControllerConfig) -> Policy:
    """Return the policy itself, or the one that a name stands for.

    Raises:
        ValueError: Unknown name.
        TypeError: An object that lacks a method of `Policy`.
    """
    if not isinstance(policy, str):
        if not isinstance(policy, Policy):
            raise TypeError(
                f"{type(policy).__name__} is no policy: it needs measure, bind, observe, "
                "state_dict and load_state_dict"
            )
        return policy
    window, tolerance, calibration = config.window, config.tolerance, config.calibration

    def rule() -> UnfreezeRule:
        return parse_rule(config.unfreeze_rule)

    known: dict[str, Callable[[], Policy]] = {
        "budget": lambda: BudgetPolicy(config.harm_budget),
        "plasticity": lambda: PlasticityPolicy(window, tolerance, rule(), calibration=calibration),
        "skipconv": lambda: SkipConvPolicy(window, tolerance, rule(), calibration),
        "autofreeze": AutoFreezePolicy,
        "smartpipe": SmartPipePolicy,
        "freezeout": FreezeOutPolicy,
    }
    if policy not in known:
        raise ValueError(
            f"unknown policy {policy!r}; known by name: {', '.join(sorted(known))}; others "
            "(StaticPolicy, LinearPolicy, PipeTransformerPolicy, your own) are passed as objects"
        )
    return known[policy]()
