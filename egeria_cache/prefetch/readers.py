"""The threads that read records ahead of need, shared by all loaders of a cache.

`ReaderCount` decides how many keep up with training, if any, by what reading and waiting cost. It
is told of every batch of hits, in seconds, and looks at no clock.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from egeria_cache.device import leave_captures_alone
from egeria_cache.store import NotInMemoryError
from egeria_cache.threads import compute_on_one_core, without_modes

_SHARE = 1 / 8
"""Weight of the latest batch in the means."""
_SETTLED = 24
"""Batches after which the means say what another number of readers has brought."""
_MAX_PATIENCE = 4096
_WAITING = 0.05
"""Part of the time between two batches that training may wait for reads."""
_GAIN = 0.95
"""Of the time between two batches, what it must have come down to for a further reader to stay."""
_IDLE = 0.6
"""Readers are let go where those that are left would be busy for no larger part of the time."""
_SHORT_S, _BRIEF_S = 1e-3, 0.6e-3
"""A reader whose reads are shorter may be none at all, and is needed where they take training
longer. Beside training a read takes a multiple: both threads wait for the interpreter. On two cores
10 records of 16 KiB that training reads itself cost it 0.3 ms, and those of a reader 0.8; with 48
it is 0.4 ms and 1.2."""
_SOON, _FEW = 4, 8
"""Batches after which reads that became long go back to a reader; and by how many that is told: one
that took long among them is none."""


class ReaderCount:
    """Counts the readers that are wanted; from 0 to `most`.

    One reader, while it keeps up. Another is tried while training was seen to wait for reads that
    keep the readers busy, and stays if batches then came faster: it takes a core, and the
    interpreter, from training as well. The longer it did not help, the later it is tried again.
    None where reads are so short that it costs training more to hand them over than to read.

    Args:
        most: As many as there are cores to read on.
    """

    def __init__(self, most: int) -> None:
        self.wanted, self.most = 1, most
        self._read_s = self._waited_s = self._interval_s = 0.0
        self._num_batches = 0
        """Since the number changed."""
        self._patience = self._patience_alone = _SETTLED
        self._last_s: deque[float] = deque(maxlen=_FEW)
        """What reads cost since there is no reader."""
        self._interval_before_s = 0.0
        """With one reader less, while another is on trial."""

    def batch(
        self, *, read_s: float, waited_s: float, interval_s: float, may_be_none: bool = True
    ) -> int:
        """Note a batch of hits; return how many readers are wanted.

        Args:
            read_s: What it cost a reader thread, or the training thread if there is no reader.
            waited_s: What of that the training thread waited for.
            interval_s: From the request for it to the request for the next.
            may_be_none: Whether the training thread can read such batches itself.
        """
        # The first batch alone after a change is no mean yet.
        share = _SHARE if self._num_batches else 1.0
        self._num_batches += 1
        # Someone saved a checkpoint, or looked at the validation set: that is no pace of training.
        interval_s = min(interval_s, 8 * self._interval_s) if share < 1 else interval_s
        self._read_s += share * (read_s - self._read_s)
        self._waited_s += share * (waited_s - self._waited_s)
        self._interval_s += share * (interval_s - self._interval_s)
        if self.wanted == 0:
            self._last_s.append(read_s)
            self._judge_alone(may_be_none=may_be_none)
        elif self._num_batches >= _SETTLED:
            self._judge(may_be_none=may_be_none)
        return self.wanted

    def _judge_alone(self, *, may_be_none: bool) -> None:
        last_s = sorted(self._last_s)
        if may_be_none and (len(last_s) < _SOON or last_s[len(last_s) // 2] <= _BRIEF_S):
            return
        lasted = self._num_batches > self._patience_alone
        self._patience_alone = _SETTLED if lasted else min(2 * self._patience_alone, _MAX_PATIENCE)
        self._last_s.clear()
        self._turn_to(1)

    def _judge(self, *, may_be_none: bool) -> None:
        busy = self._read_s / max(self._interval_s, 1e-9)
        if self._interval_before_s:
            helped = self._interval_s <= _GAIN * self._interval_before_s
            self._interval_before_s = 0.0
            if helped:
                self._patience = _SETTLED
            else:
                self._patience = min(2 * self._patience, _MAX_PATIENCE)
                self._turn_to(self.wanted - 1)
        elif self.wanted > 1 and busy <= _IDLE * (self.wanted - 1):
            self._turn_to(self.wanted - 1)
        elif (
            self.wanted < self.most
            and self._num_batches >= self._patience
            and self._waited_s > _WAITING * self._interval_s
            and busy > _IDLE * self.wanted
        ):
            self._interval_before_s = self._interval_s
            self._turn_to(self.wanted + 1)
        elif (
            may_be_none
            and self.wanted == 1
            and self._read_s < _SHORT_S
            and self._num_batches >= self._patience_alone
        ):
            self._turn_to(0)

    def _turn_to(self, wanted: int) -> None:
        self.wanted, self._num_batches = wanted, 0


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
