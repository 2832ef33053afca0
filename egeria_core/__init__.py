"""Freeze controller: watches a training run and freezes the front layers that have converged."""

from __future__ import annotations

from typing import Any

from egeria_cache import BoundaryMoved
from egeria_core.bootstrap import Bootstrap
from egeria_core.config import ControllerConfig, guideline_interval
from egeria_core.controller import FreezeController
from egeria_core.errors import EvaluatorError, LayerError, PolicyError
from egeria_core.history import History
from egeria_core.learning_rate import Periodic, TenfoldDrop, UnfreezeRule, WarmRestart
from egeria_core.plasticity import sp_loss
from egeria_core.policies import (
    BudgetPolicy,
    HarmEstimate,
    Movement,
    PlasticityPolicy,
    Policy,
    Prospect,
    Reading,
    StaticPolicy,
)
from egeria_core.suggest import suggest_boundary
from egeria_core.suggestion import Suggestion, Trial
from egeria_core.watch import Layer, find_layers

__all__ = [
    "Bootstrap",
    "BoundaryMoved",
    "BudgetPolicy",
    "ControllerConfig",
    "EvaluatorError",
    "FreezeController",
    "HarmEstimate",
    "History",
    "Layer",
    "LayerError",
    "Movement",
    "Periodic",
    "PlasticityPolicy",
    "Policy",
    "PolicyError",
    "Prospect",
    "Reading",
    "StaticPolicy",
    "Suggestion",
    "TenfoldDrop",
    "Trial",
    "UnfreezeRule",
    "WarmRestart",
    "find_layers",
    "guideline_interval",
    "sp_loss",
    "suggest_boundary",
]

_RIVALS = ("AutoFreeze", "FreezeOut", "Linear", "PipeTransformer", "SkipConv", "SmartPipe")


def __getattr__(name: str) -> Any:
    if name in {f"{rival}Policy" for rival in _RIVALS}:
        raise AttributeError(
            f"{name} is no longer part of egeria_core: it is in the project's benchmarks/rivals"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
