"""PipeTransformer's freeze algorithm (He et al. 2021, equation 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from egeria_core.policies import Measure, Reading
from egeria_core.watch import Meter, Watched

from .gradients import GradientMeter

__all__ = ["PipeTransformerPolicy"]


class PipeTransformerPolicy:
    """After each epoch, a part of what is active freezes, up to the least gradient at most.

    frozen(T) = min(frozen(T-1) + alpha (L - frozen(T-1)), the active layer with the smallest
    gradient norm, counted from 1). Where the second never binds, this is
    L (1 - (1 - alpha)^T), of which the ceiling is frozen.

    Args:
        steps_per_epoch: Optimizer steps in one epoch.
        alpha: Part of the layers still active that freezes with each epoch.
        gradients: Whether the gradients have a say; False: the closed form alone, which measures
            nothing.
    """

    per_layer = True

    def __init__(
        self, steps_per_epoch: int, alpha: float = 1 / 3, *, gradients: bool = True
    ) -> None:
        if steps_per_epoch < 1 or not 0 < alpha < 1:
            raise ValueError(
                f"need steps_per_epoch >= 1 and alpha in (0, 1), got {steps_per_epoch} and {alpha}"
            )
        self.steps_per_epoch, self.alpha, self.gradients = steps_per_epoch, alpha, gradients
        self.measure: Measure = "own" if gradients else "nothing"
        self._level = 0.0
        self._epochs = 0
        self._last: list[float | None] | None = None

    def make_meter(self, watched: Watched) -> Meter:
        """Return what adds gradients up."""
        return GradientMeter(watched, "gradient_sum")

    def bind(self, boundaries: Sequence[str]) -> None:
        """Layers are only counted here."""

    def observe(self, reading: Reading) -> int:
        """Count finished epochs; look at the last gradients when one ends."""
        if reading.values is not None:
            self._last = list(reading.values)
        while self._epochs < reading.step // self.steps_per_epoch:
            self._epochs += 1
            grown = self._level + self.alpha * (reading.num_layers - self._level)
            self._level = min(grown, self._least(reading.num_layers))
        return self._frozen(reading.num_layers)

    def _frozen(self, num_layers: int) -> int:
        # Rounded first: 1 - (2/3)^e is not exact, and ceil would make 3.0000000000000004 a 4.
        return min(math.ceil(round(self._level, 9)), num_layers - 1)

    def _least(self, num_layers: int) -> float:
        """Return the active layer with the smallest gradient, from 1; all where none is known."""
        frozen = self._frozen(num_layers)
        known = {
            index + 1: value
            for index, value in enumerate(self._last or ())
            if index >= frozen and value is not None
        }
        return float(min(known, key=known.__getitem__)) if known else float(num_layers)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        return {"level": self._level, "epochs": self._epochs, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._level, self._epochs = state["level"], state["epochs"]
        self._last = None if state["last"] is None else list(state["last"])
