"""The paper's reference: a snapshot of the front layer, run beside the training, often in 8 bits.

`tap` captures what a layer was called with, `snapshot` copies its modules and weights,
`references` and `int8` make a reference of these, and `runner` reads the layer against it. An
evaluator does that inline or in a process of its own (`evaluators`, `worker`, `wire`). Owns hooks
on the model and one process; knows no policy.
"""

from egeria_core.reference.evaluators import Evaluator, InlineEvaluator, ProcessEvaluator
from egeria_core.reference.runner import InputItem
from egeria_core.reference.snapshot import Weights, copy_modules, copy_weights
from egeria_core.reference.tap import Call, Hook, LayerTap, Probe

__all__ = [
    "Call",
    "Evaluator",
    "Hook",
    "InlineEvaluator",
    "InputItem",
    "LayerTap",
    "Probe",
    "ProcessEvaluator",
    "Weights",
    "copy_modules",
    "copy_weights",
]
