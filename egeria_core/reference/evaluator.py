"""What the training thread asks of an evaluator, and the one that works on that thread itself."""

from __future__ import annotations

from typing import Protocol

import torch

from egeria_cache.device import random_states, set_random_states
from egeria_core.config import ReferenceKind
from egeria_core.errors import EvaluatorError
from egeria_core.reference.runner import InputItem, ReferenceRunner
from egeria_core.verdict import Verdict

__all__ = ["Evaluator", "InlineEvaluator"]


class Evaluator(Protocol):
    """Takes evaluations, gives verdicts in the same order; for the training thread alone."""

    immediate: bool
    """Whether `poll` right after `submit` returns its verdict."""

    def submit(self, item: InputItem) -> bool:
        """Hand over; False when it was dropped. Never waits.

        Raises:
            EvaluatorError: Inline only: the evaluation failed.
        """

    def poll(self, timeout_s: float = 0.0) -> list[Verdict]:
        """Return the verdicts that are ready, having waited so long for all of them.

        Raises:
            EvaluatorError: Once, when the evaluator has died; it gives nothing from then on.
        """

    def close(self) -> None:
        """Stop; idempotent."""


class InlineEvaluator:
    """Runs the reference in `submit`: reproducible."""

    immediate = True

    def __init__(self, kind: ReferenceKind) -> None:
        self._runner = ReferenceRunner(kind)
        self._ready: list[Verdict] = []

    def submit(self, item: InputItem) -> bool:
        """Run the reference now."""
        # Building one may initialise weights, and a layer's own code may draw.
        host, devices = torch.get_rng_state(), random_states()
        try:
            item.arrive()
            self._ready.append(self._runner.run(item))
        except Exception as error:  # any model code may run here
            raise EvaluatorError(f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_rng_state(host)
            set_random_states(devices)
        return True

    def poll(self, timeout_s: float = 0.0) -> list[Verdict]:
        """Return what `submit` read."""
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Nothing to stop."""
