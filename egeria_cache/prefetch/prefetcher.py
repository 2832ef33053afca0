"""From the plan to the rows: activations are read, verified and placed ahead of their need.

Reading happens on the cache's reader threads; what is handed to the training thread is an `Entry`
that either has its rows or says that it has not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.batch import PerSample, Rows, SampleId
from egeria_cache.prefetch.ring import Ring
from egeria_cache.prefetch.view import ACTIVATION, KEPT, LENGTHS, View

__all__ = ["PlannedEntry", "Prefetcher", "needs_ring"]

READ_TIMEOUT_S = 60.0
"""A read that takes longer is given up; its samples are loaded from the dataset instead."""


class PlannedEntry:
    """Hits of one planned batch: where they enter the model, and their rows once read."""

    def __init__(self, view: View, number: int, ids: Sequence[SampleId], variant: int,
                 hit: np.ndarray) -> None:  # fmt: skip
        """Plan to serve the masked rows of batch `number` from `view`."""
        self.view, self.number, self.variant, self.hit = view, number, variant, hit
        self.ids = [sample_id for sample_id, is_hit in zip(ids, hit, strict=True) if is_hit]
        self.weight = 1.0
        """How much there is to read, where a batch of ordinary size is one."""
        self.kept: dict[str, Rows] = {}
        self.lengths: np.ndarray | None = None
        """Of the hits, where samples are padded; int64, shape (hits, axes)."""
        self.whole: tuple[int, ...] | None = None
        """Of the batch that they are given out in."""
        self.on_load: Callable[[], None] | None = None
        """Called when the rows are used for the first time."""
        self.was_used = False
        self.read_s, self.num_read, self.waited_s = 0.0, 0, 0.0
        """What reading cost a reader thread, for how many samples, and the training thread."""
        self._reading: Future[bool] | None = None
        self._process = os.getpid()
        self._ring: Ring | None = None
        self._keys: Tensor | None = None
        self._rows: dict[str, Tensor] | None = None

    @property
    def cut(self) -> Any:
        """The cut at which the hits enter."""
        return self.view.cut

    @property
    def alive(self) -> bool:
        """False once the activations became stale, and in a forked child, which cannot read."""
        return not self.view.is_void and self._process == os.getpid()

    def ready(self) -> bool:
        """Wait until the rows are there. False if they could not be read, or became stale."""
        if self._reading is None or self._process != os.getpid():
            return False  # a forked child has no reader that would ever answer
        started = time.perf_counter()
        try:
            return self._reading.result(timeout=READ_TIMEOUT_S) and self.alive
        except Exception:  # a dead reader or a closed cache: the samples are loaded instead
            return False
        finally:
            self.waited_s += time.perf_counter() - started

    def load(self) -> dict[str, Tensor]:
        """Return the hits' activations by name, in row order, on the model's device.

        They are the caller's own: the next call returns others.

        Raises:
            LookupError: They became stale, or can no longer be read.
        """
        self.was_used = True
        started = time.perf_counter()
        rows = self._load()
        self.waited_s += time.perf_counter() - started
        if self.on_load is not None:
            self.on_load()
            self.on_load = None
        return rows

    def _load(self) -> dict[str, Tensor]:
        if not self.alive:
            raise LookupError("the generation was voided")
        rows, self._rows = self._rows, None
        if rows is not None:
            return self._widened(rows)
        if self._ring is not None:
            assert self._keys is not None
            with suppress(LookupError):
                return self._ring.gather(self.number, self._keys)
        # Served before, and perhaps written to by the loop since; or held back for longer than the
        # ring remembers: read again.
        tensors, found = self.view.generation.get_batch(self.ids, variant=self.variant)
        if not found.all():
            raise LookupError("the rows can no longer be read")
        return self._widened(self._take(tensors))

    def _take(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the activations of records on the model's device, put together where padded.

        Raises:
            LookupError: It is not known how long the activations of such a batch are.
        """
        view, rows = self.view, {}
        for name in _names(tensors):
            values = tensors[ACTIVATION + name]
            if view.padding is not None:
                assert self.lengths is not None
                values = view.cut.padded(name, values, tuple(self.lengths.max(0).tolist()))
            rows[name] = values.to(view.device, non_blocking=True)
        return rows

    def _widened(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rows as long as those of the whole batch, some of which may be no hits."""
        if self.whole is None:
            return rows
        return {name: self.cut.padded(name, values, self.whole) for name, values in rows.items()}


class Prefetcher:
    """Reads planned batches for one pass over a loader, and owns its ring, where there is one."""

    def __init__(self, executor: Executor | None, ring_batches: int, pin_memory: bool) -> None:
        """Prefetch on the threads of `executor`, with a ring of `ring_batches` recent batches."""
        self.window = ring_batches
        """How many batches ahead of the one to be yielded are read."""
        self._executor = executor
        self._pin_memory = pin_memory
        self._rings: dict[View, Ring] = {}
        self._interned: dict[SampleId, int] = {}
        self._numbers = count(1 << 61)
        self._closed = False

    def start(self, entry: PlannedEntry) -> None:
        """Begin to read an entry's rows; returns at once."""
        if entry._reading is None and not self._closed and self._executor is not None:
            try:
                entry._reading = self._executor.submit(self._read, entry)
            except RuntimeError:  # the cache was closed: the entry never gets ready
                self._closed = True

    def release_before(self, number: int) -> None:
        """Batches before `number` were used; the most recent ones stay resident."""
        for ring in list(self._rings.values()):  # readers add to it
            ring.release_before(number - self.window)

    def close(self) -> None:
        """Stop reading ahead, and forget the ring."""
        self._closed = True
        self._rings.clear()

    def _read(self, entry: PlannedEntry) -> bool:
        if self._closed or not entry.alive:
            return False
        if not needs_ring(entry.view.device) or entry.view.padding is not None:
            return self._read_whole(entry)  # nor has the ring slots of many sizes
        keys = [self._key(sample_id) for sample_id in entry.ids]
        first_at = {key: i for i, key in reversed(list(enumerate(keys)))}
        unique, ids = list(first_at), [entry.ids[i] for i in first_at.values()]
        ring = self._rings.get(entry.view)
        resident = [False] * len(unique) if ring is None else ring.adopt(entry.number, unique)
        wanted = [i for i, there in enumerate(resident) if not there]
        tensors: dict[str, Any] = {}
        if wanted:
            started = time.perf_counter()
            tensors, found = entry.view.generation.get_batch(
                [ids[i] for i in wanted], variant=entry.variant, pin_memory=self._pin_memory
            )
            entry.read_s, entry.num_read = time.perf_counter() - started, len(wanted)
            if not found.all():
                return False
        kept = _kept_rows(tensors, entry.view.kept, len(wanted))
        rows = {name: tensors[ACTIVATION + name] for name in _names(tensors)}
        if ring is None:
            ring = self._ring_for(entry, rows)
        new_keys = [unique[i] for i in wanted]
        if ring is not None and ring.insert(entry.number, new_keys, rows, kept):
            entry._ring = ring
            entry._keys = torch.tensor(keys, dtype=torch.int64)
            if self._pin_memory:
                entry._keys = entry._keys.pin_memory()
            entry.kept = _stack_kept(ring.kept(keys), entry.view.kept)
            return True
        return self._read_whole(entry)  # no room in the ring

    def _read_whole(self, entry: PlannedEntry) -> bool:
        """Read all rows, and keep them with the batch itself."""
        started = time.perf_counter()
        tensors, found = entry.view.generation.get_batch(entry.ids, variant=entry.variant)
        entry.read_s += time.perf_counter() - started
        entry.num_read += len(entry.ids)
        if not found.all():
            return False
        padding, longest = entry.view.padding, ()
        if padding is not None:
            entry.lengths = tensors[LENGTHS].numpy().astype(np.int64)
            longest = tuple(entry.lengths.max(0).tolist())
        entry._rows = entry._take(tensors)
        entry.kept = {
            path: _column(kind, tensors[KEPT + path])
            if padding is None or path not in padding.values
            else padding.padded(path, tensors[KEPT + path], longest)
            for path, kind in entry.view.kept.items()
        }
        return True

    def _ring_for(self, entry: PlannedEntry, rows: dict[str, Any]) -> Ring | None:
        """Return this view's ring, made on first use; None where rows differ in shape."""
        if not all(isinstance(values, Tensor) for values in rows.values()):
            return None
        slots = (2 * self.window + 2) * len(entry.hit)
        return self._rings.setdefault(entry.view, Ring(rows, slots, entry.view.device))

    def _key(self, sample_id: SampleId) -> int:
        if isinstance(sample_id, int) and 0 <= sample_id < 1 << 61:
            return sample_id
        # Readers run side by side: a number drawn twice would give one sample another's rows.
        return self._interned.setdefault(sample_id, next(self._numbers))


def needs_ring(device: torch.device) -> bool:
    """Whether rows are gathered from a ring on the device.

    It spares the copy to the device for rows that are still there. On the host it would copy each
    row twice more, and take the interpreter from training: a reader's time for 64 records of 9 KiB
    goes from 2.3 to 1.5 ms without it, and the training thread's 0.2 ms a batch go to nothing.
    """
    return device.type != "cpu"


def _names(tensors: Mapping[str, Any]) -> list[str]:
    return [name[len(ACTIVATION) :] for name in tensors if name.startswith(ACTIVATION)]


def _kept_rows(
    tensors: dict[str, Any], kept: Mapping[str, type], num_rows: int
) -> list[tuple[Any, ...]]:
    """Return one tuple of kept values per row."""
    columns = [tensors[KEPT + path] for path in kept] if num_rows else []
    return list(zip(*columns, strict=True)) if columns else [()] * num_rows


def _stack_kept(rows: list[tuple[Any, ...]], kept: Mapping[str, type]) -> dict[str, Rows]:
    """Undo `_kept_rows` for the rows of one batch."""
    columns = zip(*rows, strict=True)
    return {
        path: _column(kind, column)
        for (path, kind), column in zip(kept.items(), columns, strict=False)
    }


def _column(kind: type, rows: Any) -> Rows:
    """Return the kept values of a batch as its collate function made them."""
    if kind is PerSample:
        return PerSample(rows)
    if isinstance(rows, Tensor):
        return rows
    if issubclass(kind, Tensor):
        return torch.stack(tuple(rows))
    return tuple(rows) if kind is tuple else list(rows)
