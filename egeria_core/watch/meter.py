"""What a meter is: it watches training steps and gives verdicts; a policy may bring its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from egeria_core.config import ControllerConfig
from egeria_core.history import History, Verdict
from egeria_core.watch.forward import LayerMap


@dataclass(frozen=True, slots=True)
class Watched:
    """All that a meter is made of."""

    model: nn.Module
    """The bare model."""
    optimizer: torch.optim.Optimizer
    layers: LayerMap
    every: int
    """Training steps between two evaluations."""
    config: ControllerConfig
    history: History
    """Refreshes, drops and fallbacks are written here."""


class Meter:
    """Watches nothing, and has a rhythm: `prepare` before the forward of an evaluation step,
    `measure` after its optimizer step, `collect` whenever the controller wants verdicts.

    For the training thread alone.
    """

    per_layer: bool = False
    """Whether every rank measures its part of each layer; else one rank measures the front."""

    @classmethod
    def make_meter(cls, watched: Watched) -> Meter:
        """Return the meter of one run."""
        return cls(watched)

    def __init__(self, watched: Watched) -> None:
        """Take what is watched."""

    def bind(self) -> None:
        """The layers are known, or have changed."""

    def note(self, loss: Tensor | float | None) -> None:
        """Take the training loss of each step, where the user gave it."""

    def prepare(self, frozen: int) -> None:
        """The next forward belongs to an evaluation step."""

    def measure(self, step: int, frozen: int) -> None:
        """Look at the step that has just been taken."""

    def collect(self) -> list[Verdict]:
        """Return verdicts, oldest first."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return what later verdicts depend on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""

    def close(self) -> None:
        """Take off hooks and stop threads; idempotent."""


@runtime_checkable
class BringsMeter(Protocol):
    """A policy that measures in its own way; its `measure` is "own"."""

    per_layer: bool
    """Whether every rank measures its part of each layer; else one rank measures the front."""

    def make_meter(self, watched: Watched) -> Meter:
        """Return the meter of one run; called once."""
