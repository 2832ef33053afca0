"""Freeze controller: watches a training run and freezes the front layers that have converged.

Policies of your own build on `egeria_core.policies`, rules for the learning rate on
`egeria_core.learning_rate`.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from egeria_cache import BoundaryMoved
from egeria_core.bootstrap import Bootstrap
from egeria_core.config import ControllerConfig
from egeria_core.controller import FreezeController
from egeria_core.errors import EvaluatorError, LayerError, PolicyError
from egeria_core.history import History
from egeria_core.plasticity import sp_loss
from egeria_core.policies import Policy, StaticPolicy
from egeria_core.suggest import Suggestion, Trial, suggest_boundary
from egeria_core.watch import Layer, find_layers

__all__ = [
    "Bootstrap",
    "BoundaryMoved",
    "ControllerConfig",
    "EvaluatorError",
    "FreezeController",
    "History",
    "Layer",
    "LayerError",
    "Policy",
    "PolicyError",
    "StaticPolicy",
    "Suggestion",
    "Trial",
    "find_layers",
    "sp_loss",
    "suggest_boundary",
]

_RIVALS = ("AutoFreeze", "FreezeOut", "Linear", "PipeTransformer", "SkipConv", "SmartPipe")
_MOVED = {
    "BudgetPolicy": "policies",
    "HarmEstimate": "policies",
    "Movement": "policies",
    "PlasticityPolicy": "policies",
    "Prospect": "policies",
    "Reading": "policies",
    "TenfoldDrop": "learning_rate",
    "UnfreezeRule": "learning_rate",
    "WarmRestart": "learning_rate",
    "guideline_interval": "config",
}
"""Names that were here, and the submodule that has them; they are found for one release more."""


def __getattr__(name: str) -> Any:
    if name in {f"{rival}Policy" for rival in _RIVALS}:
        raise AttributeError(
            f"{name} is no longer part of egeria_core: it is in the project's benchmarks/rivals"
        )
    if name in _MOVED:
        where = f"egeria_core.{_MOVED[name]}"
        warnings.warn(f"egeria_core.{name} is now {where}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(where), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
