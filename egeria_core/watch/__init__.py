"""What is watched: the layers of a model, what lies in front of each, and how it trains.

`layers` cuts the model into layers, `forward` looks at one real forward for their order and what
feeds them. A meter (`meters`) turns training steps into verdicts for a policy: one compares the
front layer with its reference (`activations`), one reads how far each layer's weights move.
Owns hooks on the model and the optimizer; freezes nothing and decides nothing.
"""

from egeria_core.watch.activations import ActivationMeter
from egeria_core.watch.forward import LayerMap, Prefix
from egeria_core.watch.layers import Layer, LayerError, find_layers
from egeria_core.watch.meters import BringsMeter, Meter, MovementMeter, Watched, can_be_read

METERS: dict[str, type[Meter]] = {
    "nothing": Meter,
    "plasticity": ActivationMeter,
    "movement": MovementMeter,
}
"""By what a policy measures."""

__all__ = [
    "METERS",
    "ActivationMeter",
    "BringsMeter",
    "Layer",
    "LayerError",
    "LayerMap",
    "Meter",
    "MovementMeter",
    "Prefix",
    "Watched",
    "can_be_read",
    "find_layers",
]
