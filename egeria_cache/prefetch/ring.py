"""Rows of recent and coming mini-batches, resident on the training device.

One slab of slots per cached tensor. Which sample lies in which slot is known to the host, which
plans the batches: a table on the device besides would have to be asked, and cost each hit some
kernels and each insertion a wait. Eviction is by batch, oldest first, and never takes a batch that
is still to be used.

Reader threads insert, in a lane beside the training step; the training thread gathers. One lock
orders the two on the host, events order them on the device: a gather follows the copies of its
batch, and a slot is written again only after every gather before.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.device import Event, Lane, mark, pinned, to_device

__all__ = ["Place", "Ring"]

MAX_RUNS = 8
"""Rows that lie in more pieces than this are written and gathered by index, not piece by piece."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a batch lie."""

    batch: int
    keys: Sequence[Hashable]
    slots: Sequence[int]
    runs: Sequence[tuple[int, int]]
    """First slot and the one behind the last, in the order of the rows; none: use the index."""
    index: Tensor | None
    """On the device: int64, shape (N,)."""


class Ring:
    """Slots for the rows of recent and coming batches, found by sample key.

    `kept` values (labels and the like) stay on the host beside them, so that a resident sample
    needs no second read of its record.
    """

    def __init__(self, rows: Mapping[str, Tensor], num_slots: int, device: torch.device) -> None:
        """Make an empty ring.

        Args:
            rows: One batch of the tensors to be held, by name; only shape and dtype of a row
                are read.
            num_slots: How many samples it can hold.
            device: Where the slabs live.
        """
        self.device = device
        self.num_slots = num_slots
        self.slabs = {
            name: torch.empty((num_slots, *like.shape[1:]), dtype=like.dtype, device=device)
            for name, like in rows.items()
        }
        self._lock = threading.Lock()
        self._free = list(reversed(range(num_slots)))
        self._slot_of: dict[Hashable, int] = {}
        self._kept: dict[Hashable, Any] = {}
        self._owned: OrderedDict[int, set[Hashable]] = OrderedDict()
        self._owner: dict[Hashable, int] = {}
        self._oldest_needed = 0
        self._is_closed = False
        self._lane = Lane(device)
        self._lane.follow_current()  # the slabs' memory may have been another's until now
        self._ready: dict[int, Event | None] = {}

    def adopt(self, batch: int, keys: Sequence[Hashable]) -> list[bool]:
        """Pin those of `keys` that are resident to `batch`, and say which are."""
        with self._lock:
            if self._is_closed:
                return [False] * len(keys)
            self._owned.setdefault(batch, set())
            resident = [self._adopt(batch, key) for key in keys]
            self._ready[batch] = self._lane.mark()
            return resident

    def insert(
        self,
        batch: int,
        keys: Sequence[Hashable],
        rows: Mapping[str, Tensor],
        kept: Sequence[Any],
    ) -> bool:
        """Place the rows of `batch`, evicting the oldest batches that are no longer needed.

        Args:
            batch: Its number in the order of use; several calls may serve one batch.
            keys: Unique keys, one per row.
            rows: The slabs' new rows, by name, shape (N, ...), in the host's memory.
            kept: Host values per row.

        Returns:
            False if there is no room left among batches still needed; nothing was placed then.
        """
        with self._lock:
            if self._is_closed:
                return False
            self._owned.setdefault(batch, set())
            new = [i for i, key in enumerate(keys) if not self._adopt(batch, key)]
            if not self._make_room(len(new), batch):
                return False
            slots = sorted(self._free.pop() for _ in new)
            self._write(slots, rows, new)
            # A lane runs in order: one event after this batch's work covers what it adopted.
            self._ready[batch] = self._lane.mark()
            for i, slot in zip(new, slots, strict=True):
                self._slot_of[keys[i]], self._kept[keys[i]] = slot, kept[i]
                self._own(batch, keys[i])
            return True

    def kept(self, keys: Sequence[Hashable]) -> list[Any]:
        """Return the host values of resident keys."""
        with self._lock:
            return [self._kept[key] for key in keys]

    def place(self, batch: int, keys: Sequence[Hashable]) -> Place:
        """Return where the rows of `keys` lie, in that order; repeats are allowed.

        They stay there until batches behind `batch` are released.

        Raises:
            LookupError: One of them is not resident.
        """
        with self._lock:
            slots = [self._slot_of[key] for key in keys]
            runs, index = _runs(slots), None
            if len(runs) > MAX_RUNS:
                runs = []
                host = pinned(torch.tensor(slots, dtype=torch.int64), self.device)
                with self._lane.use():
                    index = to_device(host, self.device)
                self._ready[batch] = self._lane.mark()
                self._lane.held.hold(host, self._ready[batch])
            return Place(batch, keys, slots, runs, index)

    def gather(self, place: Place) -> dict[str, Tensor]:
        """Return the rows as fresh tensors.

        Raises:
            LookupError: The batch was evicted, or the ring closed.
        """
        with self._lock:
            if self._is_closed or place.batch not in self._owned:
                raise LookupError(f"batch {place.batch} is not in the ring")
            if any(map(_differ, map(self._slot_of.get, place.keys), place.slots)):
                raise LookupError(f"a row of batch {place.batch} is no longer in the ring")
            self._lane.lead(self._ready[place.batch])
            rows = {name: _taken(slab, place) for name, slab in self.slabs.items()}
            # Only when it has read them may its slots be written again, or its index be freed.
            done = mark(self.device)
            self._lane.follow(done)
            self._lane.held.hold(place.index, done)
            return rows

    def release_before(self, batch: int) -> None:
        """Batches numbered below `batch` may be evicted from now on."""
        with self._lock:
            self._oldest_needed = max(self._oldest_needed, batch)
            for old in [b for b, keys in self._owned.items() if b < batch and not keys]:
                self._evict(old)

    def close(self) -> None:
        """Serve nothing more, and give the memory back. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lane.rejoin()
            self.slabs = {}
            self._slot_of.clear()
            self._kept.clear()

    def _adopt(self, batch: int, key: Hashable) -> bool:
        if key not in self._slot_of:
            return False
        # Readers run side by side: a key stays with the latest batch that needs it.
        latest = max(batch, self._owner[key])
        self._owned[self._owner[key]].discard(key)
        self._own(latest, key)
        return True

    def _own(self, batch: int, key: Hashable) -> None:
        self._owned.setdefault(batch, set()).add(key)
        self._owner[key] = batch

    def _make_room(self, num_rows: int, batch: int) -> bool:
        evictable = sorted(b for b in self._owned if b < self._oldest_needed and b != batch)
        chosen, room = [], len(self._free)
        for old in evictable:
            if room >= num_rows:
                break
            room += len(self._owned[old])
            chosen.append(old)
        if room < num_rows:
            return False
        for old in chosen:
            self._evict(old)
        return True

    def _evict(self, batch: int) -> None:
        keys = self._owned.pop(batch)
        self._ready.pop(batch, None)
        # Taken again from the lowest on: what lay together is given to one batch again.
        self._free += sorted((self._slot_of.pop(key) for key in keys), reverse=True)
        for key in keys:
            del self._kept[key], self._owner[key]

    def _write(self, slots: list[int], rows: Mapping[str, Tensor], new: list[int]) -> None:
        if not slots:
            return
        runs, held = _runs(slots), []
        with self._lane.use():
            at = None
            if len(runs) > MAX_RUNS:
                held.append(pinned(torch.tensor(slots, dtype=torch.int64), self.device))
                at = to_device(held[-1], self.device)
            for name, slab in self.slabs.items():
                values = rows[name]
                if len(values) != len(new):
                    values = pinned(values[torch.tensor(new)], self.device)
                held.append(values)
                if at is not None:
                    slab.index_copy_(0, at, to_device(values, self.device))
                    continue
                done = 0
                for start, end in runs:
                    to_device(values[done : done + end - start], into=slab[start:end])
                    done += end - start
        self._lane.held.hold(held, self._lane.mark())


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pieces of ascending neighbours that slots consist of."""
    if not slots:
        return []
    numbers = np.asarray(slots)
    ends = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(slots)]
    return [(slots[a], slots[b - 1] + 1) for a, b in itertools.pairwise(ends)]


def _taken(slab: Tensor, place: Place) -> Tensor:
    if place.index is not None:
        return slab.index_select(0, place.index)
    if len(place.runs) == 1:
        return slab[slice(*place.runs[0])].clone()
    return torch.cat([slab[slice(*run)] for run in place.runs])


def _differ(a: int | None, b: int) -> bool:
    return a != b
