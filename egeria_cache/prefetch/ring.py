"""Rows of recent and coming mini-batches, resident on the training device.

One slab of slots per cached tensor, and beside them a table, `int32 slot_of[sample]`: so that a
batch is gathered by the numbers of its samples, which lie on the device by then, in two kernels
that need nothing of the host (`Ring.rows`). The host has the same table, plans by it,
and says what may be gathered.

Padded rows lie there as long as the longest that was seen: what is copied is as long as the longest
of its batch, the rest is filled on the device, and a batch is gathered as long as it is.

Reader threads insert, in a lane beside the training step; the training thread gathers. One lock
orders the two on the host, events order them on the device: a gather follows the copies of its
batch, and a slot, or its entry in the table, is written again only after every gather before.

The host's table does all of a batch at once, by arrays: per-sample objects cost 0.7 ms for a batch
of 256. Slots are given out in a circle, so that what is read together lies together, and the oldest
rows go first; never one that a batch still needs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from egeria_cache.batch import SampleId
from egeria_cache.device import Event, Lane, mark, pinned, to_device
from egeria_cache.ragged import Dims, inside, widen

Numbers = npt.NDArray[np.int64]
Slot = npt.NDArray[np.int32]
NOBODY = 0
"""The slot that is never given out: what is resident nowhere lies there."""


def numbered(ids: Sequence[SampleId], num_samples: int) -> Numbers | None:
    """Return sample IDs as numbers in a table, shape (B,); None: not all are."""
    if set(map(type, ids)) != {int}:
        return None
    numbers = np.array(ids)
    is_there = numbers.dtype == np.int64 and numbers.view(np.uint64).max() < num_samples
    return numbers if is_there else None


Column = Tensor | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a batch lie, as long as the stamps of the slots are these."""

    slots: Slot
    stamps: Numbers
    index: Tensor
    """The samples' numbers, on the device: int64, shape (B,)."""
    ready: Event | None
    """When all of it is there."""
    kept: dict[str, Tensor | list[Any]]
    """The host values of the batch."""


class Ring:
    """Slots for the rows of recent and coming batches, found by sample and draw: of each sample one
    random draw is resident, and a newer one takes its place. They are numbered from 1.

    `kept` values (labels and the like) stay on the host beside them, so that a resident sample
    needs no second read of its record.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        num_slots: int,
        num_samples: int,
        device: torch.device,
        padded: Mapping[str, tuple[Dims, Any]] | None = None,
    ) -> None:
        """Make an empty ring.

        Args:
            rows: One batch of the tensors to be held, by name; only shape and dtype of a row
                are read.
            num_slots: How many samples it can hold.
            num_samples: How many there are.
            device: Where the slabs and the table live.
            padded: Of those that are: the padded dimensions of a row, and what stands there.

        Raises:
            RuntimeError: There is no memory left.
        """
        self.device = device
        self.table = torch.zeros(num_samples, dtype=torch.int32, device=device)
        self.slabs = {
            name: torch.empty((num_slots + 1, *like.shape[1:]), dtype=like.dtype, device=device)
            for name, like in rows.items()
        }
        for slab in self.slabs.values():  # whoever asks for what is not there is to notice
            slab[NOBODY].fill_(torch.nan if slab.is_floating_point() else 0)
        self.is_closed = False
        self._padded = padded or {}
        self._lock = threading.RLock()
        self._num_slots = num_slots
        # Zeroed memory is taken page by page, as samples are seen.
        self._slot_of = np.zeros(num_samples, np.int32)
        self._sample_at = np.full(num_slots + 1, -1, np.int64)
        self._draw_at = np.zeros(num_slots + 1, np.int64)
        self._stamp_at = np.zeros(num_slots + 1, np.int64)
        """What changes when a slot is given to other rows, or its sample to another slot."""
        self._needed_by = np.full(num_slots + 1, -1, np.int64)
        self._oldest_needed, self._hand, self._stamp = 0, 0, 0
        self._kept: dict[str, Tensor | dict[int, Any]] = {}
        self._lane = Lane(device)
        self._lane.follow_current()  # the slabs' memory may have been another's until now

    def longer(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return one row as a ring must hold it that has room for these; None: they fit in here.

        A quarter longer than they need: longer ones are to come.
        """
        with self._lock:
            found = {name: slab[:1] for name, slab in self.slabs.items()}
        for name, (dims, _) in self._padded.items() if found else ():
            shape = list(found[name].shape)
            for at in (dim + 1 for dim, _ in dims):
                if rows[name].shape[at] > shape[at]:
                    shape[at] = rows[name].shape[at] * 5 // 4
            if shape != list(found[name].shape):
                found[name] = torch.empty(shape, dtype=rows[name].dtype, device="meta")
        return found if any(row.is_meta for row in found.values()) else None

    def adopt(self, batch: int, samples: Numbers, draws: Numbers) -> Numbers:
        """Keep what is resident of a batch until it was used.

        Returns:
            Positions of the others, each sample once.
        """
        with self._lock:
            slots = self._find(samples, draws)
            # Not this batch's number alone: readers run side by side.
            self._needed_by[slots] = np.maximum(self._needed_by[slots], batch)
        missing = np.flatnonzero(slots == NOBODY)
        if len(missing):
            _, first = np.unique(samples[missing], return_index=True)
            missing = missing[np.sort(first)]
        return missing

    def insert(
        self,
        batch: int,
        samples: Numbers,
        draws: Numbers,
        rows: Mapping[str, Tensor],
        kept: Mapping[str, Column],
    ) -> bool:
        """Place rows of a batch, evicting the oldest that are no longer needed.

        Args:
            batch: Its number in the order of use; several calls may serve one batch.
            samples: The samples' numbers, shape (N,).
            draws: Which random draw of each.
            rows: The slabs' new rows, by name, shape (N, ...), in the host's memory; where padded
                as long as the longest of them.
            kept: Host values, one per row.

        Returns:
            False if there is no room left among batches still needed; nothing was placed then.
        """
        with self._lock:
            placed = None if self.is_closed else self._give(batch, samples, draws)
            if placed is None:
                return False
            new, slots, evicted = placed
            if not len(slots):
                return True
            try:
                for path, values in kept.items():
                    self._keep(path, values, slots, new)
                held: list[Tensor] = []
                with self._lane.use():
                    changed = self._uploaded(np.concatenate((evicted, samples[new])), held)
                    entries = np.full(len(changed), NOBODY, np.int32)
                    entries[len(evicted) :] = slots
                    there = self._uploaded(entries, held)
                    self._write(rows, new, there[len(evicted) :].long(), held)
                    self.table.index_copy_(0, changed, there)
                self._lane.held.hold(held, self._lane.mark())
            except Exception:  # what the slots hold is not what they are said to
                self.close()
                raise
            return True

    def place(self, samples: Numbers, draws: Numbers) -> Place:
        """Return where rows of a batch lie, in that order; repeats are allowed.

        They stay there until batches behind the one that inserted or adopted them are released.

        Raises:
            LookupError: One of them is not resident.
        """
        with self._lock:
            slots = self._find(samples, draws)
            if self.is_closed or not slots.all():
                raise LookupError("not all rows are in the ring")
            held: list[Tensor] = []
            with self._lane.use():
                index = self._uploaded(samples, held)
            ready = self._lane.mark()
            self._lane.held.hold(held, ready)
            at = slots.tolist()
            kept = {
                path: values[at] if isinstance(values, Tensor) else [values[n] for n in at]
                for path, values in self._kept.items()
            }
            return Place(slots, self._stamp_at[slots], index, ready, kept)

    def gather(
        self, place: Place, sizes: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Tensor]:
        """Return the rows as fresh tensors.

        Args:
            place: Where they lie.
            sizes: Of those that are padded, how large they are in this batch; they are smaller
                where no row in here is so large.

        Raises:
            LookupError: One of them was evicted, or the ring closed.
        """
        with self._lock:
            is_there = (self._stamp_at[place.slots] == place.stamps).all()
            if self.is_closed or not is_there:
                raise LookupError("not all rows are in the ring any more")
            self._lane.lead(place.ready)
            rows = self.rows(place.index, sizes)
            # Only when it has read them may its slots be written again, or its index be freed.
            done = mark(self.device)
            self._lane.follow(done)
            self._lane.held.hold(place.index, done)
            return rows

    def rows(
        self, index: Tensor, sizes: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Tensor]:
        """Return the rows of samples, with nothing of the host: this can be captured in a graph.

        A row that is not resident is NaN, or zero where the numbers have no NaN.

        Args:
            index: The samples' numbers, on the device: int64, shape (B,).
            sizes: As for `gather`.
        """
        slots, parts = self.table.index_select(0, index), dict(self.slabs)
        for name, whole in (sizes or {}).items():
            dims, _ = self._padded[name]
            most = [parts[name].shape[dim + 1] for dim, _ in dims]
            parts[name] = inside(parts[name], dims, list(map(min, whole, most)), 1)
        return {name: part.index_select(0, slots) for name, part in parts.items()}

    def release_before(self, batch: int) -> None:
        """Rows that only batches numbered below `batch` need may be evicted from now on."""
        with self._lock:
            self._oldest_needed = max(self._oldest_needed, batch)

    def close(self) -> None:
        """Serve nothing more, and give the memory back. Idempotent."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._lane.rejoin()
                self.table = torch.empty(0, dtype=torch.int32, device=self.device)
                self.slabs, self._kept = {}, {}

    def _find(self, samples: Numbers, draws: Numbers) -> Slot:
        """Return the slots of samples, NOBODY for those that are not resident; shape (B,)."""
        slots = self._slot_of[samples]
        slots *= self._draw_at[slots] == draws
        return slots

    def _give(
        self, batch: int, samples: Numbers, draws: Numbers
    ) -> tuple[Numbers, Numbers, Numbers] | None:
        """Give slots to rows of a batch, each sample once; under the lock.

        What is there by now (another thread has read it, too) is kept as it is.

        Returns:
            Positions of the rows that are not there yet; a slot for each, mostly neighbours; and
            samples that lie nowhere from now on. None, and no change: there is no room.
        """
        new = self.adopt(batch, samples, draws)
        samples, draws = samples[new], draws[new]
        slots = self._take(len(samples))
        if slots is None:
            return None
        before = self._slot_of[samples]  # where other draws of these samples are
        before = before[before != NOBODY]
        self._sample_at[before], self._stamp_at[before], self._needed_by[before] = -1, 0, -1
        evicted = self._sample_at[slots]
        evicted = evicted[evicted >= 0]
        self._slot_of[evicted] = NOBODY
        self._slot_of[samples] = slots
        self._stamp += 1
        self._sample_at[slots], self._draw_at[slots] = samples, draws
        self._stamp_at[slots], self._needed_by[slots] = self._stamp, batch
        return new, slots, evicted

    def _take(self, count: int) -> Numbers | None:
        """Return the next slots in the circle that no batch needs."""
        first, end = self._hand + 1, self._hand + 1 + count
        if end <= self._num_slots + 1 and (self._needed_by[first:end] < self._oldest_needed).all():
            self._hand += count
            return np.arange(first, end)
        ahead = (self._hand + np.arange(self._num_slots)) % self._num_slots + 1
        free = ahead[self._needed_by[ahead] < self._oldest_needed][:count]
        if len(free) < count:
            return None
        self._hand = int(free[-1]) if count else self._hand
        return free

    def _keep(self, path: str, values: Column, slots: Numbers, new: Numbers) -> None:
        """Remember host values, as a tensor of all slots where they are tensors of one shape."""
        table = self._kept.get(path)
        if isinstance(values, Tensor) and not isinstance(table, dict):
            if table is None:
                shape = (self._num_slots + 1, *values.shape[1:])
                table = self._kept[path] = values.new_empty(shape)
            table[torch.from_numpy(slots)] = values[torch.from_numpy(new)]
            return
        if not isinstance(table, dict):
            table = self._kept[path] = {} if table is None else dict(enumerate(table))
        table.update(zip(slots.tolist(), (values[row] for row in new.tolist()), strict=True))

    def _uploaded(self, numbers: npt.NDArray[Any], held: list[Tensor]) -> Tensor:
        """Copy to the device; in the lane."""
        held.append(pinned(torch.from_numpy(numbers), self.device))
        return to_device(held[-1], self.device)

    def _write(
        self, rows: Mapping[str, Tensor], new: Numbers, slots: Tensor, held: list[Tensor]
    ) -> None:
        """Write those rows that are new; in the lane."""
        for name, slab in self.slabs.items():
            values = rows[name]
            if len(new) < len(values):
                values = pinned(values[torch.from_numpy(new)], self.device)
            held.append(values)
            values = to_device(values, self.device)
            if name in self._padded:
                dims, fill = self._padded[name]
                values = widen(values, dims, [slab.shape[dim + 1] for dim, _ in dims], fill)
            slab.index_copy_(0, slots, values)
