"""The paper's reference: a snapshot of the front layer, run beside the training, often in 8 bits.

`tap` captures what a layer was called with, `snapshot` copies its modules and weights,
`references`, `int8` and `choose` make a reference of these, and `runner` reads the layer against
it. An evaluator does that inline (`evaluator`) or in a process of its own (`process`, `worker`,
`wire`). Owns hooks on the model and one process; knows no policy.
"""

from egeria_core.reference.choose import ReferenceChain
from egeria_core.reference.evaluator import Evaluator, InlineEvaluator
from egeria_core.reference.int8 import DynamicInt8Reference, StaticInt8Reference
from egeria_core.reference.process import ProcessEvaluator
from egeria_core.reference.references import FloatReference, Reference, run_layer
from egeria_core.reference.runner import InputItem, ReferenceRunner
from egeria_core.reference.snapshot import Weights, copy_modules, copy_weights, without_hooks
from egeria_core.reference.tap import Call, LayerTap, Probe, Wire

__all__ = [
    "Call",
    "DynamicInt8Reference",
    "Evaluator",
    "FloatReference",
    "InlineEvaluator",
    "InputItem",
    "LayerTap",
    "Probe",
    "ProcessEvaluator",
    "Reference",
    "ReferenceChain",
    "ReferenceRunner",
    "StaticInt8Reference",
    "Weights",
    "Wire",
    "copy_modules",
    "copy_weights",
    "run_layer",
    "without_hooks",
]
