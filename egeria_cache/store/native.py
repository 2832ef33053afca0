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
from ctypes import c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY_NAME = "_kernel.so"
SWITCH = "EGERIA_NATIVE"
"""Environment variable: "0" leaves the library aside."""

ABSENT, INTACT, DAMAGED, UNREADABLE = range(4)
"""How a record was read: not, since it is not in memory; as it should be; not as it should be; not,
since the disk cannot."""

Bytes = npt.NDArray[np.uint8]


class Kernel:
    """The compiled functions, for arrays. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, xxh3: Any, zstd: ctypes.CDLL) -> None:
        self.hash = ctypes.cast(xxh3, c_void_p).value or 0
        self.unzstd = ctypes.cast(zstd.ZSTD_decompressDCtx, c_void_p).value or 0
        self.helper = _declared(zstd.ZSTD_createDCtx, c_void_p)() or 0
        """zstd's state for the thread that helps to read a batch."""
        self.own = _Own(zstd)
        p, n = c_void_p, c_int64
        self.read = _declared(library.egeria_read, None, p)
        """Takes where the words of a batch are."""
        self._decode = _declared(library.egeria_decode, c_int, p, c_int, p, n, p, p, n)

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
        assert out.flags.c_contiguous
        own, source = self.own, np.frombuffer(stored, np.uint8)
        if len(own.room) < room_bytes(len(out)):
            own.room = np.empty(room_bytes(len(out)), np.uint8)
        decoder = array("Q", [self.unzstd, own.context, *elements])
        places = source.ctypes.data, len(source), own.room.ctypes.data, out.ctypes.data, len(out)
        return bool(self._decode(decoder.buffer_info()[0], codec, *places))


class _Own(threading.local):
    """zstd's state for each thread, and room for what is decoded, for it and its helper."""

    def __init__(self, zstd: ctypes.CDLL) -> None:
        self.context = _declared(zstd.ZSTD_createDCtx, c_void_p)()
        if not self.context:
            raise MemoryError("zstd has no memory for its state")
        free = _declared(zstd.ZSTD_freeDCtx, ctypes.c_size_t, c_void_p)
        # Not when the interpreter ends: daemon threads may still use it then.
        weakref.finalize(threading.current_thread(), free, self.context).atexit = False
        self.room = np.empty(0, np.uint8)
        """Grows, and stays: what is new with each batch is faulted in each time."""


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

MOST_HEAD_BYTES = 4096


def room_bytes(num_bytes: int) -> int:
    """Return what decoding fields of so many bytes needs besides."""
    return (3 * num_bytes + 87) & ~7


SHAPE = [14, 20]
"""What the library says of itself: a number that is counted up in both when a function takes
something else, and the words of a batch. One that was left beside newer sources would write where
it should not."""


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
