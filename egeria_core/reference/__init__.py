"""The paper's reference: a snapshot of the front layer, run beside the training, often in 8 bits.

`meter` compares the front layer with it: `capture` records what the layer was called with, and
copies its modules and weights; `references` makes a reference of these, and reads the layer against
it. An evaluator does that inline or in a process of its own (`evaluators`, `worker`). Owns hooks on
the model and one process; knows no policy.
"""

from egeria_core.reference.meter import ActivationMeter
from egeria_core.reference.references import EvaluatorError, sp_loss

__all__ = ["ActivationMeter", "EvaluatorError", "sp_loss"]
