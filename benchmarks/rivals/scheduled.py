"""What all policies that follow a schedule, and measure nothing, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from egeria_core import PolicyError
from egeria_core.policies import Measure, Reading

__all__ = ["Scheduled"]


class Scheduled:
    """The step says it all: no state, and a resumed run is where it would have been."""

    measure: Measure = "nothing"

    def bind(self, boundaries: Sequence[str]) -> None:
        """Layers are only counted here."""

    def observe(self, reading: Reading) -> int:
        """Return how many layers are frozen from the next forward on."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue from."""

    def _length(self, reading: Reading) -> int:
        """Return the schedule's length.

        Raises:
            PolicyError: The controller was not told.
        """
        if reading.total_steps is None:
            raise PolicyError(
                f"{type(self).__name__} follows the whole schedule: give the controller total_steps"
            )
        return reading.total_steps
