"""The threads that read: shared by all loaders of a cache.

Short reads are left to the training thread, at the moment of need: to hand them over would cost it
more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from egeria_cache.device import leave_captures_alone
from egeria_cache.store import NotInMemoryError
from egeria_cache.threads import compute_on_one_core, without_modes

_MOST = 4
"""Readers: each takes a core, and the interpreter, from training as well."""

Read = Callable[[bool], bool]
"""Reads a batch: (only if all of it is in memory) -> whether its rows are there. Raises
`NotInMemoryError`."""


class Deferred:
    """A read that is done by the thread that asks for it, when it does; stands for a future.

    What is not in memory is a reader's all the same: a disk may take its time, and hang.
    """

    def __init__(self, readers: ReaderThreads, read: Read) -> None:
        self._readers = readers
        self._read: Read | None = read
        self._handed_in: Future[bool] | None = None
        self._is_there = False

    def result(self, timeout: float | None = None) -> bool:
        """Read, the first time; whether the rows are there.

        Raises:
            TimeoutError: A reader took longer than so many seconds.
        """
        read, self._read = self._read, None
        if read is not None:
            try:
                with without_modes():
                    self._is_there = read(True)
            except NotInMemoryError:
                self._handed_in = self._readers.submit(read, False)
        return self._is_there if self._handed_in is None else self._handed_in.result(timeout)


class ReaderThreads:
    """Started with the first read; `close` waits for what they are doing.

    At most four, and as many as there are cores, which the ranks of a machine share, without one
    for training.
    """

    def __init__(self) -> None:
        cores, ranks = len(os.sched_getaffinity(0)), os.environ.get("LOCAL_WORLD_SIZE", "")
        cores //= int(ranks) if ranks.isdigit() and int(ranks) else 1
        most = max(1, min(_MOST, cores - 1))
        self._threads = ThreadPoolExecutor(most, "egeria-read", initializer=_begin)
        self._process = os.getpid()

    def read(self, read: Read, *, is_short: bool) -> Future[bool] | Deferred:
        """Hand in a read, or, if it is short, have it done by whoever asks for its result.

        Raises:
            RuntimeError: As `submit` does.
        """
        return Deferred(self, read) if is_short else self.submit(read, False)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Hand in work.

        Raises:
            RuntimeError: They were stopped, none can be started, or this is a forked child.
        """
        if os.getpid() != self._process:  # where a lock may be held for ever
            raise RuntimeError("the threads stayed behind in the process that forked this one")
        return self._threads.submit(work, *args)

    def close(self) -> None:
        """Stop; reads that have not begun are dropped. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """Called first thing in a reader thread."""
    compute_on_one_core()
    leave_captures_alone()
