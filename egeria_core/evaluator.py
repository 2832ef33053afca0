"""Where the reference runs: on the training thread (reproducible), or beside it.

The training side only ever calls `submit` and `poll`; neither waits. An evaluator that is busy
drops the evaluation: a reading missed costs nothing, a training step delayed does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Protocol

from egeria_core.errors import EvaluatorError
from egeria_core.judge import Evaluation, Judge, Verdict

__all__ = ["Evaluator", "InlineEvaluator", "ThreadEvaluator"]

QUEUE_LENGTH = 2
"""Evaluations that may wait. More would be read too late to be of use."""
POLL_S = 0.2
"""How often a waiting thread looks whether it is to stop."""


class Evaluator(Protocol):
    """Takes evaluations, gives verdicts in the same order; used by the training thread alone."""

    def submit(self, job: Evaluation) -> bool:
        """Hand over; False when it was dropped. Never waits."""

    def poll(self) -> list[Verdict]:
        """Return the verdicts that are ready. Raises EvaluatorError, once, when it has died."""

    def drain(self, timeout_s: float) -> list[Verdict]:
        """Wait for everything submitted; for saving state."""

    def close(self) -> None:
        """Stop; idempotent."""


class InlineEvaluator:
    """Evaluates in `submit`. The same run freezes at the same steps each time."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._ready: deque[Verdict] = deque()

    def submit(self, job: Evaluation) -> bool:
        """Evaluate at once."""
        try:
            self._ready.append(self._judge.handle(job))
        except Exception as error:  # any model code may run here
            raise EvaluatorError(f"{type(error).__name__}: {error}") from error
        return True

    def poll(self) -> list[Verdict]:
        """Return what `submit` found."""
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def drain(self, timeout_s: float) -> list[Verdict]:
        """Nothing to wait for."""
        return self.poll()

    def close(self) -> None:
        """Nothing to stop."""


class ThreadEvaluator:
    """Evaluates on a thread of its own, which it starts and joins."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._jobs: queue.Queue[Evaluation] = queue.Queue(QUEUE_LENGTH)
        self._ready: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        self._pending = 0
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._work, name="egeria-evaluator", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                job = self._jobs.get(timeout=POLL_S)
            except queue.Empty:
                continue
            try:
                self._ready.put(self._judge.handle(job))
            except Exception as error:  # any model code may run here
                self._error = error
                return

    def submit(self, job: Evaluation) -> bool:
        """Queue, or drop where the queue is full."""
        if self._error is not None:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        self._pending += 1
        return True

    def poll(self) -> list[Verdict]:
        """Return the verdicts that are ready; raise the thread's error once."""
        ready = []
        while not self._ready.empty():
            ready.append(self._ready.get())
        self._pending -= len(ready)
        if self._error is not None and not ready and not self._reported:
            self._reported = True
            raise EvaluatorError(f"{type(self._error).__name__}: {self._error}") from self._error
        return ready

    def drain(self, timeout_s: float) -> list[Verdict]:
        """Wait until every verdict is there, the thread has died, or time is up."""
        ready = []
        deadline = time.monotonic() + timeout_s
        while self._pending and self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Empty):
                ready.append(self._ready.get(timeout=POLL_S))
                self._pending -= 1
        return ready

    def close(self) -> None:
        """Stop after the evaluation in hand and join."""
        self._stop.set()
        self._thread.join(timeout=30.0)
