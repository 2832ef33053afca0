"""Composer's layer freezing: a part of the layers that grows linearly with time."""

from __future__ import annotations

from egeria_core.policies import Reading

from .scheduled import Scheduled

__all__ = ["LinearPolicy"]


class LinearPolicy(Scheduled):
    """At the end of each epoch, freeze int(level (t - start) / (1 - start) (L - 1)) layers.

    Args:
        steps_per_epoch: Optimizer steps in one epoch.
        start: Part of the schedule before which nothing freezes (Composer's 0.5).
        level: Part of the layers that is frozen at the end (Composer's 1.0).
    """

    def __init__(self, steps_per_epoch: int, start: float = 0.5, level: float = 1.0) -> None:
        if steps_per_epoch < 1 or not 0 <= start < 1 or not 0 <= level <= 1:
            raise ValueError(
                "need steps_per_epoch >= 1, start in [0, 1) and level in [0, 1], got "
                f"{steps_per_epoch}, {start} and {level}"
            )
        self.steps_per_epoch, self.start, self.level = steps_per_epoch, start, level

    def observe(self, reading: Reading) -> int:
        """Look at the last epoch's end."""
        epoch_end = reading.step - reading.step % self.steps_per_epoch
        progress = min(1.0, epoch_end / self._length(reading))
        if progress < self.start:
            return 0
        part = self.level * (progress - self.start) / (1 - self.start)
        return int(part * (reading.num_layers - 1) + 1e-9)
