"""Device-resident ring of the activations of recent and coming mini-batches.

A slab of slots per cached tensor and a hash table sample -> slot, both tensors on the training
device; insert, look-up and eviction are vectorised, and a look-up never makes the host wait for the
device. Eviction is by batch, oldest first, and never takes a batch that is still to be used. The
same code runs on CPU and CUDA; on CUDA, copies run on a side stream and events order the two.

Reader threads insert, the training thread gathers; one lock orders them on the host.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["HashTable", "Ring"]

_EMPTY, _DELETED = -1, -2
_MULTIPLIER = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit integer


class HashTable:
    """Open addressing with linear probing over two device tensors. Keys are ints >= 0, unique.

    One more place than the capacity absorbs the writes of rows that did not win theirs, so that
    every step has a fixed shape.
    """

    def __init__(self, num_entries: int, device: torch.device) -> None:
        """Make room for `num_entries` live entries at a load of at most one quarter."""
        self.capacity = 1 << max(4, (4 * num_entries - 1).bit_length())
        self.device = device
        self._keys = torch.full((self.capacity + 1,), _EMPTY, dtype=torch.int64, device=device)
        self._slots = torch.full_like(self._keys, _EMPTY)
        self._claims = torch.full_like(self._keys, _EMPTY)
        self._num_deleted = 0
        self.max_probe = 0
        """Rounds that reach every entry; a look-up makes exactly so many, without asking back."""

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """Add entries. Keys and slots: int64, shape (N,); no key may be present already.

        Waits for the device once per probing round (readers call this, never the training thread).
        """
        row = torch.arange(len(keys), device=self.device)
        pending = torch.ones(len(keys), dtype=torch.bool, device=self.device)
        nowhere = torch.full_like(keys, self.capacity)
        place, rounds = self._home(keys), 0
        while bool(pending.any()):
            found = self._keys[place]
            free = pending & ((found == _EMPTY) | (found == _DELETED))
            # Rows that want the same place: all write their number, the one that stays has won.
            wanted = torch.where(free, place, nowhere)
            self._claims[wanted] = row
            won = free & (self._claims[wanted] == row)
            target = torch.where(won, place, nowhere)
            self._keys[target] = keys
            self._slots[target] = slots
            self._keys[self.capacity] = _EMPTY
            pending = pending & ~won
            place = (place + 1) & (self.capacity - 1)
            rounds += 1
        self.max_probe = max(self.max_probe, rounds)

    def lookup(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, -1 where absent. Shape (N,), int64. Never synchronises."""
        place = self._find(keys)
        return torch.where(place < self.capacity, self._slots[place], _EMPTY)

    def remove(self, keys: Tensor) -> None:
        """Delete entries; absent keys are ignored."""
        self._keys[self._find(keys)] = _DELETED
        self._keys[self.capacity] = _EMPTY
        self._num_deleted += len(keys)
        if self._num_deleted > self.capacity // 4:
            self._rebuild()

    def _home(self, keys: Tensor) -> Tensor:
        return ((keys * _MULTIPLIER) >> 20) & (self.capacity - 1)

    def _find(self, keys: Tensor) -> Tensor:
        """Return the place of each key; the place past the end where it is absent."""
        place = self._home(keys)
        found = torch.full_like(keys, self.capacity)
        for _ in range(self.max_probe):
            found = torch.where(self._keys[place] == keys, place, found)
            place = (place + 1) & (self.capacity - 1)
        return found

    def _rebuild(self) -> None:
        """Insert the live entries anew, so that deleted places do not lengthen every probe."""
        live = self._keys >= 0
        keys, slots = self._keys[live], self._slots[live]
        self._keys.fill_(_EMPTY)
        self._num_deleted = self.max_probe = 0
        self.insert(keys, slots)


class Ring:
    """Slots for the rows of recent and coming batches, found by sample key.

    Device tensors live in slabs on `device`; `kept` values (labels and the like) stay on the host
    beside them, so that a resident sample needs no second read of its record.
    """

    def __init__(self, rows: Mapping[str, Tensor], num_slots: int, device: torch.device) -> None:
        """Make an empty ring.

        Args:
            rows: One batch of the tensors to be held, by name; only shape and dtype of a row
                are read.
            num_slots: How many samples it can hold.
            device: Where the slabs and the table live.
        """
        self.device = device
        self.num_slots = num_slots
        self.slabs = {
            name: torch.empty((num_slots, *like.shape[1:]), dtype=like.dtype, device=device)
            for name, like in rows.items()
        }
        self._table = HashTable(num_slots, device)
        self._lock = threading.Lock()
        self._free = list(range(num_slots))
        self._slot_of: dict[int, int] = {}
        self._kept: dict[int, tuple[Any, ...]] = {}
        self._owned: OrderedDict[int, set[int]] = OrderedDict()
        self._owner: dict[int, int] = {}
        self._oldest_needed = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: dict[int, Any] = {}
        self._last_gather: Any = None

    def adopt(self, batch: int, keys: Sequence[int]) -> list[bool]:
        """Pin those of `keys` that are resident to `batch`, and say which are."""
        with self._lock:
            self._owned.setdefault(batch, set())
            resident = [self._adopt(batch, key) for key in keys]
            self._mark_ready(batch)
            return resident

    def insert(
        self,
        batch: int,
        keys: Sequence[int],
        rows: Mapping[str, Tensor],
        kept: Sequence[tuple[Any, ...]],
    ) -> bool:
        """Place the rows of `batch`, evicting the oldest batches that are no longer needed.

        Args:
            batch: Its number in the order of the epoch; several calls may serve one batch.
            keys: Unique keys >= 0, one per row.
            rows: The slabs' new rows, by name, shape (N, ...).
            kept: Host values per row.

        Returns:
            False if there is no room left among batches still needed; nothing was placed then.
        """
        with self._lock:
            self._owned.setdefault(batch, set())
            new = [i for i, key in enumerate(keys) if not self._adopt(batch, key)]
            if not self._make_room(len(new), batch):
                return False
            slots = [self._free.pop() for _ in new]
            self._write([keys[i] for i in new], slots, rows, new)
            self._mark_ready(batch)
            for i, slot in zip(new, slots, strict=True):
                self._slot_of[keys[i]], self._kept[keys[i]] = slot, kept[i]
                self._own(batch, keys[i])
            return True

    def kept(self, keys: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return the host values of resident keys."""
        with self._lock:
            return [self._kept[key] for key in keys]

    def gather(self, batch: int, keys: Tensor) -> dict[str, Tensor]:
        """Return the rows of `keys` (int64, on the host) as fresh tensors, in that order.

        Raises:
            LookupError: The batch was evicted, or never came.
        """
        with self._lock:
            if batch not in self._owned:
                raise LookupError(f"batch {batch} is not in the ring")
            if self._stream is None:
                slots = self._table.lookup(keys)
                return {name: slab.index_select(0, slots) for name, slab in self.slabs.items()}
            if not all(key in self._slot_of for key in keys.tolist()):
                raise LookupError(f"a row of batch {batch} is no longer in the ring")
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._ready[batch])
            slots = self._table.lookup(keys.to(self.device, non_blocking=True))
            rows = {name: slab.index_select(0, slots) for name, slab in self.slabs.items()}
            self._last_gather = current.record_event()
            return rows

    def release_before(self, batch: int) -> None:
        """Batches numbered below `batch` may be evicted from now on."""
        with self._lock:
            self._oldest_needed = max(self._oldest_needed, batch)
            for old in [b for b, keys in self._owned.items() if b < batch and not keys]:
                self._evict(old)

    def _adopt(self, batch: int, key: int) -> bool:
        if key not in self._slot_of:
            return False
        # Readers run side by side: a key stays with the latest batch that needs it.
        latest = max(batch, self._owner[key])
        self._owned[self._owner[key]].discard(key)
        self._own(latest, key)
        return True

    def _own(self, batch: int, key: int) -> None:
        self._owned[batch].add(key)
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
        if not keys:
            return
        with self._on_side_stream():
            self._table.remove(torch.tensor(sorted(keys), device=self.device))
        for key in keys:
            self._free.append(self._slot_of.pop(key))
            del self._kept[key], self._owner[key]

    def _write(
        self, keys: list[int], slots: list[int], rows: Mapping[str, Tensor], new: list[int]
    ) -> None:
        if not keys:
            return
        with self._on_side_stream():
            at = torch.tensor(slots, device=self.device)
            for name, slab in self.slabs.items():
                values = rows[name]
                if len(values) != len(new):
                    values = values[torch.tensor(new)]
                slab.index_copy_(0, at, values.to(self.device, non_blocking=True))
            self._table.insert(torch.tensor(keys, device=self.device), at)

    def _mark_ready(self, batch: int) -> None:
        # The side stream runs in order: one event after this batch's work covers what it adopted.
        if self._stream is not None:
            self._ready[batch] = self._stream.record_event()

    def _on_side_stream(self) -> Any:
        if self._stream is None:
            return _NOTHING
        if self._last_gather is not None:
            # A slot may be written again only when the last gather has read it.
            self._stream.wait_event(self._last_gather)
        return torch.cuda.stream(self._stream)


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()
