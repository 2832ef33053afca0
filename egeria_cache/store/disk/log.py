"""Which sample's record lies where, as a file of commits that is only ever appended to.

A commit is a block with a checksum of its own, which also covers the generation's name and the
block's place: a block from elsewhere, a torn or a damaged one is not a block, and takes no other
with it. Nothing is mapped and no page of it is believed, so that no damage can do more than hide
the samples it lies on. Byte for byte: docs/format.md.

A B-tree (LMDB) stood here before. For one flipped bit, its consistency checks abort the
process, in opening, look-up and writing; and in memory, a look-up is one gather for a whole batch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from egeria_cache.config import PAGE_BYTES
from egeria_cache.store.disk.own import open_own, same_file
from egeria_cache.store.disk.totals import TOTALS_BYTES, Totals

__all__ = ["LOG_NAME", "Commit", "Log", "Spans", "block_bytes", "parse_commit"]

LOG_NAME = "index.bin"
MAGIC = b"EGIX"
WINDOW_BYTES = 8 * 2**20
MAX_BYTES = 2**62
"""No file is as long; what is forged cannot overflow."""
_HEAD = struct.Struct("<Q4sIII")
"""Checksum, magic, number of records, bytes of their keys, bytes of the block."""
_ENTRIES = _HEAD.size + TOTALS_BYTES
_ALIGNMENT = 8

Spans = npt.NDArray[np.uint64]
"""Shape (N, 2): where each record begins in the segment, and its length."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Some records that became visible together."""

    key_bytes: npt.NDArray[np.uint16]
    """Length of each key, shape (N,)."""
    keys: bytes
    """One behind the other."""
    spans: Spans
    totals: Totals
    """Of the generation, this commit included."""


def block_bytes(num_records: int, key_bytes: int) -> int:
    """Return the size of a commit on disk."""
    return _ENTRIES + -(-(18 * num_records + key_bytes) // _ALIGNMENT) * _ALIGNMENT


class Log:
    """One process's view of the file: what it has read of it, and how to add to it.

    Any process reads at any time, without a lock; who writes holds the directory's.
    """

    def __init__(self, path: Path, name: str, *, readonly: bool) -> None:
        flags = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
        self._descriptor = open_own(path, flags)
        weakref.finalize(self, os.close, self._descriptor)
        self._seed = xxhash.xxh3_64_intdigest(name.encode())
        self._seen_bytes = 0
        self.end = 0
        """Behind the last intact block that was read."""
        self._num_skipped = self._num_behind = 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    @property
    def num_damaged(self) -> int:
        """Bytes that belong to no commit, though they are not what a killed process leaves."""
        return self._num_skipped + self._num_behind

    @property
    def has_grown(self) -> bool:
        """Whether there is anything that was not read."""
        return self.size != self._seen_bytes

    def is_at(self, directory: Path) -> bool:
        """Tell whether this very file still lies in its place."""
        return same_file(self._descriptor, directory / LOG_NAME)

    def read_on(self) -> Iterator[Commit]:
        """Yield what was committed since the last call, by any process.

        Raises:
            OSError: The file's size cannot be told. What of it cannot be read is damage.
        """
        size = self.size
        if size == self._seen_bytes:
            return
        self._seen_bytes, self.end = size, min(self.end, -(-size // _ALIGNMENT) * _ALIGNMENT)
        window, at = _Window(self._descriptor, size), self.end
        while at + _ENTRIES <= size:
            block = window.part(at, _HEAD.unpack(window.part(at, _HEAD.size))[-1])
            commit = parse_commit(block, self._seed_at(at))
            if commit is None:
                at = window.next_block(at)
                continue
            self._num_skipped += at - self.end
            at = self.end = at + len(block)
            yield commit
        head = bytes(window.part(self.end, _HEAD.size)).ljust(_HEAD.size, b"\0")
        _, magic, *_, length = _HEAD.unpack(head)
        torn = (magic == MAGIC and length > size - self.end) or not any(head)
        self._num_behind = 0 if torn else size - self.end

    def append(self, keys: Sequence[bytes], spans: Spans, totals: Totals) -> None:
        """Add a commit and flush it to disk. The caller holds the directory's lock, and has read.

        Raises:
            OSError: The disk is full, or fails; nothing was added then.
        """
        key_bytes = np.fromiter(map(len, keys), "<u2", len(keys))
        body = b"".join((totals.pack(), spans.tobytes(), key_bytes.tobytes(), *keys))
        length = block_bytes(len(keys), sum(map(len, keys)))
        head = MAGIC + struct.pack("<III", len(keys), sum(map(len, keys)), length)
        block = (head + body).ljust(length - 8, b"\0")
        block = struct.pack("<Q", xxhash.xxh3_64_intdigest(block, self._seed_at(self.end))) + block
        try:
            # What a process that was killed left behind the end was never visible.
            os.ftruncate(self._descriptor, self.end)
            if os.pwrite(self._descriptor, block, self.end) < length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.end)
            raise
        self.end = self._seen_bytes = self.end + length

    def _seed_at(self, at: int) -> int:
        return (self._seed + at) % 2**64


def parse_commit(block: memoryview, seed: int) -> Commit | None:
    """Return the commit in these bytes; None if it is not intact.

    Args:
        block: A block, as far as its own length can be believed.
        seed: Of its checksum: the hash of the generation's name, and the block's place, added.
    """
    if len(block) < _ENTRIES:
        return None
    checksum, magic, count, key_bytes, length = _HEAD.unpack_from(block)
    if magic != MAGIC or length != len(block) or length != block_bytes(count, key_bytes):
        return None
    if xxhash.xxh3_64_intdigest(block[8:], seed) != checksum:
        return None
    spans = np.frombuffer(block[_ENTRIES : _ENTRIES + 16 * count], "<u8").reshape(-1, 2)
    lengths = _ENTRIES + 16 * count
    keys = lengths + 2 * count
    totals = Totals.parse(block[_HEAD.size : _ENTRIES])
    if (spans > MAX_BYTES).any() or (spans[:, 0] % _ALIGNMENT).any() or totals.end > MAX_BYTES:
        return None
    key_lengths = np.frombuffer(block[lengths:keys], "<u2")
    if int(key_lengths.sum(dtype=np.int64)) != key_bytes:
        return None
    return Commit(key_lengths, bytes(block[keys : keys + key_bytes]), spans, totals)


class _Window:
    """A part of the file in memory, as far as the disk can read it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._begin, self._content = 0, memoryview(b"")

    def part(self, at: int, length: int) -> memoryview:
        """Return `length` bytes from here; fewer where the file ends before."""
        length = min(length, self._size - at)
        if at < self._begin or at + length > self._begin + len(self._content):
            self._begin = at
            self._content = memoryview(self._read(at, max(length, WINDOW_BYTES)))
        return self._content[at - self._begin : at - self._begin + length]

    def next_block(self, at: int) -> int:
        """Return the next place behind `at` where a block may begin; the size if there is none."""
        at += _ALIGNMENT
        while at < self._size:
            part = bytes(self.part(at, min(WINDOW_BYTES, self._size - at)))
            found = part.find(MAGIC, 8)
            while found >= 0 and found % _ALIGNMENT:
                found = part.find(MAGIC, found + 1)
            if found >= 0:
                return at + found - 8
            at += max(len(part) - 8, _ALIGNMENT)
            at -= at % _ALIGNMENT
        return self._size

    def _read(self, at: int, length: int) -> bytes:
        try:
            return os.pread(self._descriptor, length, at)
        except OSError:  # one sector, perhaps: what is around it may be intact
            return b"".join(
                self._read_page(place)
                for place in range(at, min(at + length, self._size), PAGE_BYTES)
            )

    def _read_page(self, at: int) -> bytes:
        try:
            return os.pread(self._descriptor, PAGE_BYTES, at)
        except OSError:
            return bytes(min(PAGE_BYTES, self._size - at))
