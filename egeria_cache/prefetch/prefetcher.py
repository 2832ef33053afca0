"""From the plan to the rows: activations are read, verified and placed ahead of their need.

What the training thread is handed is an `Entry` that either has its rows or says that it has not.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.attempt import is_beside
from egeria_cache.batch import Rows, SampleId
from egeria_cache.device import Held, mark, pinned, room, to_device
from egeria_cache.prefetch.readers import Deferred, ReaderThreads
from egeria_cache.prefetch.ring import Place, Resident, Staged, numbers_of, ring_of
from egeria_cache.prefetch.view import ACTIVATION, KEPT, LENGTHS, View
from egeria_cache.store import Located
from egeria_cache.threads import without_modes

logger = logging.getLogger("egeria_cache.prefetch")

WHOLE_BYTES = 64 * 2**20
"""All samples of a loader stay on the device where they take no more: from the second pass on
nothing is read, or copied there (docs/device.md has the figures)."""
SHORT_BYTES = 2**20
"""A batch that takes no more is read by the training thread itself. Beside training a reader takes
a multiple of the time, and both wait for the interpreter: on two cores 10 records of 16 KiB that
training reads itself cost it 0.3 ms, and those of a reader 0.8; with 48 it is 0.4 ms and 1.2."""
ROOM_EVERY_S = 1.0
"""So often it is asked whether training needs the device's memory; that takes some 0.2 ms."""
READ_TIMEOUT_S = 60.0
"""A read that takes longer is given up; its samples are loaded from the dataset instead."""

_held, _lock = Held(), threading.Lock()


class PlannedEntry:
    """Hits of one planned batch: where they enter the model, and their rows once read."""

    def __init__(self, view: View, number: int, ids: Sequence[SampleId],
                 draws: np.ndarray, located: Located) -> None:  # fmt: skip
        """Plan to serve what there is of batch `number` from `view`."""
        self.view, self.number, self.hit = view, number, located.found
        self.cut = view.cut
        """The cut at which the hits enter."""
        hit = self.hit
        self.num_hits = int(np.count_nonzero(hit))
        self.num_misses = len(hit) - self.num_hits
        self.serves_most = self.num_hits >= self.num_misses
        """Whether at least half of the batch are hits."""
        self.ids = ids if not self.num_misses else list(compress(ids, hit))
        self.draws = draws if not self.num_misses else draws[hit]
        self.located = located if not self.num_misses else located.only(hit)
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
        self._reading: Future[bool] | Deferred | None = None
        self._process = os.getpid()
        self._rows: dict[str, Tensor] | None = None
        """Read, on the host."""
        self._staged: Staged | None = None
        """Read, and on the device."""
        self._resident: tuple[Resident, Place] | None = None
        """Where they are on the device, and stay."""

    @property
    def alive(self) -> bool:
        """False once the activations became stale, and in a forked child, which cannot read."""
        is_right = not self.view.is_void or (self.is_given and self.view.is_outdated)
        return is_right and self._process == os.getpid()

    def ready(self) -> bool:
        """Wait until the rows are there. False if they could not be read, or became stale."""
        if self._reading is None or self._process != os.getpid():
            return False  # a forked child has no reader that would ever answer
        try:
            return self._reading.result(timeout=READ_TIMEOUT_S) and self.alive
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
        rows = self._load()
        if self.on_load is not None:
            self.on_load()
            self.on_load = None
        return rows

    def _load(self) -> dict[str, Tensor]:
        if not self.alive:
            raise LookupError("the generation was voided")
        rows, self._rows = self._rows, None
        staged, self._staged = self._staged, None
        if rows is not None:
            rows = _on_device(rows, self.view) if self.view.is_late else rows
            return rows if self.whole is None else self._widened(rows, self.whole)
        if staged is not None:
            rows = ring_of(self.view.device).take(staged)
            return rows if self.whole is None else self._widened(rows, self.whole)
        if self._resident is not None:
            resident, place = self._resident
            with suppress(LookupError):
                return resident.gather(place)
        # Served before, and perhaps written to by the loop since, or drawn anew there: read again.
        with without_modes():
            tensors, found = self.view.generation.get_located(
                self.located, pin_memory=self.view.is_pinned
            )
        if not found.all():
            raise LookupError("the rows can no longer be read")
        rows = _on_device(_put_together(self.view, tensors, self.longest), self.view)
        return rows if self.whole is None else self._widened(rows, self.whole)

    @property
    def longest(self) -> tuple[int, ...] | None:
        """Of the hits, along each axis; None where samples are not padded."""
        return None if self.lengths is None else tuple(self.lengths.max(0).tolist())

    def _widened(self, rows: dict[str, Tensor], whole: tuple[int, ...]) -> dict[str, Tensor]:
        """Return rows as long as those of the whole batch, some of which may be no hits."""
        return rows | {n: one.padded(rows[n], whole) for n, one in self.view.growth.items()}


class Prefetcher:
    """Reads planned batches for one pass over a loader."""

    def __init__(self, readers: ReaderThreads | None, ring_batches: int, pin_memory: bool) -> None:
        """Prefetch by threads.

        Args:
            readers: None: nothing is ever read.
            ring_batches: How many are read ahead.
            pin_memory: Whether the loop wants its batches in page-locked memory.
        """
        self.window = ring_batches
        """How many batches ahead of the one to be yielded are read."""
        self._readers = readers
        self._pin_memory = pin_memory
        self._closed = False

    def start(self, entry: PlannedEntry) -> None:
        """Begin to read an entry's rows; returns at once."""
        if entry._reading is None and not self._closed and self._readers is not None:
            view, num_bytes = entry.view, entry.num_hits * entry.cut.row_bytes
            is_short = num_bytes <= SHORT_BYTES and not (view.is_late or view.is_ahead)
            try:
                entry._reading = self._readers.read(partial(self._read, entry), is_short=is_short)
            except RuntimeError:  # the cache was closed: the entry never gets ready
                self._closed = True

    def close(self) -> None:
        """Stop reading ahead. What stays on the device is there for the next pass."""
        self._closed = True

    def _read(self, entry: PlannedEntry, in_memory: bool) -> bool:
        """Read an entry's rows; whether they are there.

        Raises:
            NotInMemoryError: `in_memory` is asked for, and not all of it is.
        """
        view = entry.view
        if self._closed or not entry.alive:
            return False
        if view.is_ahead and view.resident is not None and self._find(entry, view.resident):
            return True
        tensors, found = view.generation.get_located(
            entry.located, pin_memory=view.is_pinned, in_memory=in_memory
        )
        if not found.all():
            return False
        longest = self._keep(entry, tensors)
        rows = _put_together(view, tensors, longest)
        if view.is_ahead and self._is_resident(entry, rows, tensors):
            return True
        if view.is_ahead and self._has_room(view, rows):
            with suppress(RuntimeError):  # no memory left there: rows come with their batch
                entry._staged = ring_of(view.device).stage(rows)
                return True
        entry._rows = rows
        return True

    def _find(self, entry: PlannedEntry, resident: Resident) -> bool:
        """Take an entry's rows from those that stay on the device; whether they are there."""
        numbers = numbers_of(entry.ids, max(entry.view.generation.num_expected, 1))
        place = None if numbers is None else resident.place(numbers, entry.draws)
        if place is not None:
            self._keep(entry, place.kept)
            entry._resident = resident, place
        return place is not None

    def _is_resident(
        self, entry: PlannedEntry, rows: dict[str, Tensor], tensors: Mapping[str, Any]
    ) -> bool:
        """Let rows that were read stay on the device, if all of the data set may."""
        view, num_samples = entry.view, max(entry.view.generation.num_expected, 1)
        kept = {name: v for name, v in tensors.items() if not name.startswith(ACTIVATION)}
        if view.padding is not None or not all(
            isinstance(values, Tensor) for values in (*rows.values(), *kept.values())
        ):
            return False
        num_bytes = num_samples * sum(values[:1].nbytes for values in rows.values())
        numbers = numbers_of(entry.ids, num_samples)
        if num_bytes > WHOLE_BYTES or numbers is None:
            return False
        with _lock:
            if view.resident is None and not view.is_void:
                left = room(view.device)
                if left is not None and left < num_bytes:
                    return False
                with suppress(RuntimeError):  # no memory left there
                    view.resident = Resident(ring_of(view.device), rows, kept, num_samples)
            resident = view.resident
        if resident is None:
            return False
        resident.insert(numbers, entry.draws, rows, kept)
        return self._find(entry, resident)

    def _has_room(self, view: View, rows: Mapping[str, Tensor]) -> bool:
        """Whether training leaves memory on the device for the batches that are read ahead."""
        now = time.monotonic()
        if now >= view.room_looked_at + ROOM_EVERY_S:
            view.room_looked_at, left = now, room(view.device)
            num_bytes = sum(values.nbytes for values in rows.values())
            had_room = view.has_room
            view.has_room = left is None or left >= (self.window + 1) * num_bytes
            if had_room and not view.has_room:
                logger.info("%s is nearly full: rows come with their batches", view.device)
        return view.has_room

    def _keep(self, entry: PlannedEntry, found: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Note what records have beside the activations; return `entry.longest`."""
        view, padding, longest = entry.view, entry.view.padding, None
        if padding is not None:
            entry.lengths = found[LENGTHS].numpy().astype(np.int64)
            longest = entry.longest
        kept: dict[str, Rows] = {}
        for path, kind in view.kept.items():
            if padding is not None and longest is not None and path in padding.values:
                rows: Rows = padding.padded(path, found[KEPT + path], longest)
            else:
                rows = _column(kind, found[KEPT + path])
            pins = self._pin_memory and view.is_pinned and isinstance(rows, Tensor)
            kept[path] = pinned(rows, view.device) if pins else rows  # type: ignore[arg-type]
        entry.kept = kept
        return longest


def _put_together(
    view: View, tensors: Mapping[str, Any], longest: tuple[int, ...] | None
) -> dict[str, Tensor]:
    """Return the activations of records, for a batch of these lengths where they are padded.

    Raises:
        LookupError: It is not known how long the activations of such a batch are.
    """
    prefix = len(ACTIVATION)
    found = {name[prefix:]: v for name, v in tensors.items() if name.startswith(ACTIVATION)}
    for name, one in view.growth.items() if view.padding is not None and found else ():
        rows = one.padded(found[name], longest, pin_memory=view.is_pinned)
        found[name] = rows.pin_memory() if view.is_pinned else rows
    return found


def _on_device(rows: dict[str, Tensor], view: View) -> dict[str, Tensor]:
    """Copy rows that came with their batch, among the training step's own work."""
    if not view.is_late:  # they are there
        return rows
    there = {name: to_device(values, view.device_for(name)) for name, values in rows.items()}
    with _lock:
        for name, values in rows.items():
            _held.hold(values, mark(view.device_for(name)))
    return there


def _column(kind: type, rows: Any) -> Rows:
    """Return the kept values of a batch as its collate function made them."""
    if isinstance(rows, Tensor):
        return rows
    if issubclass(kind, Tensor):
        return torch.stack(tuple(rows))
    return tuple(rows) if kind is tuple else list(rows)
