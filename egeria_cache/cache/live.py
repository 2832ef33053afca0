"""Tell other processes what this cache is doing: `cache-inspect` shows it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from egeria_cache.cache.notes import LiveFile
from egeria_cache.gate import CacheStats
from egeria_cache.prefetch import ReaderThreads

__all__ = ["LiveReport"]

EVERY_S = 1.0


class LiveReport:
    """Has a reader thread write the counts, at most once a second, while the model is called.

    Args:
        directory: Of the cache.
        readers: One of them writes: the training thread never waits for the disk.
        stats: Returns the counts.
    """

    def __init__(
        self, directory: Path, readers: ReaderThreads, stats: Callable[[], CacheStats]
    ) -> None:
        self._file = LiveFile(directory)
        self._readers, self._stats = readers, stats
        self._process = os.getpid()
        self._next = time.monotonic() + EVERY_S  # a shorter training tells nothing
        self._is_closed = False
        self._running: Future[None] | None = None

    def called(self) -> None:
        """The model was called with a batch."""
        now = time.monotonic()
        if self._is_closed or now < self._next or os.getpid() != self._process:
            return
        self._next = now + EVERY_S
        if self._running is None or self._running.done():
            # Closed meanwhile, or no thread can be started: then nothing is told.
            with contextlib.suppress(RuntimeError):
                self._running = self._readers.executor.submit(self._write)

    def _write(self) -> None:
        found = self._stats()
        self._file.write(
            {
                "boundary": found.boundary, "hits": found.hits, "misses": found.misses,
                "saved_s": found.saved_s, "dropped_writes": found.dropped_writes,
                "gate": found.gate, "why_not": found.why_not,
            }
        )  # fmt: skip

    def close(self) -> None:
        """Take the file away; after the reader threads have ended."""
        self._is_closed = True
        self._file.remove()
