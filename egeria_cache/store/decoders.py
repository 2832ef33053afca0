"""The threads that divide a batch's work among them, as many as pay by what was measured."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from egeria_cache.store.codecs.codec import Coder
from egeria_cache.threads import compute_on_one_core

__all__ = ["Decoders", "num_parts"]

T = TypeVar("T")

FIRST_MORE_S = 1e-4
"""What one thread more is taken to cost until it was measured."""
NEW = 0.2
"""Weight of the last measurement."""
EVERY = 4
"""Of so many works two are measured."""
FORGETTING = 0.99
"""Of what more than that one costs, at each work that was not divided: a busy machine is tried
again."""


def num_parts(work_s: float, more_s: float, most: int) -> int:
    """Return how many threads end soonest: the p that makes work / p + (p - 1) more smallest.

    Args:
        work_s: What one thread would take.
        more_s: What each further one costs: to wake it, and to wait for it where the cores are busy
            with training, which then keeps them.
        most: Threads that there are.
    """
    return max(1, min(most, int(math.sqrt(work_s / max(more_s, 1e-7)))))


class Decoders:
    """Owns the threads; they start with the first work that is worth it. Any number of callers."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._more_s = FIRST_MORE_S
        self._num_runs: dict[Hashable, int] = {}
        self._s_per_byte: dict[Hashable, float] = {}

    @property
    def coder(self) -> Coder:
        """The calling thread's own."""
        coder: Coder | None = getattr(self._local, "coder", None)
        if coder is None:
            coder = self._local.coder = Coder()
        return coder

    def close(self) -> None:
        """Join the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def run(
        self, kind: Hashable, work: Callable[[slice, Coder], T], count: int, num_bytes: int
    ) -> list[T]:
        """Call `work` for parts that together are `range(count)`; return what the calls return.

        Args:
            kind: Of work; what is alike takes as long per byte.
            work: Called with a part, and with the coder of the thread that calls it.
            count: Of what there is to do.
            num_bytes: How much that is.
        """
        work_s = self._s_per_byte.get(kind, 0.0) * num_bytes
        parts = min(num_parts(work_s, self._more_s, self._num_threads), max(count, 1))
        if parts == 1:
            if self._more_s > FIRST_MORE_S:
                self._more_s *= FORGETTING
            return [self._measured(kind, work, slice(0, count), num_bytes)]
        ends = [count * part // parts for part in range(parts + 1)]
        mine, *others = itertools.starmap(slice, itertools.pairwise(ends))
        asked = time.perf_counter()
        futures = [self._threads().submit(self._call, work, part) for part in others]
        results = [self._measured(kind, work, mine, num_bytes * mine.stop // count)]
        results += [future.result() for future in futures]
        lost = time.perf_counter() - asked - work_s / parts
        self._more_s += NEW * (max(lost, 0.0) / len(futures) - self._more_s)
        return results

    def _measured(
        self, kind: Hashable, work: Callable[[slice, Coder], T], part: slice, num_bytes: int
    ) -> T:
        """Work in this thread; now and then, note what it took."""
        number = self._num_runs[kind] = self._num_runs.get(kind, -1) + 1
        if not num_bytes or not number or number % EVERY > 1:  # the first is slower than all others
            return work(part, self.coder)
        known = self._s_per_byte.get(kind)
        begun = time.thread_time()
        result = work(part, self.coder)
        taken = (time.thread_time() - begun) / num_bytes
        self._s_per_byte[kind] = taken if known is None else known + NEW * (taken - known)
        return result

    def _call(self, work: Callable[[slice, Coder], T], part: slice) -> T:
        return work(part, self.coder)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._num_threads, "egeria-decode", initializer=compute_on_one_core
                )
            return self._pool
