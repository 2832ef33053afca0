"""The one thread that encodes and commits: bounded queue, one transaction for what waits in it.

One thread: with a second one, which encodes the next group while the first commits, 134 MB of raw
rows took 0.29 s instead of 0.25, packed ones 0.69 instead of 0.72, for both want the interpreter.

Owned by its store, which starts and closes it. It never blocks a caller: what does not fit is
dropped and counted. It never raises into training: an error stops its generation, with one warning.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from egeria_cache.attempt import compute_on_one_core
from egeria_cache.device import Event
from egeria_cache.ragged import PaddedRows
from egeria_cache.store.record import Rows

logger = logging.getLogger("egeria_cache.store")

QUEUE_BATCHES, QUEUE_BYTES = 64, 2 * 2**30
"""What may wait; one more is dropped and counted. Rows of 256 bytes in shuffled order take 1.45
bytes on disk for one of a record so, and 1.58 where 16 batches may wait (benchmarks.store): each
commit writes the pages of the index anew."""
GROUP_BYTES = 4 * 2**20
"""Batches that wait are committed together, up to this size: a commit costs a flush of the disk
however small it is. Larger groups took up to twice the time per byte: LMDB writes neighbouring
blocks in one call."""
GROUP_BATCHES = 32
"""While more are to come that nobody reads soon, so many make a group as well: the fresh quarters
of mixed batches took the writer half of its time where 8 did."""


class Job:
    """One batch on its way to disk.

    Args:
        target: The generation; its `commit(jobs)` runs on the writer thread.
        keys: Of all rows.
        rows: The batch.
        ready: Points after the copies from the device; none where the rows are there.
        replaced: Per row the last draw that it supersedes, as a key.
        aside: No rows: a damaged generation, of which the target takes what is intact.
    """

    def __init__(
        self, target: Any, keys: Sequence[bytes], rows: Rows, ready: Sequence[Event] = (),
        replaced: Sequence[bytes] | None = None, aside: Path | None = None,
    ) -> None:  # fmt: skip
        self.target, self.keys, self.rows = target, keys, rows
        self.ready, self.replaced, self.aside = ready, replaced, aside
        self.kind = target, replaced is None, aside
        """Jobs of one kind may be committed together."""
        lists = [[one] if isinstance(one, Tensor | PaddedRows) else one for one in rows.values()]
        values = [one for many in lists for one in many if isinstance(one, Tensor | PaddedRows)]
        self.num_bytes = sum(one.nbytes for one in values)
        """Of the rows, without padding."""
        tensors = [one.padded if isinstance(one, PaddedRows) else one for one in values]
        self.held_bytes = sum(one.nbytes for one in tensors)
        """Of the memory that the rows lie in, which the queue bounds."""
        # Inference tensors have no version counter.
        self._versions = [(one, one._version) for one in tensors if not one.is_inference()]

    def unchanged(self) -> bool:
        """No tensor was written to since it was handed over."""
        return all(tensor._version == version for tensor, version in self._versions)


class Writer:
    """Bounded queue and its thread."""

    def __init__(self) -> None:
        self._jobs: collections.deque[Job] = collections.deque()
        self._waiting_bytes = 0
        self._busy = False
        self._stopping = False
        self._hurries = False
        """Whether what waits is to be committed now."""
        self.gathers = False
        """Whether batches wait for a group: those to come soon are more than those to be read."""
        self.why_dead = ""
        """Why nothing is stored any more, if that is so."""
        self.numbers = collections.Counter(writes=0, dropped_writes=0, corrupt=0)
        """What happened in this process, by its name in `StoreStats`."""
        self._counting = threading.Lock()
        self.work_s = 0.0
        """Processor time of its thread so far."""
        self._changed, self._process = threading.Condition(), os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """It runs, or will with the first batch."""
        thread = self._thread
        return not (self._stopping or self.why_dead) and (thread is None or thread.is_alive())

    @property
    def is_full(self) -> bool:
        """One more batch would be dropped, however small."""
        return len(self._jobs) >= QUEUE_BATCHES or self._waiting_bytes >= QUEUE_BYTES

    def count(self, **changes: int) -> None:
        """Count what is read and written."""
        with self._counting:
            self.numbers.update(changes)

    def submit(self, job: Job) -> bool:
        """Queue a batch without waiting; False if it was dropped."""
        with self._changed:
            full = self.is_full or self._waiting_bytes + job.held_bytes > QUEUE_BYTES
            self._hurries |= full
            taken = not full and self.alive and self._starts()
            if taken:
                self._jobs.append(job)
                self._waiting_bytes += job.held_bytes
            if self._is_ripe:
                self._changed.notify_all()
            return taken

    @property
    def _is_ripe(self) -> bool:
        """Whether what waits is to be committed."""
        is_many = len(self._jobs) >= min(GROUP_BATCHES, QUEUE_BATCHES // 2)
        is_much = is_many or self._waiting_bytes >= GROUP_BYTES
        return not self.gathers or self._hurries or self._stopping or is_much

    def gather(self, gathers: bool) -> None:
        """Wait for groups, or no more: what is queued is committed now, in its turn."""
        if self.gathers == gathers or os.getpid() != self._process:
            return  # in a forked child the thread may have held its lock for ever
        with self._changed:
            self.gathers, self._hurries = gathers, self._hurries or not gathers
            self._changed.notify_all()

    def _starts(self) -> bool:
        """Start the thread with the first batch; whether there is one."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="egeria-writer", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # of processes that may have no more
                self.why_dead = f"nothing is stored: no writer thread: {error}"
                return False
            self._thread = thread
        return True

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything queued is on disk; False on timeout or if the thread died."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not (self.alive and (self._jobs or self._busy)), timeout_s
            )
            return not (self._jobs or self._busy or self.why_dead)

    def discard(self, should_go: Callable[[Job], bool]) -> int:
        """Drop queued batches; return how many."""
        with self._changed:
            kept = [job for job in self._jobs if not should_go(job)]
            num_gone = len(self._jobs) - len(kept)
            self._jobs = collections.deque(kept)
            self._waiting_bytes = sum(job.held_bytes for job in kept)
            self._changed.notify_all()
        return num_gone

    def close(self, timeout_s: float) -> None:
        """Write what is queued, then stop and join; a hung disk is left behind after the time."""
        self.flush(timeout_s)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("the cache's writer did not stop within %.0f s", timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # no further thread can be started
            compute_on_one_core()
        try:
            while jobs := self._next():
                jobs[0].target.commit(jobs)
                self.work_s = time.thread_time()
                del jobs
        except BaseException:
            self.why_dead = "the cache's writer thread is dead"
            logger.exception("the cache's writer thread died; nothing more is stored in this run")
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _next(self) -> list[Job]:
        """Return what waits for one generation, in order; nothing when it is time to stop."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not (self._jobs and self._is_ripe):
                if self._stopping:
                    return []
                self._hurries = False
                self._changed.wait()
            jobs = [self._jobs.popleft()]
            num_bytes = jobs[0].num_bytes
            while self._jobs and self._jobs[0].kind == jobs[0].kind:
                num_bytes += self._jobs[0].num_bytes
                if num_bytes > GROUP_BYTES:
                    break
                jobs.append(self._jobs.popleft())
            self._waiting_bytes -= sum(job.held_bytes for job in jobs)
            self._busy = True
            return jobs
