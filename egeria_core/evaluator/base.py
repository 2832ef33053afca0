"""What the training thread asks of an evaluator, wherever it runs."""

from __future__ import annotations

from typing import Protocol

from egeria_core.judge import InputItem, OutputItem, Verdict

__all__ = ["POLL_S", "QUEUE_LENGTH", "Evaluator"]

QUEUE_LENGTH = 2
"""Evaluations that may wait. More would be read too late to be of use."""
POLL_S = 0.2
"""How often something that waits looks whether it is to stop."""


class Evaluator(Protocol):
    """Takes evaluations, gives verdicts in the same order; for the training thread alone."""

    immediate: bool
    """Whether `poll` right after `submit` returns its verdict."""

    def submit(self, item: InputItem, training: OutputItem) -> bool:
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
