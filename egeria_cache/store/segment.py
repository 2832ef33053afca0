"""The file that holds a generation's records, one behind the other; only ever appended to.

LMDB keeps where each record lies. As LMDB's own values they would fill whole pages: a ninth page
for the 72 bytes that 32 KiB of activation exceed eight by, and half a page lost on each compressed
one; measured 13 to 25 % of the bytes on disk.

Nothing is mapped: touching a mapping where the disk cannot read, or where the file was cut short,
is a signal that kills the process; a read that fails is an exception. To where it is wanted, it is
about as fast.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["SEGMENT_NAME", "Segment"]

SEGMENT_NAME = "records.bin"
ALIGNMENT = 8
_PER_CALL = 1024
"""Buffers for one call, as the system allows."""


class Segment:
    """Any number of threads read, with the GIL released; one at a time appends."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        flags = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    def read(self, buffers: Sequence[Any], place: int) -> int:
        """Fill the buffers, one behind the other; return how many bytes there were: fewer where
        the file ends before, none where the disk cannot read, which `record` explains.
        """
        try:
            return os.preadv(self._descriptor, buffers, place)
        except (OSError, OverflowError):  # of a damaged place
            return 0

    def record(self, place: int, size: int) -> memoryview:
        """Return these bytes; fewer, or none, where the file ends before.

        Raises:
            OSError: The disk cannot read them.
        """
        size = max(min(size, self.size - place), 0)
        record, at = memoryview(bytearray(size)), 0
        while at < size:
            num_bytes = os.preadv(self._descriptor, [record[at:]], place + at)
            if not num_bytes:
                break
            at += num_bytes
        return record[:at]

    def append(self, end: int, buffers: Sequence[Any]) -> list[int]:
        """Write the buffers behind `end`, flush them to disk, and return where each begins.

        Whatever lies there was never committed: the tail of a process that was killed.

        Raises:
            OSError: The disk is full, or fails.
        """
        offsets, pieces, at = [], [], end
        for buffer in buffers:
            gap = -at % ALIGNMENT
            if gap:
                pieces.append(bytes(gap))
            offsets.append(at + gap)
            pieces.append(buffer)
            at += gap + len(buffer)
        remaining, at = iter(pieces), end
        while some := list(itertools.islice(remaining, _PER_CALL)):
            at += self._write_all(some, at)
        os.fdatasync(self._descriptor)
        return offsets

    def close(self) -> None:
        """Close the file; nobody may be reading."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write_all(self, buffers: Sequence[Any], at: int) -> int:
        """Write despite short writes; return how many bytes."""
        total = sum(map(len, buffers))
        done = os.pwritev(self._descriptor, buffers, at)
        if done < total:
            rest = memoryview(b"".join(buffers))
            while done < total:
                written = os.pwrite(self._descriptor, rest[done:], at + done)
                if written == 0:
                    raise OSError("the disk takes no more bytes")
                done += written
        return total
