"""Evaluates on a thread of the training process: starts at once, but shares the interpreter."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress

from egeria_cache.threads import compute_on_one_core
from egeria_core.config import ReferenceKind
from egeria_core.errors import EvaluatorError
from egeria_core.evaluator.base import POLL_S, QUEUE_LENGTH
from egeria_core.judge import InputItem, OutputItem, ReferenceRunner, Verdict, compare

__all__ = ["ThreadEvaluator"]


class ThreadEvaluator:
    """Owns its thread: starts it, stops it, joins it, and raises its error once.

    Args:
        kind: Reference to use.
    """

    immediate = False

    def __init__(self, kind: ReferenceKind) -> None:
        self._runner = ReferenceRunner(kind, beside_training=True)
        self._items: queue.Queue[tuple[InputItem, OutputItem]] = queue.Queue(QUEUE_LENGTH)
        self._ready: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        self._pending = 0
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._work, name="egeria-evaluator", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        compute_on_one_core()
        while not self._stop.is_set():
            try:
                item, training = self._items.get(timeout=POLL_S)
            except queue.Empty:
                continue
            try:
                verdict = compare(self._runner.run(item), training)
                self._runner.heed(verdict)
            except Exception as error:  # any model code may run here
                self._error = error
                return
            self._ready.put(verdict)

    def submit(self, item: InputItem, training: OutputItem) -> bool:
        """Queue, or drop where the queue is full."""
        if self._error is not None:
            return False
        try:
            self._items.put_nowait((item, training))
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
