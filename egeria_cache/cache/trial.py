"""Measure reading before the first hits come: a reader thread reads back what was just stored."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

import numpy as np

from egeria_cache.batch import SampleId
from egeria_cache.gate import Pilot
from egeria_cache.prefetch import ReaderThreads, View

__all__ = ["TrialReads"]


class TrialReads:
    """One read at a time, until the pilot has seen enough. Used from the training thread."""

    def __init__(self, pilot: Pilot, readers: ReaderThreads) -> None:
        self._pilot = pilot
        self._readers = readers
        self._running: Future[tuple[float, int, int] | None] | None = None
        self._stored: deque[tuple[View, list[SampleId], np.ndarray]] = deque(maxlen=4)

    def stored(self, view: View, ids: list[SampleId], draws: np.ndarray) -> None:
        """Note what was handed to the writer; an older batch, written by now, is read back."""
        if not self._pilot.wants_trial_read:
            return
        if self._running is not None and self._running.done():
            done, self._running = self._running, None
            if done.exception() is None and (measured := done.result()) is not None:
                self._pilot.meter.read(*measured)
        self._stored.append((view, ids, draws))
        if self._running is None and self._stored[0][0].alive:
            self._running = self._readers.executor.submit(_time_read, *self._stored[0])


def _time_read(view: View, ids: list[SampleId], draws: np.ndarray) -> tuple[float, int, int] | None:
    """Return the seconds, samples and bytes per sample of one read; None if it is not there yet."""
    started = time.perf_counter()
    _, found = view.generation.get_batch(ids, variant=draws)
    if not found.all():
        return None
    return time.perf_counter() - started, len(ids), view.cut.row_bytes
