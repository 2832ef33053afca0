"""The paper's reference: a snapshot of the front layer, run beside the training, often in 8 bits.

`capture` records what a layer was called with, and copies its modules and weights; `references`
makes a reference of these, and reads the layer against it. An evaluator does that inline or in a
process of its own (`evaluators`, `worker`). Owns hooks on the model and one process; knows no
policy.
"""

from egeria_core.reference.capture import (
    Call,
    Hook,
    LayerTap,
    Probe,
    Weights,
    copy_modules,
    copy_weights,
)
from egeria_core.reference.evaluators import Evaluator, InlineEvaluator, ProcessEvaluator
from egeria_core.reference.references import EvaluatorError, InputItem, sp_loss

__all__ = [
    "Call",
    "Evaluator",
    "EvaluatorError",
    "Hook",
    "InlineEvaluator",
    "InputItem",
    "LayerTap",
    "Probe",
    "ProcessEvaluator",
    "Weights",
    "copy_modules",
    "copy_weights",
    "sp_loss",
]
