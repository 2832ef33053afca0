"""Freeze controller: watches a training run and freezes the front layers that have converged.

Policies of your own build on `egeria_core.policies`, rules for the learning rate on
`egeria_core.rules`.
"""

from __future__ import annotations

from egeria_cache import BoundaryMoved
from egeria_core.config import ControllerConfig
from egeria_core.controller import FreezeController
from egeria_core.history import History
from egeria_core.policies import Policy, PolicyError, StaticPolicy
from egeria_core.reference import EvaluatorError, sp_loss
from egeria_core.rules import Bootstrap
from egeria_core.suggest import Suggestion, Trial, suggest_boundary
from egeria_core.watch import Layer, LayerError, find_layers

__all__ = [
    "Bootstrap", "BoundaryMoved", "ControllerConfig", "EvaluatorError", "FreezeController",
    "History", "Layer", "LayerError", "Policy", "PolicyError", "StaticPolicy", "Suggestion",
    "Trial", "find_layers", "sp_loss", "suggest_boundary",
]  # fmt: skip
