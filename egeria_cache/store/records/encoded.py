"""Records as they will lie in the segment: few long buffers, each record at a multiple of 8.

A batch is written as one buffer, not as one for each record: the calls are few, and so are the
passes over the samples in Python. Pure, but for the memory that is used again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "Arena", "Encoded", "aligned"]

ALIGNMENT = 8


def aligned(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Keys and records, in order."""

    keys: Sequence[bytes]
    buffers: Sequence[memoryview]
    """Hold all records, each followed by zeros up to the next multiple of 8."""
    which: npt.NDArray[np.int64]
    """The buffer of each record, shape (N,)."""
    starts: npt.NDArray[np.int64]
    """Where in it the record begins, shape (N,)."""
    sizes: npt.NDArray[np.int64]
    """Of the records, shape (N,)."""

    @classmethod
    def of(cls, records: Iterable[tuple[bytes, Iterable[Any]]]) -> Encoded:
        """Copy records into one buffer; each is given with its key and as pieces of bytes."""
        keys, sizes, pieces = [], [], []
        for key, parts in records:
            parts = tuple(parts)
            size = sum(map(len, parts))
            keys.append(key)
            sizes.append(size)
            pieces += [*parts, bytes(-size % ALIGNMENT)]
        return cls.one_behind_the_other(keys, b"".join(pieces), np.array(sizes, np.int64))

    @classmethod
    def one_behind_the_other(
        cls, keys: Sequence[bytes], buffer: Any, sizes: npt.NDArray[np.int64]
    ) -> Encoded:
        """Describe records that lie in one buffer."""
        room = aligned_sizes(sizes)
        which = np.zeros(len(sizes), np.int64)
        return cls(keys, (memoryview(buffer),), which, np.cumsum(room) - room, sizes)

    @classmethod
    def joined(cls, parts: Sequence[Encoded]) -> Encoded:
        """Return the records of all parts."""
        if len(parts) == 1:
            return parts[0]
        firsts = np.cumsum([0, *(len(part.buffers) for part in parts)]).tolist()
        return cls(
            list(itertools.chain.from_iterable(part.keys for part in parts)),
            list(itertools.chain.from_iterable(part.buffers for part in parts)),
            _concatenated([part.which + first for part, first in zip(parts, firsts, strict=False)]),
            _concatenated([part.starts for part in parts]),
            _concatenated([part.sizes for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[bytes, memoryview]]:
        places = zip(self.which.tolist(), self.starts.tolist(), self.sizes.tolist(), strict=True)
        for key, (which, start, size) in zip(self.keys, places, strict=True):
            yield key, self.buffers[which][start : start + size]

    def only(self, wanted: npt.NDArray[np.bool_]) -> Encoded:
        """Return some of the records; copies nothing."""
        if wanted.all():
            return self
        return Encoded(
            list(itertools.compress(self.keys, wanted.tolist())),
            self.buffers,
            self.which[wanted],
            self.starts[wanted],
            self.sizes[wanted],
        )

    @property
    def room(self) -> npt.NDArray[np.int64]:
        """Bytes that each record takes with the zeros behind it, shape (N,)."""
        return aligned_sizes(self.sizes)

    def pieces(self) -> list[memoryview]:
        """Return the records as the fewest pieces of memory, to be written one after another."""
        if not len(self):
            return []
        ends = self.starts + self.room
        breaks = (self.which[1:] != self.which[:-1]) | (self.starts[1:] != ends[:-1])
        firsts = [0, *(1 + np.flatnonzero(breaks)).tolist()]
        lasts = [*(first - 1 for first in firsts[1:]), len(self) - 1]
        return [
            self.buffers[self.which[first]][self.starts[first] : ends[last]]
            for first, last in zip(firsts, lasts, strict=True)
        ]


class Arena:
    """Memory for what is encoded, used again from commit to commit. For one thread.

    New memory for each batch is paid for page by page, with as much time as copying into it takes.
    """

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._num_used = 0

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes, of any content; they are the caller's until `reset`."""
        at, self._num_used = self._num_used, self._num_used + 1
        if at == len(self._chunks):
            self._chunks.append(np.empty(0, np.uint8))
        if len(self._chunks[at]) < num_bytes:
            self._chunks[at] = np.empty(0, np.uint8)  # before there is another
            self._chunks[at] = np.empty(num_bytes, np.uint8)
        return self._chunks[at][:num_bytes]

    def reset(self) -> None:
        """What was taken is no longer needed."""
        self._num_used = 0

    def release(self) -> None:
        """Give the memory back."""
        self._chunks, self._num_used = [], 0

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(chunk.nbytes for chunk in self._chunks)


def aligned_sizes(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the next multiples of the alignment."""
    return (sizes + (ALIGNMENT - 1)) & -ALIGNMENT


def _concatenated(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
