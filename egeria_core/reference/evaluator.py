"""What the training thread asks of an evaluator, and the one that works on that thread itself."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from egeria_cache.device import random_states, set_random_states
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

    def poll(self) -> list[Verdict]:
        """Return the verdicts that are ready.

        Raises:
            EvaluatorError: Once, when the evaluator has died; it gives nothing from then on.
        """

    def drain(self, timeout_s: float) -> list[Verdict]:
        """Wait for everything submitted; for saving state."""

    def close(self) -> None:
        """Stop; idempotent."""


class InlineEvaluator:
    """Runs the reference in `submit`: reproducible, and the place for one on the device.

    Args:
        runner: Runs the reference.
        deferred: Take the values one evaluation later, when a device has long finished what
            `submit` gave it to do: the host never waits for it.
    """

    def __init__(self, runner: ReferenceRunner, *, deferred: bool = False) -> None:
        self.immediate = not deferred
        self._runner = runner
        self._waiting: deque[tuple[Verdict, Tensor | None]] = deque()

    def submit(self, item: InputItem) -> bool:
        """Run the reference now."""
        # Building one may initialise weights, and a layer's own code may draw.
        host, devices = torch.get_rng_state(), random_states()
        try:
            self._waiting.append(self._runner.run(item))
        except Exception as error:  # any model code may run here
            raise EvaluatorError(f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_rng_state(host)
            set_random_states(devices)
        return True

    def poll(self) -> list[Verdict]:
        """Take the values of what `submit` ran."""
        verdicts = [self._runner.finish(*waiting) for waiting in self._waiting]
        self._waiting.clear()
        return verdicts

    def drain(self, timeout_s: float) -> list[Verdict]:
        """Nothing to wait for."""
        return self.poll()

    def close(self) -> None:
        """Nothing to stop."""
