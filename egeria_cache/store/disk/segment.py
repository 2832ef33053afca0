"""The file that holds a generation's records, one behind the other; only ever appended to.

It is read by the system: touching a mapping where the disk cannot read, or where the file was cut
short, is a signal; a read that fails is an exception. Only the kernel (`kernel.c`), which handles
that signal, touches the mapping that there is beside.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from egeria_cache.store.disk.own import open_own, same_file
from egeria_cache.store.disk.writeback import begin_writeback
from egeria_cache.store.native import Mapping
from egeria_cache.store.records.encoded import ALIGNMENT, aligned

__all__ = ["ALIGNMENT", "SEGMENT_NAME", "Segment"]

SEGMENT_NAME = "records.bin"
_PER_CALL = 1024
"""Buffers for one call, as the system allows."""
_BYTES_PER_CALL = 2**20
"""For a call of more, Linux looks for memory in pieces of 2 MiB and more, which now and then takes
five times as long as the copy."""


class Segment:
    """Any number of threads read, with the GIL released; one at a time appends."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        flags = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
        self.descriptor = open_own(path, flags)
        weakref.finalize(self, os.close, self.descriptor)
        self.read = functools.partial(os.preadv, self.descriptor)
        """Fills buffers, one behind the other, from a place; returns how many bytes there were."""
        self.mapping: Mapping | None = None
        """What of it lies in the address space; see `map_again`."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.descriptor).st_size

    @property
    def written(self) -> int:
        """When anybody last wrote to it, in nanoseconds of the file system's clock."""
        return os.fstat(self.descriptor).st_mtime_ns

    def map_again(self) -> None:
        """Map what the file has grown to. What was mapped before stays for as long as it is held;
        where nothing can be mapped, there is no mapping.
        """
        if self.mapping is None or self.mapping.num_bytes < self.size:
            try:
                self.mapping = Mapping(self.descriptor)
            except (OSError, ValueError):
                self.mapping = None

    def try_read(self, buffer: Any, place: int) -> int:
        """Fill the buffer; return how many bytes there were: none where the disk cannot read, which
        `record` explains.
        """
        try:
            return self.read((buffer,), place)
        except OSError:
            return 0

    def record(self, place: int, size: int) -> memoryview:
        """Return these bytes; fewer, or none, where the file ends before.

        Raises:
            OSError: The disk cannot read them.
        """
        size = max(min(size, self.size - place), 0)
        record, at = memoryview(bytearray(size)), 0
        while at < size:
            num_bytes = os.preadv(self.descriptor, [record[at:]], place + at)
            if not num_bytes:
                break
            at += num_bytes
        return record[:at]

    def append(self, end: int, pieces: Iterable[Sequence[memoryview]]) -> int:
        """Write pieces of memory behind `end`, flush them to disk, and return where the first
        begins. Each sequence is written before the next one is asked for.

        Whatever lies there was never committed: the tail of a process that was killed.

        Raises:
            OSError: The disk is full, or fails. Whatever is raised, nothing was added.
        """
        begin = at = aligned(end)
        try:
            if begin > end:
                self._write_all([memoryview(bytes(begin - end))], end)
            for together in pieces:
                start = at
                for buffers in _calls(together):
                    at += self._write_all(buffers, at)
                begin_writeback(self.descriptor, start, at - start)
            os.fdatasync(self.descriptor)
        except BaseException:
            self.cut(end)
            raise
        return begin

    def cut(self, end: int) -> None:
        """Give back what was written behind the end in vain."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, end)

    def is_at(self, directory: Path) -> bool:
        """Tell whether this very file still lies in its place."""
        return same_file(self.descriptor, directory / SEGMENT_NAME)

    def _write_all(self, buffers: Sequence[memoryview], at: int) -> int:
        """Write despite short writes; return how many bytes."""
        total = sum(map(len, buffers))
        done = os.pwritev(self.descriptor, buffers, at)
        if done < total:
            rest = memoryview(b"".join(buffers))
            while done < total:
                written = os.pwrite(self.descriptor, rest[done:], at + done)
                if written == 0:
                    raise OSError("the disk takes no more bytes")
                done += written
        return total


def _calls(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Divide memory into what one call may write."""
    together, room = list[memoryview](), _BYTES_PER_CALL
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            piece = buffer[at : at + room]
            together.append(piece)
            at, room = at + len(piece), room - len(piece)
            if not room or len(together) == _PER_CALL:
                yield together
                together, room = [], _BYTES_PER_CALL
    if together:
        yield together
