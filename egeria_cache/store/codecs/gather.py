"""Pieces of one long buffer -> arrays, for a whole batch at a time. Pure.

One pass of NumPy instead of a loop over records: the GIL is then let go once per batch and not
once per record, and a training thread that wants it waits for neither the copy nor the disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Places", "Scratch", "Source", "copy_parts"]

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
"""Where pieces begin, or how long they are; shape (N,), all within the source."""

_WORD_BYTES = 8
_KEPT_BYTES = 16 * 2**20
"""Scratch for larger records is given back."""


@dataclass(frozen=True, slots=True)
class Source:
    """A buffer, as memory view for slices and as array for passes over many of them."""

    view: memoryview
    data: Bytes

    @classmethod
    def of(cls, buffer: Any) -> Source:
        """Look at any contiguous buffer; nothing is copied."""
        view = memoryview(buffer)
        return cls(view, np.frombuffer(view, np.uint8))

    def slices(self, starts: Places, sizes: Places) -> list[memoryview]:
        """Return the pieces where they lie."""
        view = self.view
        ends = (starts + sizes).tolist()
        return [view[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]

    def rows(self, starts: Places, num_bytes: int) -> Bytes:
        """Copy pieces of one size; shape (N, num_bytes)."""
        if not num_bytes or not len(starts):
            return np.empty((len(starts), num_bytes), np.uint8)
        step = 1 if num_bytes % _WORD_BYTES or (starts % _WORD_BYTES).any() else _WORD_BYTES
        # A window at every place (at every eighth, in words of 8 bytes, if all begin there); NumPy
        # copies one per index, and checks the bounds.
        windows: npt.NDArray[Any] = np.ndarray(
            (max(0, (len(self.data) - num_bytes) // step + 1), num_bytes // step),
            np.uint8 if step == 1 else np.uint64,
            self.data,
            strides=(step, step),
        )
        return windows[starts // step].view(np.uint8)

    def words(self, starts: Places, count: int) -> npt.NDArray[np.uint64]:
        """Read little-endian numbers of 8 bytes from any place; shape (N, count)."""
        return self.rows(starts, _WORD_BYTES * count).view("<u8")


class Scratch:
    """Arrays that one thread uses again for every batch: memory fresh from the system costs a page
    fault per 4 KiB, more than most passes over it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Bytes] = {}

    def array(self, name: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialised array, shape (count,); the next call of this name returns the
        same memory.
        """
        num_bytes = count * np.dtype(dtype).itemsize
        kept = self._arrays.get(name)
        if kept is None or len(kept) < num_bytes:
            kept = np.empty(num_bytes, np.uint8)
            if num_bytes <= _KEPT_BYTES:
                self._arrays[name] = kept
        return kept[:num_bytes].view(dtype)

    def joined(self, name: str, parts: Iterable[Any], sizes: list[int]) -> Bytes:
        """Copy pieces of these sizes one behind the other."""
        whole = self.array(name, sum(sizes), np.uint8)
        copy_parts(parts, sizes, whole)
        return whole


def copy_parts(parts: Iterable[Any], sizes: list[int], out: Bytes) -> None:
    """Fill `out` (1-d) with pieces of these sizes, one behind the other."""
    view, at = out.data, 0
    for part, size in zip(parts, sizes, strict=True):
        view[at : at + size] = part
        at += size
