"""What a freezing policy sees and answers. A user's own policy needs nothing but this file.

A policy is a pure state machine: it holds no model, tensor, thread or file, and the same readings
give the same answers. That makes it testable on hand-made traces, and resumable. `StaticPolicy` is
the plainest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from egeria_cache import BoundaryError, EgeriaError
from egeria_core.rules import Remembered

Measure = Literal["plasticity", "movement", "nothing", "own"]
"""What the controller measures for a policy at every evaluation.

- `plasticity`: SP loss of the frontmost active layer against its reference;
- `movement`: per layer, how far its weights move in a step and what that takes off the loss; as
  `Movement.of` takes them;
- `nothing`;
- `own`: the policy has `per_layer` and `make_meter(watched)`, as `egeria_core.watch.Meter` has.
"""


class PolicyError(EgeriaError):
    """A freezing policy answered, or was given, something impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What is left of the schedule, and what freezing would save of it. Counted in steps."""

    steps: int
    """Optimizer steps left."""
    rate: float | None
    """Sum of their learning rates; None: the schedule is not known."""
    rises: bool = False
    """Whether a rate is to come that is well above the present one (a warm-up, a restart)."""
    saves: tuple[float, ...]
    """For k = 0 to L - 1: the part of a step that is saved while the first k layers are frozen."""
    draws: tuple[int, ...]
    """For the same k: how many modules of these draw in training, which freezing switches off."""
    cost: float
    """Steps that a move takes by itself."""
    every: int
    """Steps between two readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The state of training after one optimizer step. Most steps carry no measurement."""

    step: int
    """Finished training steps."""
    num_layers: int
    """L; the last layer is never frozen."""
    lr: tuple[float, ...]
    """Learning rate of each parameter group."""
    total_steps: int | None = None
    """Length of the schedule, where the user gave it."""
    value: float | None = None
    """The measure of layer `layer`; None between evaluations."""
    layer: int | None = None
    """Which layer `value` belongs to."""
    values: tuple[float | None, ...] | None = None
    """Per-layer measures, of meters that read them; None for a layer that has none."""
    prospect: Prospect | None = None
    """What is left, where it is known; given along with a reading."""


@runtime_checkable
class Policy(Protocol):
    """Observes readings and answers how many front layers are frozen from now on."""

    measure: Measure

    def bind(self, boundaries: Sequence[str]) -> None:
        """Learn the boundary name of every layer, in forward order; called before `observe`."""

    def observe(self, reading: Reading) -> int:
        """Return the number of frozen layers, 0 to `reading.num_layers - 1`; called every step."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that later answers depend on, of JSON types."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""


class StaticPolicy(Remembered):
    """Move the boundary at given steps; there is nothing to remember, the step says it all.

    Args:
        schedule: `(step, boundary)` pairs or a mapping, as `FreezeController.schedule()` returns
            them: from the forward of training step `step` (counted from 0) on, everything up to
            the layer `boundary` is frozen; None unfreezes all.
    """

    measure: Measure = "nothing"

    def __init__(
        self, schedule: Mapping[int, str | None] | Iterable[tuple[int, str | None]]
    ) -> None:
        self.schedule = sorted(dict[int, str | None](schedule).items())
        if self.schedule and self.schedule[0][0] < 0:
            raise ValueError(f"a step of the schedule is negative: {self.schedule[0][0]}")
        self.boundaries: list[str] = []
        """Of the layers, as the controller has found them."""
        self._moves: list[tuple[int, int]] = []

    def bind(self, boundaries: Sequence[str]) -> None:
        """Look the names up.

        Raises:
            BoundaryError: A name in the schedule ends no layer, or ends the last one.
        """
        self.boundaries = list(boundaries)
        index = {name: i + 1 for i, name in enumerate(boundaries)}
        for _, name in self.schedule:
            if name is not None and name not in index:
                raise BoundaryError.unknown(name, boundaries)
        self._moves = [(step, 0 if name is None else index[name]) for step, name in self.schedule]

    def observe(self, reading: Reading) -> int:
        """Return what the schedule says for the next forward."""
        return next((k for step, k in reversed(self._moves) if step <= reading.step), 0)
