"""From the plan to the rows: activations are read, verified and placed ahead of their need.

Reading happens on the cache's reader threads; short reads are left to the training thread, at the
moment of need. What that is handed is an `Entry` that either has its rows or says that it has not.

The threads that read are shared by all loaders of a cache. What is short, and in memory, the
training thread reads itself: to hand it over would cost it more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import compress, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache import attempt
from egeria_cache.attempt import is_beside
from egeria_cache.batch import Rows, SampleId
from egeria_cache.device import leave_captures_alone, pinned, pins, room, uploaded
from egeria_cache.prefetch.ring import Ring, numbered
from egeria_cache.prefetch.view import ACTIVATION, KEPT, LENGTHS, View
from egeria_cache.store import Located, NotInMemoryError

logger = logging.getLogger("egeria_cache.prefetch")

WHOLE_BYTES = 64 * 2**20
"""All samples of a loader stay on the device where they take no more: then nothing is copied there
from the second pass on. Where they take more, recent rows are asked for again only by samplers that
repeat themselves (docs/device.md has the figures)."""
SIZES = "sizes:"
"""Prefix of what is known of resident rows besides their records: how large they are if padded."""
TABLE_BYTES = 4
"""Of each sample, on the device."""
ROOM_EVERY_S = 1.0
"""So often it is asked whether training needs the ring's memory; that takes some 0.2 ms."""
READ_TIMEOUT_S = 60.0
"""A read that takes longer is given up; its samples are loaded from the dataset instead."""

SHORT_BYTES = 1 << 20
"""Of a batch's activations: up to this the training thread reads them itself. Beside training a
read takes a multiple, for both threads wait for the interpreter: on two cores 10 records of 16 KiB
that training reads itself cost it 0.3 ms, and those of a reader 0.8; with 48 it is 0.4 ms and 1.2.
From 2 MiB on a reader is ahead (a step of 13.4 ms, and 15.3 without it)."""

TOGETHER_BYTES = 2 << 20
"""So much of neighbouring short batches is read in one call: most of what reading 10 records of
16 KiB takes is the same for any number of them. They live as long as the last one of them."""

ALIGNMENT = 16
"""Of memory, as malloc gives it: how numbers are added up may depend on that."""

_passes = count()
_lock = threading.Lock()


class PlannedEntry:
    """Hits of one planned batch: where they enter the model, and their rows once read."""

    def __init__(self, view: View, number: int, ids: Sequence[SampleId],
                 draws: np.ndarray, located: Located) -> None:  # fmt: skip
        """Plan to serve what there is of batch `number` from `view`."""
        self.view, self.number, self.hit = view, number, located["entry"]["size"] > 0
        self.cut = view.cut
        """The cut at which the hits enter."""
        hit = self.hit
        self.num_hits = int(np.count_nonzero(hit))
        self.num_misses = len(hit) - self.num_hits
        self.serves_most = self.num_hits >= self.num_misses
        """Whether at least half of the batch are hits."""
        if self.num_misses:
            ids, draws, located = list(compress(ids, hit)), draws[hit], located[hit]
        self.ids, self.draws, self.located = ids, draws, located
        self.kept: dict[str, Rows] = {}
        self.lengths: np.ndarray | None = None
        """Of the hits, where samples are padded; int64, shape (hits, axes)."""
        self.whole: tuple[int, ...] | None = None
        """Of the batch that they are given out in."""
        self.on_load: Callable[[], None] | None = None
        """Called when the rows are used for the first time."""
        self.is_given = False
        """Whether the batch was given out."""
        self.was_used = False
        self._reading: Future[bool] | bool | None = None
        """Whether its rows were read, or who reads them; None: nobody has begun to."""
        self._prefetcher: Prefetcher | None = None
        """By which it is read when it is asked for, if it was not read beside another one."""
        self._process = os.getpid()
        self._gather: Callable[[Mapping[str, Sequence[int]]], dict[str, Tensor]] | None = None
        """Takes the rows out of a ring, where they lie in one, as large as they are to be."""
        self._rows: dict[str, Tensor] | None = None

    @property
    def alive(self) -> bool:
        """False once the activations became stale, and in a forked child, which cannot read."""
        is_right = not self.view.is_void or (self.is_given and self.view.is_outdated)
        return is_right and self._process == os.getpid()

    def ready(self) -> bool:
        """Wait until the rows are there. False if they could not be read, or became stale."""
        if not self.alive:
            return False  # a forked child has no reader that would ever answer
        if self._rows is not None:
            return True
        try:
            if self._reading is None and self._prefetcher is not None:
                self._reading = self._prefetcher.read_now(self)
            reading = self._reading
            is_read = reading.result(READ_TIMEOUT_S) if isinstance(reading, Future) else reading
            return bool(is_read) and self.alive
        except Exception as error:
            if not is_beside(error):
                raise
            return False  # a dead reader or a closed cache: the samples are loaded instead

    def load(self) -> dict[str, Tensor]:
        """Return the hits' activations by name, in row order, on the model's device.

        They are the caller's own: the next call returns others.

        Raises:
            LookupError: They became stale, or can no longer be read.
        """
        self.was_used = True
        if not self.alive:
            raise LookupError("the generation was voided")
        rows, self._rows, view = self._rows, None, self.view
        if rows is None:
            rows = self._load_again()
        if view.is_late:  # else they are there
            for name, own in rows.items():
                rows[name] = uploaded(own, view.cut.devices.get(name, view.device))
        if self.whole is not None:  # the batch's, some of which may be no hits
            for name, one in view.growth.items():
                rows[name] = one.padded(rows[name], self.whole)
        if self.on_load is not None:
            self.on_load()
            self.on_load = None
        return rows

    def _load_again(self) -> dict[str, Tensor]:
        if self._gather is not None:
            sizes = self._sizes(self.whole or self.longest)
            with suppress(LookupError):
                return self._gather(sizes)
        # Served before, and perhaps written to by the loop since; or held back for longer than the
        # ring remembers: read again.
        with attempt.without_modes():
            tensors, found = self.view.generation.get_located(
                self.located, pin_memory=pins(self.view.device)
            )
        if not found.all():
            raise LookupError("the rows can no longer be read")
        return _put_together(self.view, tensors, self.longest)

    @property
    def longest(self) -> tuple[int, ...] | None:
        """Of the hits, along each axis; None where samples are not padded."""
        return None if self.lengths is None else tuple(self.lengths.max(0).tolist())

    def _sizes(self, whole: tuple[int, ...] | None) -> dict[str, list[int]]:
        """Return how large padded tensors are in a batch of these lengths.

        Raises:
            LookupError: That is not known.
        """
        return {name: one.sizes(whole or ()) for name, one in self.view.growth.items()}


class Prefetcher:
    """Reads planned batches for one pass over a loader; the rings they lie in outlive it."""

    def __init__(self, readers: ReaderThreads | None, ring_batches: int, pin_memory: bool) -> None:
        """Prefetch by threads.

        Args:
            readers: None: nothing is ever read.
            ring_batches: How many are read ahead, and how many that were used stay on the device.
            pin_memory: Whether the loop wants its batches in page-locked memory.
        """
        self.window = ring_batches
        """How many batches ahead of the one to be yielded are read."""
        self._readers = readers
        self._pin_memory = pin_memory
        self._first = next(_passes) << 40
        """Number of this pass's first batch in a ring: later than all of the passes before."""
        self._closed = False
        self.has_waited = False
        """Whether something was not in memory: from then on all is read ahead."""
        self.rings: set[Ring] = set()
        """That this pass reads from."""
        self._deferred: deque[PlannedEntry] = deque()
        """What the training thread is to read, in its order."""

    def start(self, entry: PlannedEntry) -> None:
        """Begin to read an entry's rows; returns at once."""
        if self._closed or self._readers is None:
            return
        is_short = entry.num_hits * entry.view.cut.row_bytes <= SHORT_BYTES
        if is_short and not self.has_waited and not entry.view.has_ring:
            entry._prefetcher = self
            self._deferred.append(entry)
            return
        with suppress(RuntimeError):  # the cache was closed: the entry never gets ready
            entry._reading = self._readers.submit(self.read, entry)

    def read_now(self, entry: PlannedEntry) -> Future[bool] | bool:
        """Read an entry's rows in the calling thread; whether they are there.

        What is not in memory is a reader's all the same: a disk may take its time, and hang.
        """
        try:
            with attempt.without_modes():
                return not self._closed and self._read_together(entry, in_memory=True)
        except NotInMemoryError:
            assert self._readers is not None
            self.has_waited = True
            return self._readers.submit(self.read, entry)

    def release_before(self, number: int) -> None:
        """Batches before `number` were used; the most recent ones stay resident."""
        for ring in list(self.rings):  # readers add to it
            ring.release_before(self._first + number - self.window)

    def close(self) -> None:
        """Stop reading ahead. What is on the device stays there for the next pass."""
        self._closed = True
        self._deferred.clear()
        for ring in list(self.rings):
            ring.release_before(self._first + (1 << 40))
        self.rings.clear()

    def read(self, entry: PlannedEntry) -> bool:
        """Read an entry's rows; whether they are there."""
        if self._closed or not entry.alive:
            return False
        view = entry.view
        if not view.has_ring:
            return self._read_together(entry)
        samples = numbered(entry.ids, view.generation.num_expected)
        ring, number = self._ring_of(view), self._first + entry.number
        if samples is None or not view.has_ring:
            return self._read_together(entry)
        new = np.arange(len(samples))
        if ring is not None:
            new = ring.adopt(number, samples, entry.draws)
        tensors: dict[str, Any] = {}
        if len(new):
            located = entry.located[new]
            tensors, found = view.generation.get_located(located, pin_memory=pins(view.device))
            if not found.all():
                return False
        rows = _put_together(view, tensors, None)
        ring = self._ring_for(entry, rows) if rows else ring
        if ring is not None:
            rest = {name: v for name, v in tensors.items() if not name.startswith(ACTIVATION)}
            for name, one in view.growth.items() if rest else ():
                sizes = [[row.shape[d] for d, _ in one.dims] for row in tensors[ACTIVATION + name]]
                rest[SIZES + name] = torch.tensor(sizes)
            if ring.insert(number, samples[new], entry.draws[new], rows, rest):
                self.rings.add(ring)
                with suppress(LookupError):  # it was closed meanwhile, or lengths are not known
                    self._place(entry, ring, samples)
                    return True
        return self._read_together(entry)  # no room in the ring

    def _place(self, entry: PlannedEntry, ring: Ring, samples: np.ndarray) -> None:
        """Have an entry's rows gathered from a ring, in which they are.

        Raises:
            LookupError: They cannot be.
        """
        place = ring.place(samples, entry.draws)
        self._keep(entry, place.kept)
        for name, sizes in entry._sizes(entry.longest).items():
            if (torch.as_tensor(place.kept[SIZES + name]) > torch.tensor(sizes)).any():
                raise LookupError("a row is larger than is known to be right")
        entry._gather = partial(ring.gather, place)

    def _read_together(self, first: PlannedEntry, *, in_memory: bool = False) -> bool:
        """Read a batch's rows, and keep them with it; whether they are there. With them go those of
        the deferred ones behind it where they wait for no disk.
        """
        view, entries, num_rows = first.view, [first], first.num_hits
        located = [first.located]
        waiting = self._deferred if in_memory else deque[PlannedEntry]()
        while waiting and waiting[0].number <= first.number:
            waiting.popleft()
        while waiting and waiting[0].view is view:
            num_rows += waiting[0].num_hits
            if num_rows * view.cut.row_bytes > TOGETHER_BYTES:
                break
            entries.append(waiting.popleft())
            located.append(entries[-1].located)
        tensors, found = view.generation.get_located(
            np.concatenate(located), pin_memory=pins(view.device), in_memory=in_memory
        )
        start = 0
        for entry in entries:
            stop = start + entry.num_hits
            is_read = bool(found[start:stop].all())
            if is_read:
                own = dict(tensors)
                for name, rows in tensors.items() if len(entries) > 1 else ():
                    part = own[name] = rows[start:stop]
                    if isinstance(part, Tensor):  # what is written to it is so to no others
                        is_aligned = part.data_ptr() % ALIGNMENT == 0
                        own[name] = part.data if is_aligned else part.clone()
                entry._rows = _put_together(view, own, self._keep(entry, own))
            entry._reading = is_read
            start = stop
        return bool(first._reading)

    def _keep(self, entry: PlannedEntry, found: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Note what records have beside the activations; return how long the longest is."""
        padding, longest = entry.view.padding, None
        if padding is not None:
            entry.lengths = found[LENGTHS].numpy().astype(np.int64)
            longest = entry.longest
        for path, kind in entry.view.kept.items():
            rows = found[KEPT + path]
            if padding is not None and longest is not None and path in padding.values:
                rows = padding.padded(path, rows, longest)
            elif not isinstance(rows, Tensor):
                rows = _column(kind, rows)
            is_pinned = self._pin_memory and isinstance(rows, Tensor)
            entry.kept[path] = pinned(rows, entry.view.device) if is_pinned else rows
        return longest

    def _ring_of(self, view: View) -> Ring | None:
        """Return a view's ring, if there is one, and training does not need its memory."""
        ring, now = view.ring, time.monotonic()
        if ring is not None and now >= view.room_looked_at + ROOM_EVERY_S:
            view.room_looked_at = now
            if room(view.device) == 0:
                logger.info("%s is nearly full: rows come with their batches", view.device)
                ring.close()
        if ring is not None and ring.is_closed and ring is view.ring:
            view.has_ring = False
        return ring

    def _ring_for(self, entry: PlannedEntry, rows: dict[str, Any]) -> Ring | None:
        """Return this view's ring: made on first use, and anew for longer rows than fit in there.

        None where rows differ in shape, or are too long for what is free.
        """
        if not all(isinstance(values, Tensor) for values in rows.values()):
            return None
        view, batch_size = entry.view, len(entry.hit)
        with _lock:
            ring = view.ring
            like = rows if ring is None else ring.longer(rows)
            if like is None or not view.has_ring or view.is_void:
                return ring
            # What is being used, read ahead, and what stays; all samples, where that is little.
            slots = (2 * self.window + 2) * batch_size
            everything = view.generation.num_expected
            row_bytes = max(sum(values[:1].nbytes for values in like.values()), 1)
            if everything * row_bytes <= WHOLE_BYTES:
                slots = max(slots, everything)
            left = room(view.device)
            if left is not None:
                slots = min(slots, (left - everything * TABLE_BYTES) // row_bytes)
            if slots < (self.window + 1) * batch_size:
                view.has_ring = ring is not None
                return None
            padded = {name: (one.dims, one.fill) for name, one in view.growth.items()}
            if ring is not None:
                ring.close()
            try:
                view.ring = Ring(like, slots, everything, view.device, padded)
            except RuntimeError:  # no memory left there: rows come with their batch
                view.has_ring = False
            return view.ring


def _put_together(
    view: View, tensors: Mapping[str, Any], longest: tuple[int, ...] | None
) -> dict[str, Tensor]:
    """Return the activations of records, for a batch of these lengths where they are padded; None:
    no longer than need be.

    Raises:
        LookupError: It is not known how long the activations of such a batch are.
    """
    found, pin = dict[str, Any](), pins(view.device)
    for name, values in tensors.items():
        if name.startswith(ACTIVATION):
            found[name.removeprefix(ACTIVATION)] = values
    for name, one in view.growth.items() if found else ():
        rows = one.padded(found[name], longest, pin_memory=pin)
        found[name] = rows.pin_memory() if pin else rows
    return found


def _column(kind: type, rows: Any) -> Rows:
    """Return the kept values of a batch as its collate function made them."""
    if issubclass(kind, Tensor):
        return torch.stack(tuple(rows))
    return tuple(rows) if kind is tuple else list(rows)


_MOST = 4
"""Readers: each takes a core, and the interpreter, from training as well."""


def _begin() -> None:
    """Called first thing in a reader thread."""
    attempt.compute_on_one_core()
    leave_captures_alone()


class ReaderThreads(ThreadPoolExecutor):
    """Started with the first read; `close` waits for what they are doing.

    At most four, and as many as there are cores, which the ranks of a machine share, without one
    for training.
    """

    def __init__(self) -> None:
        cores, ranks = len(os.sched_getaffinity(0)), os.environ.get("LOCAL_WORLD_SIZE", "")
        cores //= int(ranks) if ranks.isdigit() and int(ranks) else 1
        most = max(1, min(_MOST, cores - 1))
        super().__init__(most, "egeria-read", initializer=_begin)

    def close(self) -> None:
        """Stop; reads that have not begun are dropped. Idempotent."""
        self.shutdown(wait=True, cancel_futures=True)
