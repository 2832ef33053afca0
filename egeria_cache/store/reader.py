"""A batch of samples -> one contiguous tensor per name; every record is verified.

One view of what is committed, one look-up of all keys, and one call of the kernel that reads,
verifies and decodes every row to where it belongs. Where records are ragged, hold texts or numbers,
or there is no kernel: a plain loop.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.store import codecs
from egeria_cache.store.disk.files import Located, View
from egeria_cache.store.record import Layout, RecordError, decode_key

Column = Tensor | list[Any]
MAPPED_BYTES = 1 << 17
"""From here on malloc may map memory anew, whose first touches cost three times the copy: of what
PyTorch asks for, aligned, every third batch of 2 MiB; hardly ever for NumPy, which asks for huge
pages besides, from 4 MiB on."""
LARGE_BYTES = 1 << 20
"""Decoded: from here on a second thread helps to read a batch, where a core was mostly idle in the
last minute. Beside others on all cores it would make a read of 2 ms one of 6."""


class NotInMemoryError(Exception):
    """A batch was to be read without waiting for a disk."""


class Fetched:
    """What is read for one batch of B samples: those that are stored and intact.

    Args:
        view: Of what is committed now.
        located: Where the samples were, shape (B,).
        pin_memory: Decode into page-locked memory.
        waits: For a disk.
    """

    def __init__(self, view: View, located: Located, pin_memory: bool, *, waits: bool) -> None:
        self._view, self._pin_memory, self._waits = view, pin_memory, waits
        self._keys: list[bytes] = located["key"].tolist()
        self._entries = located["entry"].copy()
        self.hit = np.zeros(len(located), np.bool_)
        self.fields: dict[str, Column] = {}
        """Full B rows each; empty if nothing at all was found."""
        self.damaged: list[str] = []
        """Of each record that proved damaged just now: which it is, and why."""

    def read(self) -> None:
        """Read all rows that are there.

        Raises:
            NotInMemoryError: This does not wait, and not all of it is.
        """
        layout, sizes = self._view.layout, self._entries["size"]
        if not (self._waits or sizes.all()):
            raise NotInMemoryError
        if layout is None:
            for row in np.flatnonzero(sizes).tolist():
                self._fail(row, "what records hold is lost")
            return
        native, columns = codecs.kernel() if layout.is_plain else None, list[Column]()
        if native is not None:
            columns += self._read_together(native, layout)
        else:
            self._ask_for_all()
            columns += ([None] * len(self._keys) for _ in layout.fields)
        missing: list[int] = [] if self.hit.all() else np.flatnonzero(~self.hit).tolist()
        for row in missing:  # from wherever it is now, or what is wrong with it is noted
            for column, value in zip(columns, self._values(row) or (), strict=False):
                column[row] = value
        for one, column in zip(layout.fields, columns, strict=True) if self.hit.any() else ():
            rows = column if isinstance(column, Tensor) else self._stacked(column)
            self.fields[one.name] = rows
            for row in missing if isinstance(rows, Tensor) else ():
                if not self.hit[row]:
                    rows[row].zero_()  # indices are not taken for every dtype

    def _fail(self, row: int, why: str, *, replaceable: bool = True) -> None:
        """Remember that a record cannot be read, and whether it may be stored again."""
        key, hidden = self._keys[row], self._view.files.hidden
        if why and key not in hidden:
            self.damaged.append(f"the record of sample {decode_key(key)[0]!r} is damaged ({why})")
        hidden[key] = replaceable

    def _read_together(self, native: codecs.Kernel, layout: Layout) -> list[Tensor]:
        """Read rows of tensors of fixed size in one call.

        Raises:
            NotInMemoryError: This does not wait, and not all of it is.
        """
        view, keys, count = self._view, self._keys, len(self._keys)
        columns, described, whole_bytes = list[Tensor](), array("Q"), 0
        for one in layout.fields:
            shape, dtype, num_bytes = (count, *one.shape), one.dtype, count * one.num_bytes
            if one.storage is not None or dtype is None:
                shape, dtype = (count, one.num_bytes), torch.uint8
            if self._pin_memory or num_bytes < MAPPED_BYTES:
                rows = torch.empty(shape, dtype=dtype, pin_memory=self._pin_memory)
            else:
                rows = torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(shape)
            columns.append(rows)
            described.extend((rows.data_ptr(), one.num_bytes, *one.elements))
            whole_bytes += num_bytes
        is_helped = False
        if whole_bytes >= LARGE_BYTES:
            with contextlib.suppress(OSError):  # where it is hidden
                is_helped = len(os.sched_getaffinity(0)) - os.getloadavg()[0] > 0.5
        own, (decode_bytes, room_bytes) = native.own, layout.room
        if len(own.room) < room_bytes << is_helped:
            own.room = np.empty(room_bytes << is_helped, np.uint8)
        found, each_key = np.zeros(count, np.uint8), array("B", b"".join(keys))
        key_bytes = array("H", map(len, keys))
        batch = array("Q", [
            *view.environment.map, view.files.identity ^ layout.seed,
            described.buffer_info()[0], len(columns), self._entries.ctypes.data,
            each_key.buffer_info()[0], key_bytes.buffer_info()[0], found.ctypes.data,
            own.room.ctypes.data, own.context, is_helped and native.helper, decode_bytes,
            room_bytes, native.hash, native.unzstd, self._waits, count, 0,
        ])  # fmt: skip
        native.read(batch.buffer_info()[0])
        for at, one in enumerate(layout.fields):
            if one.storage is not None and one.dtype is not None:
                columns[at] = codecs.unpack(columns[at], one.shape, one.dtype, one.storage)
        self.hit = found == codecs.INTACT
        if self.hit.all():
            return columns
        if not self._waits and (found == codecs.ABSENT).any():
            raise NotInMemoryError  # all are read again, and what is wrong
        for row in np.flatnonzero(found == codecs.UNREADABLE).tolist():
            self._fail(row, "the disk cannot read it", replaceable=False)
            self._entries["size"][row] = 0
        return columns

    def _ask_for_all(self) -> None:
        """Have the disk read what is not in memory.

        Raises:
            NotInMemoryError: This does not wait, and not all of it is.
        """
        descriptor = self._view.descriptor
        for place, size, _ in self._entries[self._entries["size"] > 0].tolist():
            if self._waits:
                with contextlib.suppress(OSError, OverflowError):  # a damaged place
                    os.posix_fadvise(descriptor, place, size, os.POSIX_FADV_WILLNEED)
            elif place and not _is_in_memory(descriptor, place, size):
                raise NotInMemoryError

    def _values(self, row: int) -> list[Any] | None:
        """Return what a record holds; None if there is none, or with the reason noted, if it is not
        intact.
        """
        key = self._keys[row]
        if not self._entries["size"][row]:
            return None
        try:
            found = self._view.record(key, self._entries[row])
            values = [found.value(at) for at in range(len(found.payload))]
            self.hit[row] = True
            return values
        except OSError as error:
            self._fail(row, f"the disk cannot read it: {error.strerror}", replaceable=False)
        except codecs.NeedsKernelError:
            self._fail(row, "")
        except RecordError as error:
            if self._view.located([key])["size"][0]:  # else it was superseded since it was located
                self._fail(row, str(error))
        return None

    def _stacked(self, values: list[Any]) -> Column:
        """Return one tensor if all rows that there are look alike, with zeros where none is."""
        there = list(compress(values, self.hit))
        kinds = {(one.shape, one.dtype) if isinstance(one, Tensor) else None for one in there}
        if len(kinds) != 1 or None in kinds:
            return values
        blank = torch.zeros_like(there[0])
        return torch.stack([blank if one is None else one for one in values])


def _is_in_memory(descriptor: int, place: int, size: int) -> bool:
    with contextlib.suppress(OSError, OverflowError):
        room = bytearray(max(min(size, os.fstat(descriptor).st_size - place), 0))
        return os.preadv(descriptor, [room], place, os.RWF_NOWAIT) == size
    return False
