"""What `kernel.c` was compiled to, if it was: a batch of records is read without the interpreter.

A plain library, called through `ctypes`, which lets go of the GIL. XXH3 and zstd are those of the
libraries that are there anyway; where one is missing, or nothing could be compiled when Egeria was
installed, `kernel()` is None, and raw and zstd records are read in Python.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import threading
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

LIBRARY_NAME = "_kernel.so"
SWITCH = "EGERIA_NATIVE"
"""Environment variable: "0" leaves the library aside."""

ABSENT, INTACT, DAMAGED, UNREADABLE = range(4)
"""How a record was read: not, since it is not in memory; as it should be; not as it should be; not,
since the disk cannot."""

LARGE_BYTES = 1 << 20
"""Decoded: from here on a second thread helps to read a batch, where a core was mostly idle in the
last minute. Beside others on all cores it would make a read of 2 ms one of 6."""

_local = threading.local()
Bytes = npt.NDArray[np.uint8]


class Kernel:
    """The compiled functions, for arrays. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, xxh3: Any, zstd: ctypes.CDLL) -> None:
        self._hash = ctypes.cast(xxh3, c_void_p).value or 0
        self._unzstd = ctypes.cast(zstd.ZSTD_decompressDCtx, c_void_p).value or 0
        self.zstd = zstd
        self._helper = _declared(zstd.ZSTD_createDCtx, c_void_p)() or 0
        p, n = c_void_p, c_int64
        self._read = _declared(library.egeria_read, None, p)
        self._decode = _declared(library.egeria_decode, c_int, p, c_int, p, n, p, p, n)

    def read(
        self,
        file: tuple[int, int, int],
        seed: int,
        columns: Sequence[tuple[Tensor, int, tuple[int, bool]]],
        entries: npt.NDArray[Any],
        keys: Sequence[bytes],
        *,
        waits: bool,
    ) -> Bytes:
        """Read, verify and decode records; return how each was read, shape (N,).

        Args:
            file: Where it is mapped, how many bytes at most, and its descriptor.
            seed: Of the records' checksums.
            columns: Per field N contiguous rows, their bytes, and what their numbers are.
            entries: Of each record, shape (N,), contiguous.
            keys: Of each record.
            waits: For the disk; else what is not in memory is not read.
        """
        unpacker = self._unpacker()
        found, described = np.zeros(len(entries), np.uint8), array("Q")
        for rows, num_bytes, kind in columns:
            described.extend((rows.data_ptr(), num_bytes, *kind))
        sizes = [num_bytes for _, num_bytes, _ in columns]
        decode_bytes = _room_bytes(max(sizes, default=0))
        room_bytes = decode_bytes + sum(sizes) + _MOST_HEAD_BYTES  # more is none of these records
        is_helped = len(found) * sum(sizes) >= LARGE_BYTES and _num_idle() > 0.5
        key_bytes, each_key = array("H", map(len, keys)), array("B", b"".join(keys))
        batch = array("Q", [
            *file, seed, _at(described), len(columns), _address(entries), _at(each_key),
            _at(key_bytes), _address(found), unpacker.room(room_bytes << is_helped),
            unpacker.context, is_helped and self._helper, decode_bytes, room_bytes, self._hash,
            self._unzstd, waits, len(found), 0,
        ])  # fmt: skip
        self._read(_at(batch))
        return found

    def _unpacker(self) -> Unpacker:
        """Return the calling thread's own."""
        if not hasattr(_local, "unpacker"):
            _local.unpacker = Unpacker(self)
        return _local.unpacker  # type: ignore[no-any-return]

    def decode(self, codec: int, stored: Any, out: Bytes, elements: tuple[int, bool]) -> bool:
        """Decode one field; whether it held what was promised.

        Args:
            codec: As on disk.
            stored: Any buffer.
            out: 1-d, contiguous, of the size that is promised; filled.
            elements: Bytes of a number, 1, 2, 4 or 8, and whether it is a floating-point one.
        """
        if len(out) % elements[0]:
            return False
        unpacker = self._unpacker()
        decoder = array("Q", [self._unzstd, unpacker.context, *elements])
        source, room = np.frombuffer(stored, np.uint8), unpacker.room(_room_bytes(len(out)))
        places = _address(source), len(source), room, _address(out), len(out)
        return bool(self._decode(_at(decoder), codec, *places))


class Unpacker:
    """zstd's state for one thread, and room for what is decoded, for it and its helper."""

    def __init__(self, native: Kernel) -> None:
        self.context = _declared(native.zstd.ZSTD_createDCtx, c_void_p)()
        if not self.context:
            raise MemoryError("zstd has no memory for its state")
        free = _declared(native.zstd.ZSTD_freeDCtx, ctypes.c_size_t, c_void_p)
        # Not when the interpreter ends: daemon threads may still use it then.
        weakref.finalize(self, free, self.context).atexit = False
        self._room = np.empty(0, np.uint8)

    def room(self, num_bytes: int) -> int:
        """Return where so many bytes are. What is new with each batch is faulted in each time."""
        if len(self._room) < num_bytes:
            self._room = np.empty(num_bytes, np.uint8)
        return _address(self._room)


@functools.cache
def kernel() -> Kernel | None:
    """Return the compiled functions; None where they, or what they need, are not there."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    as_on_disk = sys.byteorder == "little" and sys.maxsize >> 32
    if not as_on_disk or os.environ.get(SWITCH) == "0" or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        if [*(c_uint64 * len(SHAPE)).in_dll(library, "egeria_shape")] != SHAPE:
            return None  # of another version
        xxhash = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        # The one that looks which instructions there are, where the build has it.
        xxh3 = getattr(xxhash, "XXH3_64bits_withSeed_dispatch", None) or xxhash.XXH3_64bits_withSeed
        return Kernel(library, xxh3, ctypes.CDLL("libzstd.so.1"))
    except (OSError, ImportError, AttributeError, ValueError):
        return None


# -- as in kernel.c ----------------------------------------------------------------------------

_MOST_HEAD_BYTES = 4096


def _room_bytes(num_bytes: int) -> int:
    """Return what decoding fields of so many bytes needs besides."""
    return (3 * num_bytes + 87) & ~7


def _num_idle() -> float:
    """Return how many cores had nothing to do in the last minute."""
    try:
        return len(os.sched_getaffinity(0)) - os.getloadavg()[0]
    except OSError:  # where it is hidden
        return 0


SHAPE = [14, 20]
"""What the library says of itself: a number that is counted up in both when a function takes
something else, and the words of a batch. One that was left beside newer sources would write where
it should not."""


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _at(words: array[int]) -> int:
    return words.buffer_info()[0]


def _address(array: npt.NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
