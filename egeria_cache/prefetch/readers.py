"""The threads that read records ahead of need, shared by all loaders of a cache."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from egeria_cache.device import leave_captures_alone
from egeria_cache.prefetch.reader_count import ReaderCount
from egeria_cache.store import NotInMemoryError
from egeria_cache.threads import compute_on_one_core, without_modes

__all__ = ["Crew", "Deferred", "ReaderThreads"]


def _begin() -> None:
    """Called first thing in a reader thread."""
    compute_on_one_core()
    leave_captures_alone()


class ReaderThreads:
    """Started with the first read; `close` waits for what they are doing.

    How many work at a time follows from what reading and waiting cost (`ReaderCount`): at most as
    many as there are cores, which the ranks of a machine share, without one for training.
    """

    def __init__(self) -> None:
        cores, ranks = len(os.sched_getaffinity(0)), os.environ.get("LOCAL_WORLD_SIZE", "")
        cores //= int(ranks) if ranks.isdigit() and int(ranks) else 1
        self._count = ReaderCount(most=max(1, cores - 1))
        self._crew: Crew | None = None

    @property
    def executor(self) -> Crew:
        """Where reads are handed in."""
        if self._crew is None:
            self._crew = Crew(self._count.most)
        return self._crew

    def served(
        self, *, read_s: float, waited_s: float, interval_s: float, may_be_none: bool
    ) -> None:
        """Note what a batch of hits cost: see `ReaderCount.batch`."""
        crew = self._crew
        if self._count.wanted == 0 and crew is not None and not crew.is_spared:
            may_be_none = False  # not all was in memory
        wanted = self._count.batch(
            read_s=read_s, waited_s=waited_s, interval_s=interval_s, may_be_none=may_be_none
        )
        if crew is not None:
            crew.wanted, crew.is_spared = max(wanted, 1), wanted == 0

    def close(self) -> None:
        """Stop; reads that have not begun are dropped. Idempotent."""
        if self._crew is not None:
            self._crew.shutdown(wait=True, cancel_futures=True)


Read = Callable[[bool], bool]
"""Reads a batch: (only if all of it is in memory) -> whether its rows are there. Raises
`NotInMemoryError`."""


class Deferred:
    """A read that is done by the thread that asks for it, when it does; stands for a future.

    What is not in memory is a reader's all the same: a disk may take its time, and hang.
    """

    def __init__(self, crew: Crew, read: Read) -> None:
        self._crew = crew
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
                self._crew.is_spared = False
                self._handed_in = self._crew.submit(read, False)
        return self._is_there if self._handed_in is None else self._handed_in.result(timeout)


Work = tuple[Future[Any], Callable[[], Any]]


class Crew(Executor):
    """Does what is handed in, in order, on as many threads at a time as are wanted now.

    Args:
        most: Threads that there may ever be; they start when they are needed.
    """

    def __init__(self, most: int) -> None:
        self.wanted = 1
        """How many threads may work at a time; one too many stops after what it is doing."""
        self.is_spared = False
        """Whether whoever needs rows had better read them itself than hand that in."""
        self._threads = ThreadPoolExecutor(most, "egeria-read", initializer=_begin)
        self._lock = threading.Lock()
        self._waiting = deque[Work]()
        self._num_working = 0
        self._process = os.getpid()

    def read(self, read: Read) -> Future[bool] | Deferred:
        """Hand in a read, or have it done by whoever asks for its result.

        Raises:
            RuntimeError: As `submit` does.
        """
        return Deferred(self, read) if self.is_spared else self.submit(read, False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Hand in work.

        Raises:
            RuntimeError: It was shut down, no thread can be started, or this is a forked child.
        """
        if os.getpid() != self._process:  # where the lock may be held for ever
            raise RuntimeError("the threads stayed behind in the process that forked this one")
        future = Future[Any]()
        with self._lock:
            if self._num_working < self.wanted:
                self._threads.submit(self._work)
                self._num_working += 1
            self._waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; what was handed in is done, or else dropped."""
        while cancel_futures and self._waiting:
            with suppress(IndexError):  # a thread has just taken it
                self._waiting.popleft()[0].cancel()
        self._threads.shutdown(wait=wait)

    def _work(self) -> None:
        """Do one after another until nothing waits, or this is one thread too many."""
        while (work := self._next()) is not None:
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del work, future, call  # what was read is kept by those who asked for it alone

    def _next(self) -> Work | None:
        with self._lock:
            if self._waiting and self._num_working <= self.wanted:
                return self._waiting.popleft()
            self._num_working -= 1
            return None
