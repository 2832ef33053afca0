"""Freeze controller: watches a training run and freezes the front layers that have converged."""

from __future__ import annotations

from egeria_cache import BoundaryMoved
from egeria_core.bootstrap import Bootstrap
from egeria_core.config import ControllerConfig, guideline_interval
from egeria_core.controller import FreezeController
from egeria_core.errors import EvaluatorError, LayerError, PolicyError
from egeria_core.harm import HarmEstimate, Movement
from egeria_core.history import History
from egeria_core.layers import Layer, find_layers
from egeria_core.learning_rate import Periodic, TenfoldDrop, UnfreezeRule, WarmRestart
from egeria_core.plasticity import sp_loss
from egeria_core.policies import (
    AutoFreezePolicy,
    BudgetPolicy,
    FreezeOutPolicy,
    LinearPolicy,
    PipeTransformerPolicy,
    PlasticityPolicy,
    Policy,
    Prospect,
    Reading,
    SkipConvPolicy,
    SmartPipePolicy,
    StaticPolicy,
)
from egeria_core.suggest import suggest_boundary
from egeria_core.suggestion import Suggestion, Trial

__all__ = [
    "AutoFreezePolicy",
    "Bootstrap",
    "BoundaryMoved",
    "BudgetPolicy",
    "ControllerConfig",
    "EvaluatorError",
    "FreezeController",
    "FreezeOutPolicy",
    "HarmEstimate",
    "History",
    "Layer",
    "LayerError",
    "LinearPolicy",
    "Movement",
    "Periodic",
    "PipeTransformerPolicy",
    "PlasticityPolicy",
    "Policy",
    "PolicyError",
    "Prospect",
    "Reading",
    "SkipConvPolicy",
    "SmartPipePolicy",
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
