"""SmartPipe: freeze the front layers whose gradient has stopped changing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from egeria_core.policies import Measure, Reading
from egeria_core.watch import Meter, Watched

from .gradients import GradientMeter

__all__ = ["SmartPipePolicy"]


class SmartPipePolicy:
    """Freeze layer l when its gradient changes by less than tau and all before it are frozen.

    Args:
        tau: Bound on |g' - g| / |g'|. Two independent gradients of one length read sqrt(2), and
            single mini-batches are close to that; so tau is a fraction of the layer's own first
            readings when `relative` is set (the default), an absolute bound otherwise.
        relative: See `tau`.
        share: lambda: at most this part of the active layers freezes at one reading.
    """

    measure: Measure = "own"
    per_layer = True

    def __init__(self, tau: float = 0.9, *, relative: bool = True, share: float = 0.5) -> None:
        if tau <= 0 or not 0 < share <= 1:
            raise ValueError(f"need tau > 0 and share in (0, 1], got {tau} and {share}")
        self.tau, self.relative, self.share = tau, relative, share
        self.frozen = 0
        self._first: list[float | None] = []

    def make_meter(self, watched: Watched) -> Meter:
        """Return what compares gradients."""
        return GradientMeter(watched, "gradient_change")

    def bind(self, boundaries: Sequence[str]) -> None:
        """Layers are only counted here."""

    def observe(self, reading: Reading) -> int:
        """Freeze consecutive quiet layers from the front."""
        if reading.values is None:
            return self.frozen
        if len(self._first) != len(reading.values):
            self._first = [None] * len(reading.values)
        room = int(self.share * (reading.num_layers - self.frozen))
        frozen = self.frozen
        while frozen < min(self.frozen + room, reading.num_layers - 1):
            value = reading.values[frozen]
            if value is None or value >= self._bound(frozen):
                break
            frozen += 1
        for index, value in enumerate(reading.values):
            if self._first[index] is None:
                self._first[index] = value
        self.frozen = frozen
        return frozen

    def _bound(self, layer: int) -> float:
        first = self._first[layer]
        if not self.relative:
            return self.tau
        return 0.0 if first is None else self.tau * first

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        return {"frozen": self.frozen, "first": list(self._first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.frozen, self._first = state["frozen"], list(state["first"])
