"""PipeTransformer's freeze schedule (He et al. 2021)."""

from __future__ import annotations

import math

from egeria_core.policies.base import Reading
from egeria_core.policies.scheduled import Scheduled

__all__ = ["PipeTransformerPolicy"]


class PipeTransformerPolicy(Scheduled):
    """After epoch e, ceil(L (1 - (1 - alpha)^e)) layers are frozen.

    Args:
        steps_per_epoch: Optimizer steps in one epoch.
        alpha: Part of the layers still active that freezes with each epoch.
    """

    def __init__(self, steps_per_epoch: int, alpha: float = 1 / 3) -> None:
        if steps_per_epoch < 1 or not 0 < alpha < 1:
            raise ValueError(
                f"need steps_per_epoch >= 1 and alpha in (0, 1), got {steps_per_epoch} and {alpha}"
            )
        self.steps_per_epoch, self.alpha = steps_per_epoch, alpha

    def observe(self, reading: Reading) -> int:
        """Count finished epochs."""
        epoch = reading.step // self.steps_per_epoch
        # Rounded first: 1 - (2/3)^e is not exact, and ceil would make 3.0000000000000004 a 4.
        frozen = math.ceil(round(reading.num_layers * (1 - (1 - self.alpha) ** epoch), 9))
        return min(frozen, reading.num_layers - 1)
