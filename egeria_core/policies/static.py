"""Boundaries given by hand, or replayed from another run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from egeria_cache import BoundaryError
from egeria_core.policies.base import Measure, Reading
from egeria_core.remembered import Remembered


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
        pairs = schedule.items() if isinstance(schedule, Mapping) else schedule
        self.schedule = sorted(dict(pairs).items())
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
        frozen = 0
        for step, count in self._moves:
            if step <= reading.step:
                frozen = count
        return frozen
