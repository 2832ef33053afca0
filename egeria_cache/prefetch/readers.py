"""The threads that read records ahead of need, shared by all loaders of a cache.

Where reads are short, the training thread does them itself: to hand them over would cost it more.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from egeria_cache.device import leave_captures_alone
from egeria_cache.store import NotInMemoryError
from egeria_cache.threads import compute_on_one_core, without_modes

_MOST = 4
"""Readers: each takes a core, and the interpreter, from training as well."""
_SETTLED, _MAX_PATIENCE = 24, 4096
"""Batches after which a reader may turn out to be needless; the longest that it takes."""
_SHORT_S, _BRIEF_S = 1e-3, 0.6e-3
"""A reader whose reads are shorter may be none at all, and is needed where they take training
longer. Beside training a read takes a multiple: both threads wait for the interpreter. On two cores
10 records of 16 KiB that training reads itself cost it 0.3 ms, and those of a reader 0.8; with 48
it is 0.4 ms and 1.2."""
_SOON, _FEW = 4, 8
"""Batches after which reads that became long go back to a reader; and by how many that is told: one
that took long among them is none."""

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
                self._readers.turn(is_spared=False)
                self._handed_in = self._readers.submit(read, False)
        return self._is_there if self._handed_in is None else self._handed_in.result(timeout)


def _begin() -> None:
    """Called first thing in a reader thread."""
    compute_on_one_core()
    leave_captures_alone()


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
        self.is_spared = False
        """Whether whoever needs rows had better read them itself than hand that in."""
        self._num_batches = 0
        """Since that changed."""
        self._patience = _SETTLED
        self._last_s: deque[float] = deque(maxlen=_FEW)
        """What reads cost lately."""

    def read(self, read: Read) -> Future[bool] | Deferred:
        """Hand in a read, or have it done by whoever asks for its result.

        Raises:
            RuntimeError: As `submit` does.
        """
        return Deferred(self, read) if self.is_spared else self.submit(read, False)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Hand in work.

        Raises:
            RuntimeError: They were stopped, none can be started, or this is a forked child.
        """
        if os.getpid() != self._process:  # where a lock may be held for ever
            raise RuntimeError("the threads stayed behind in the process that forked this one")
        return self._threads.submit(work, *args)

    def served(self, read_s: float, *, may_be_none: bool) -> None:
        """Note a batch of hits. The shorter training then read by itself, the later it does again.

        Args:
            read_s: What it cost a reader thread, or the training thread if it read itself.
            may_be_none: Whether the training thread can read such batches.
        """
        self._num_batches += 1
        self._last_s.append(read_s)
        usual_s = statistics.median(self._last_s)
        if not self.is_spared:
            if may_be_none and self._num_batches >= self._patience and usual_s < _SHORT_S:
                self.turn(is_spared=True)
        elif not may_be_none or (len(self._last_s) >= _SOON and usual_s > _BRIEF_S):
            self.turn(is_spared=False)

    def turn(self, *, is_spared: bool) -> None:
        """Have batches read by readers from now on, or by whoever needs them."""
        if not is_spared:
            lasted = self._num_batches > self._patience
            self._patience = _SETTLED if lasted else min(2 * self._patience, _MAX_PATIENCE)
        self.is_spared, self._num_batches = is_spared, 0
        self._last_s.clear()

    def close(self) -> None:
        """Stop; reads that have not begun are dropped. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
