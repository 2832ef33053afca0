"""Freeze controller: watches a training run and freezes the front layers that have converged."""

from __future__ import annotations

from egeria_cache import BoundaryMoved
from egeria_core.bootstrap import Bootstrap
from egeria_core.config import ControllerConfig, guideline_interval
from egeria_core.controller import FreezeController
from egeria_core.errors import EvaluatorError, LayerError, PolicyError
from egeria_core.history import History
from egeria_core.layers import Layer, find_layers
from egeria_core.learning_rate import Periodic, TenfoldDrop, UnfreezeRule, WarmRestart
from egeria_core.plasticity import sp_loss
from egeria_core.policies import (
    AutoFreezePolicy,
    FreezeOutPolicy,
    LinearPolicy,
    PipeTransformerPolicy,
    PlasticityPolicy,
    Policy,
    Reading,
    SkipConvPolicy,
    SmartPipePolicy,
    StaticPolicy,
)

__all__ = [
    "AutoFreezePolicy",
    "Bootstrap",
    "BoundaryMoved",
    "ControllerConfig",
    "EvaluatorError",
    "FreezeController",
    "FreezeOutPolicy",
    "History",
    "Layer",
    "LayerError",
    "LinearPolicy",
    "Periodic",
    "PipeTransformerPolicy",
    "PlasticityPolicy",
    "Policy",
    "PolicyError",
    "Reading",
    "SkipConvPolicy",
    "SmartPipePolicy",
    "StaticPolicy",
    "TenfoldDrop",
    "UnfreezeRule",
    "WarmRestart",
    "find_layers",
    "guideline_interval",
    "sp_loss",
]
