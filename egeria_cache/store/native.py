"""What `kernel.c` was compiled to, if it was: a batch of records is read without the interpreter.

A plain library, called through `ctypes`, which lets go of the GIL. XXH3 and zstd are those of the
libraries that are there anyway; where one is missing, or nothing could be compiled when Egeria was
installed, `kernel()` is None, and raw and zstd records are read in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import queue
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = [
    "ABSENT",
    "DAMAGED",
    "INTACT",
    "LIBRARY_NAME",
    "SWITCH",
    "UNREADABLE",
    "Kernel",
    "Unpacker",
    "has_kernel",
    "kernel",
]

LIBRARY_NAME = "_kernel.so"
SWITCH = "EGERIA_NATIVE"
"""Environment variable: "0" leaves the library aside."""

HELPED_BYTES = 2**20
"""Decoded: of a batch that is less, a thread that has yet to wake finds nothing left to do."""
MOST_HELPERS = 3
KEPT_BYTES = 16 * 2**20
"""Memory beyond this is given back."""

ABSENT, INTACT, DAMAGED, UNREADABLE = range(4)
"""How a record was read: not, since it is not in memory; as it should be; not as it should be; not,
since the disk cannot."""

Bytes = npt.NDArray[np.uint8]


class Kernel:
    """The compiled functions, for arrays. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, xxh3: Any, zstd: ctypes.CDLL) -> None:
        self._hash = ctypes.cast(xxh3, c_void_p).value or 0
        self._unzstd = ctypes.cast(zstd.ZSTD_decompressDCtx, c_void_p).value or 0
        self._zstd = zstd
        p, n = c_void_p, c_int64
        self._read = _declared(library.egeria_read, None, p, n, c_int)
        self._decode = _declared(library.egeria_decode, c_int, p, c_int, p, n, p, p, n)
        self._pack = _declared(library.egeria_pack, None, p, c_uint64, p, n, n, n, p, p, n)

    def unpacker(self) -> Unpacker:
        """Return zstd's state for the calling thread."""
        return Unpacker(self._zstd)

    def read(
        self,
        unpacker: Unpacker,
        file: tuple[int, int, int],
        layout: tuple[int, int],
        columns: Sequence[tuple[Tensor, int, tuple[int, bool]]],
        entries: npt.NDArray[Any],
        keys: Sequence[bytes],
        *,
        waits: bool,
        helpers: Helpers | None = None,
    ) -> tuple[int, Bytes]:
        """Read, verify and decode records of one layout; return how many are intact, and how each
        was read, shape (N,).

        Args:
            unpacker: Of this thread.
            file: Where it is mapped, how many bytes at most, and its descriptor.
            layout: The seed of the records' checksums, and its number; others stay absent.
            columns: Per field N contiguous rows, their bytes, and what their numbers are.
            entries: Of each record, shape (N,), contiguous.
            keys: Of each record.
            waits: For the disk; else what is not in memory is not read.
            helpers: Take a part of a large batch that is to be decoded.
        """
        found, progress = np.zeros(len(entries), np.uint8), array("q", bytes(32))
        described = array("Q")
        for rows, num_bytes, kind in columns:
            described.extend((rows.data_ptr(), num_bytes, *kind))
        whole = sum(num_bytes for _, num_bytes, _ in columns)
        decode_bytes = _room_bytes(max((num_bytes for _, num_bytes, _ in columns), default=0))
        room_bytes = decode_bytes + whole + _MOST_HEAD_BYTES  # more is none of these records
        key_bytes, each_key = array("H", map(len, keys)), array("B", b"".join(keys))
        batch = array("Q", [
            *file, *layout, _at(described), len(columns), _address(entries), _at(each_key),
            _at(key_bytes), _address(found), unpacker.room(room_bytes), unpacker.context,
            decode_bytes, room_bytes, self._hash, self._unzstd, waits, _at(progress),
        ])  # fmt: skip
        is_large = whole * len(entries) >= HELPED_BYTES
        # What is only copied, one core copies about as fast as memory can.
        if waits and helpers is not None and is_large and whole > entries["size"].max():
            helpers.offer(functools.partial(self._help, batch, progress, room_bytes, len(found)))
        self._read(_at(batch), len(found), 0)
        return progress[_NUM_INTACT_AT], found

    def _help(self, batch: Any, _progress: Any, room: int, count: int, unpacker: Unpacker) -> None:
        """Read records of a batch that are left; touch nothing but its progress once none are."""
        own = batch[:]
        own[_ROOM_AT], own[_ROOM_AT + 1] = unpacker.room(room), unpacker.context
        self._read(_at(own), count, 1)

    def decode(
        self, unpacker: Unpacker, codec: int, stored: Any, out: Bytes, elements: tuple[int, bool]
    ) -> bool:
        """Decode one field; whether it held what was promised.

        Args:
            unpacker: Of this thread.
            codec: As on disk.
            stored: Any buffer.
            out: 1-d, contiguous, of the size that is promised; filled.
            elements: Bytes of a number, 1, 2, 4 or 8, and whether it is a floating-point one.
        """
        if len(out) % elements[0]:
            return False
        decoder = array("Q", [self._unzstd, unpacker.context, *elements])
        source, room = np.frombuffer(stored, np.uint8), unpacker.room(_room_bytes(len(out)))
        done = self._decode(
            _at(decoder), codec, _address(source), len(source), room, _address(out), len(out)
        )
        return bool(done)

    def pack(
        self, records: Bytes, start: int, columns: Sequence[Bytes], picked: Sequence[int], seed: int
    ) -> None:
        """Put rows behind the heads of their records, and set the checksums.

        Args:
            records: Shape (N, bytes), contiguous; up to `start` all but the checksums is there.
            start: Where the rows go.
            columns: Per field its rows, shape (B, bytes), contiguous.
            picked: A row for each record.
            seed: Of the checksums.
        """
        described = array("Q", (word for one in columns for word in (_address(one), one.shape[1])))
        rows = np.asarray(picked, np.int64)
        self._pack(
            self._hash, seed, _address(records), records.shape[1], start, len(records),
            _address(rows), _at(described), len(columns),
        )  # fmt: skip


class Unpacker:
    """zstd's state, and memory to work in, for one thread."""

    def __init__(self, zstd: ctypes.CDLL) -> None:
        self.context = _declared(zstd.ZSTD_createDCtx, c_void_p)()
        if not self.context:
            raise MemoryError("zstd has no memory for its state")
        free = _declared(zstd.ZSTD_freeDCtx, ctypes.c_size_t, c_void_p)
        # Not when the interpreter ends: daemon threads may still use it then.
        weakref.finalize(self, free, self.context).atexit = False
        self._room, self._room_at = np.empty(0, np.uint8), 0

    def room(self, num_bytes: int) -> int:
        """Return where so many bytes are free; the next call returns the same memory."""
        if not num_bytes <= len(self._room) <= max(num_bytes, KEPT_BYTES):
            self._room = np.empty(num_bytes, np.uint8)
            self._room_at = self._room.ctypes.data
        return self._room_at


class Helpers:
    """Threads that decode a part of large batches: as many as there are cores for, up to three.
    Owned by the store's reader, which closes them.
    """

    def __init__(self, native: Kernel) -> None:
        self._native, self._num_cores = native, len(os.sched_getaffinity(0))
        self._tasks: queue.SimpleQueue[Callable[[Unpacker], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] | None = None

    def offer(self, task: Callable[[Unpacker], None]) -> None:
        """Have each of them do it, soon, where cores are idle; nobody waits for that."""
        # Where none is, a helper that has to wait for one in the middle of a row holds up the rest.
        if os.getloadavg()[0] > self._num_cores - 0.5:
            return
        with self._lock:
            if self._threads is None:
                self._threads = []
                self._start(self._threads)
        for _ in self._threads:
            self._tasks.put(task)

    def _start(self, threads: list[threading.Thread]) -> None:
        with contextlib.suppress(RuntimeError, MemoryError):  # no more threads can be started
            for _ in range(min(self._num_cores - 1, MOST_HELPERS)):
                one = threading.Thread(target=self._run, name="egeria-helper", daemon=True)
                one.start()
                threads.append(one)

    def _run(self) -> None:
        unpacker = self._native.unpacker()
        while (task := self._tasks.get()) is not None:
            task(unpacker)

    def close(self) -> None:
        """Stop and join them."""
        threads, self._threads = self._threads or [], []
        for _ in threads:
            self._tasks.put(None)
        for one in threads:
            one.join()


@functools.cache
def kernel() -> Kernel | None:
    """Return the compiled functions; None where they, or what they need, are not there."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    if os.environ.get(SWITCH) == "0" or not path.exists():
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


def has_kernel() -> bool:
    """Tell whether batches are read without the interpreter."""
    return kernel() is not None


# -- as in kernel.c ----------------------------------------------------------------------------

_MOST_HEAD_BYTES = 4096


def _room_bytes(num_bytes: int) -> int:
    """Return what decoding fields of so many bytes needs besides."""
    return (3 * num_bytes + 87) & ~7


_ROOM_AT = 11
"""Which word of a batch that is; zstd's state is the next."""
_NUM_INTACT_AT = 3
"""Which word of the progress."""
SHAPE = [10, 19]
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
    if array.flags.writeable and array.nbytes:  # a fifth of the time
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    address: int = array.ctypes.data
    return address
