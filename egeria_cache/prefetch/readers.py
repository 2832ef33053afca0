"""The threads that read records ahead of need, shared by all loaders of a cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from egeria_cache.threads import compute_on_one_core

__all__ = ["NUM_READERS", "ReaderThreads"]

NUM_READERS = 1 if (os.cpu_count() or 1) <= 4 else 2
"""A second one hides a slow disk, but where cores are few it takes the interpreter from training:
on two of them, small steps took half as long again. Large batches are decoded by several threads
either way."""


class ReaderThreads:
    """Started with the first read; `close` waits for what they are doing."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    @property
    def executor(self) -> ThreadPoolExecutor:
        """Where reads are handed in."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                NUM_READERS, "egeria-read", initializer=compute_on_one_core
            )
        return self._executor

    def close(self) -> None:
        """Stop; reads that have not begun are dropped. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
