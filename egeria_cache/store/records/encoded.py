"""Records as they will lie in the segment: few long buffers, each record at a multiple of 8.

A batch is written as one buffer, not as one for each record: the calls are few, and so are the
passes over the samples in Python. A buffer is filled when it is written, and no sooner: the same
memory then serves for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGNMENT", "Arena", "Buffer", "Encoded", "aligned"]

ALIGNMENT = 8
Buffer = Callable[[], memoryview]
"""Returns records, each followed by zeros up to the next multiple of 8. What it returned is good
until another buffer of the same arena is asked for."""


def aligned(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Keys and records, in order."""

    keys: Sequence[bytes]
    buffers: Sequence[Buffer]
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
        content = memoryview(b"".join(pieces))
        return cls.one_behind_the_other(keys, lambda: content, np.array(sizes, np.int64))

    @classmethod
    def one_behind_the_other(
        cls, keys: Sequence[bytes], buffer: Buffer, sizes: npt.NDArray[np.int64]
    ) -> Encoded:
        """Describe records that lie in one buffer."""
        room = aligned_sizes(sizes)
        return cls(keys, (buffer,), np.zeros(len(sizes), np.int64), np.cumsum(room) - room, sizes)

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
        """Yield key and record; the record is good until one of another buffer comes."""
        keys = iter(self.keys)
        for which, (first, last) in self._spans():
            content = self.buffers[which]()
            places = zip(
                self.starts[first:last].tolist(), self.sizes[first:last].tolist(), strict=True
            )
            for start, size in places:
                yield next(keys), content[start : start + size]

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

    def pieces(self) -> Iterator[list[memoryview]]:
        """Yield the records as the fewest pieces of memory, buffer by buffer; each is to be used
        before the next one is asked for.
        """
        ends = self.starts + self.room
        for which, (first, last) in self._spans():
            content = self.buffers[which]()
            breaks = self.starts[first + 1 : last] != ends[first : last - 1]
            firsts = [first, *(first + 1 + np.flatnonzero(breaks)).tolist(), last]
            yield [
                content[self.starts[one] : ends[following - 1]]
                for one, following in itertools.pairwise(firsts)
            ]

    def _spans(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield each buffer's number, and the first and behind the last of its records."""
        if len(self):
            changes = (1 + np.flatnonzero(self.which[1:] != self.which[:-1])).tolist()
            for span in itertools.pairwise([0, *changes, len(self)]):
                yield int(self.which[span[0]]), span


class Arena:
    """Memory for one buffer at a time, used again and again. For one thread.

    New memory for each batch is paid for page by page, with more time than copying into it takes.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes, of any content; they are the caller's until the next call."""
        if len(self._memory) < num_bytes:
            self.release()  # before there is more
            self._memory = np.empty(num_bytes, np.uint8)
        return self._memory[:num_bytes]

    def release(self) -> None:
        """Give the memory back."""
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self._memory.nbytes


def aligned_sizes(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the next multiples of the alignment."""
    return (sizes + (ALIGNMENT - 1)) & -ALIGNMENT


def _concatenated(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
