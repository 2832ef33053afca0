"""Evaluates on the training thread: reproducible, and the place for a reference on the device."""

from __future__ import annotations

from collections import deque

import torch

from egeria_core.errors import EvaluatorError
from egeria_core.judge import (
    InputItem,
    OutputItem,
    ReferenceItem,
    ReferenceRunner,
    Verdict,
    compare,
)

__all__ = ["InlineEvaluator"]


class InlineEvaluator:
    """Runs the reference in `submit`.

    Args:
        runner: Runs the reference.
        deferred: Compare at the next `poll` but one evaluation, when a device has long finished
            what `submit` gave it to do: the host never waits for it.
    """

    def __init__(self, runner: ReferenceRunner, *, deferred: bool = False) -> None:
        self.immediate = not deferred
        self._runner = runner
        self._waiting: deque[tuple[ReferenceItem, OutputItem]] = deque()

    def submit(self, item: InputItem, training: OutputItem) -> bool:
        """Run the reference now."""
        # The runner draws from generators of its own, as far as operators take one.
        generator = torch.get_rng_state()
        try:
            self._waiting.append((self._runner.run(item), training))
        except Exception as error:  # any model code may run here
            raise EvaluatorError(f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_rng_state(generator)
        return True

    def poll(self) -> list[Verdict]:
        """Compare what `submit` ran."""
        verdicts = []
        while self._waiting:
            verdict = compare(*self._waiting.popleft())
            self._runner.heed(verdict)
            verdicts.append(verdict)
        return verdicts

    def drain(self, timeout_s: float) -> list[Verdict]:
        """Nothing to wait for."""
        return self.poll()

    def close(self) -> None:
        """Nothing to stop."""
