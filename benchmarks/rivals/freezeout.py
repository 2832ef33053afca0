"""FreezeOut (Brock et al. 2017): every layer has its own end, the front ones first."""

from __future__ import annotations

import math

from egeria_core.policies import Reading
from egeria_core.watch import Meter, Watched

from .rates import LayerRates
from .scheduled import Scheduled

__all__ = ["FreezeOutPolicy"]


class FreezeOutPolicy(Scheduled):
    """Anneal layer i to zero at t_i = (t0 + (1 - t0) i / L)^p of the schedule, and freeze it then.

    Args:
        start: t0, when the first layer freezes, before the power.
        power: p; 1 is the paper's linear schedule, 3 its cubic one.
        scaled: Whether a layer's first rate is divided by t_i, so that all travel as far.
        anneal: Whether each layer follows its own cosine, which is the method itself: the rates
            that a scheduler sets are then not used, only what it counts as the full rate. False:
            layers freeze at t_i, and rates stay the optimizer's.
    """

    def __init__(
        self,
        start: float = 0.8,
        power: float = 3.0,
        *,
        scaled: bool = True,
        anneal: bool = True,
    ) -> None:
        if not 0 < start <= 1 or power <= 0:
            raise ValueError(f"need start in (0, 1] and power > 0, got {start} and {power}")
        self.start, self.power, self.scaled, self.anneal = start, power, scaled, anneal

        if anneal:
            self.measure = "own"

    per_layer = False

    def make_meter(self, watched: Watched) -> Meter:
        """Return what gives each layer its own rate; it reads nothing."""
        return LayerRates(watched, self)

    def end(self, layer: int, num_layers: int) -> float:
        """Return t_i, the part of the schedule after which `layer` is frozen; 1 for the last."""
        if layer >= num_layers - 1:
            return 1.0
        return math.pow(self.start + (1 - self.start) * layer / num_layers, self.power)

    def learning_rate(self, layer: int, num_layers: int, progress: float, base: float) -> float:
        """Return the layer's rate at this part of the schedule: a cosine that ends at t_i."""
        end = self.end(layer, num_layers)
        if progress >= end:
            return 0.0
        first = base / end if self.scaled else base
        return 0.5 * first * (1 + math.cos(math.pi * progress / end))

    def observe(self, reading: Reading) -> int:
        """Count the layers whose end has passed."""
        progress = reading.step / self._length(reading)
        num_layers = reading.num_layers
        ended = sum(progress > self.end(layer, num_layers) for layer in range(num_layers))
        return min(ended, num_layers - 1)
