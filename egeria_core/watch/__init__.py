"""What is watched: the layers of a model, what lies in front of each, and how they train.

`layers` cuts the model into layers, `forward` looks at one real forward for their order and what
feeds them. A meter (`meters`) turns training steps into verdicts for a policy, such as how far each
layer's weights move. Owns hooks on the model and the optimizer; freezes and decides nothing.
"""

from egeria_core.watch.forward import Hook, LayerMap
from egeria_core.watch.layers import Layer, LayerError, find_layers
from egeria_core.watch.meters import Meter, MovementMeter, Watched, can_be_read

__all__ = [
    "Hook", "Layer", "LayerError", "LayerMap", "Meter", "MovementMeter", "Watched", "can_be_read",
    "find_layers",
]  # fmt: skip
