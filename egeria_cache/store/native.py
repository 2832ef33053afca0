"""What `kernel.c` was compiled to, if it was: a batch of records is read without the interpreter.

A plain library, called through `ctypes`, which lets go of the GIL. XXH3 and zstd are those of the
libraries that are there anyway; where one is missing, or nothing could be compiled when Egeria was
installed, `kernel()` is None, and the same bytes are read in Python, in a few times the time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = [
    "ABSENT",
    "LIBRARY_NAME",
    "SWITCH",
    "TRUSTED",
    "VERIFIED",
    "Kernel",
    "Mapping",
    "Pace",
    "Serving",
    "Source",
    "Unpacker",
    "has_kernel",
    "kernel",
]

LIBRARY_NAME = "_kernel.so"
SWITCH = "EGERIA_NATIVE"
"""Environment variable: "0" leaves the library aside."""

KEPT_BYTES = 16 * 2**20
"""Memory beyond this is given back."""

ABSENT, TRUSTED, VERIFIED = range(3)
"""How a record was served: not at all; without a look at its checksum; after one."""

Bytes = npt.NDArray[np.uint8]
Found = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class Mapping:
    """A file in the address space, as far as it reached when this was made. Nothing but the kernel
    touches it, which handles the signal that this may be.
    """

    def __init__(self, descriptor: int) -> None:
        """Map an open file.

        Raises:
            OSError: It cannot be mapped, or nobody can tell what of it is in memory.
            ValueError: It is empty.
        """
        self.descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        self._array = np.frombuffer(self._mapped, np.uint8)
        self.num_bytes = len(self._mapped)
        native = kernel()
        if native is None or not native.can_tell(descriptor, self.num_bytes):
            raise OSError("what of the file is in memory cannot be told")
        self.address: int = self._array.ctypes.data


class Kernel:
    """The compiled functions, for arrays. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, xxh3: Any, zstd: ctypes.CDLL) -> None:
        self.hash = ctypes.cast(xxh3, c_void_p)
        self.unzstd = ctypes.cast(zstd.ZSTD_decompressDCtx, c_void_p)
        self._zstd = zstd
        p, n = c_void_p, c_int64
        self.serve = _declared(
            library.egeria_serve, n, POINTER(_Source), POINTER(_Batch), n, p, p, p
        )
        self.helpers_bytes: int = _declared(library.egeria_helpers_bytes, c_uint64)()
        self.begin_helpers = _declared(library.egeria_begin_helpers, None, p, n, n)
        self.end_helpers = _declared(library.egeria_end_helpers, None, p)
        self.help = _declared(library.egeria_help, None, p, p)
        self.can_tell = _declared(library.egeria_can_tell, c_int, c_int, c_uint64)
        """Whether the system says what of a file (descriptor, bytes) is in memory."""
        self._load = _declared(library.egeria_load, None, c_int, n, p, p, c_uint64)
        self._decode = _declared(
            library.egeria_decode, None, POINTER(_Decoder), c_int, n, p, p, p, p, p, n, p, p
        )

    def unpacker(self) -> Unpacker:
        """Return zstd's state for the calling thread."""
        return Unpacker(self._zstd)

    def load(self, descriptor: int, spans: Words, room: Bytes) -> None:
        """Bring records into memory, asking for all at once.

        Args:
            descriptor: Of their file.
            spans: As in a table, see `Source`.
            room: Some bytes.
        """
        self._load(descriptor, len(spans), _address(spans), _address(room), len(room))

    def decode(
        self,
        unpacker: Unpacker,
        codec: int,
        records: Bytes,
        starts: Integers,
        sizes: Integers,
        out: Bytes,
        rows: Integers,
        elements: tuple[int, bool],
    ) -> Found:
        """Decode fields of one layout and codec; return which held what they promised.

        Args:
            unpacker: Of this thread.
            codec: As on disk.
            records: Where the encoded fields lie.
            starts: Of each field, shape (N,).
            sizes: Of each field, shape (N,); all of it in `records`.
            out: Shape (rows, bytes).
            rows: Of `out`, one for each field, shape (N,).
            elements: Bytes of a number, 1, 2, 4 or 8, and whether it is a floating-point one.
        """
        found = np.empty(len(starts), np.bool_)
        starts, sizes = np.ascontiguousarray(starts), np.ascontiguousarray(sizes)
        decoder = _Decoder(self.unzstd, unpacker.context, *elements)
        self._decode(
            decoder, codec, len(starts), _address(records), _address(starts), _address(sizes),
            _address(out), _address(rows), out.shape[1],
            unpacker.room(_room_bytes(out.shape[1])), _address(found),
        )  # fmt: skip
        return found


class Source:
    """The records of one layout in a file, and what is known of them; the same from batch to batch.

    Any thread may serve from it.
    """

    def __init__(
        self,
        kernel: Kernel,
        mapping: Mapping,
        *,
        identity: int,
        variant: int,
        head: bytes,
        fields: Sequence[tuple[int, tuple[int, bool]]],
        pace: Pace,
        table: Words | None = None,
    ) -> None:
        """Say what there is.

        Args:
            kernel: The functions.
            mapping: Of the file.
            identity: Of the generation.
            variant: Of the augmentation.
            head: That records should have, from behind the checksum on; their lengths may differ.
            fields: Per tensor of a record its bytes, and its elements.
            pace: Of records of this layout.
            table: Span by sample ID, shape (M, 2): place, with a mark in its three lowest bits,
                and size. Without it, each batch has spans of its own.
        """
        self.room_bytes = max((_room_bytes(num_bytes) for num_bytes, _ in fields), default=0)
        """What each thread needs besides."""
        described = (_Field * len(fields))(*(_Field(size, *kind) for size, kind in fields))
        self._kept = mapping, table, described, pace
        self.num_fields = len(fields)
        self.serve = kernel.serve
        self.struct = _Source(
            mapping.descriptor, mapping.address, mapping.num_bytes, kernel.hash, kernel.unzstd,
            identity, variant, head, CHECKSUM_BYTES + len(head), len(fields), described,
            _address(table), 0 if table is None else len(table), self.room_bytes,
            ctypes.pointer(pace), 0,
        )  # fmt: skip


class Serving:
    """One batch after the other from a source, by one thread, which others may help.

    Args:
        source: Of all of them.
        unpacker: Of this thread.
    """

    def __init__(self, source: Source, unpacker: Unpacker) -> None:
        self._source, self._unpacker = source, unpacker
        self._serve, self._of = source.serve, source.struct
        self._out = (c_void_p * source.num_fields)()
        self._batch = _Batch(out=self._out)
        self._count = -1
        self._noted: Words = np.empty((3, 0), np.uint64)
        self._numbers_at: int | None = None

    def serve(
        self,
        count: int,
        out: Sequence[Tensor],
        mark: int,
        turn: int,
        written: int,
        numbers: Integers | None,
        *,
        spans: Words | None = None,
        key_hashes: Words | None = None,
        rows: Integers | None = None,
        helpers: int | None = None,
    ) -> int:
        """Serve N records. Every array but `numbers` is contiguous.

        Args:
            count: N.
            out: Per field, where to: contiguous rows.
            mark: Of the round of trust: what has it is believed; 8 for nothing.
            turn: Which of the 64 parts of what is believed is verified again.
            written: The file's time of modification, in nanoseconds; where it is another one by
                then, nothing is served. -1: it does not matter.
            numbers: Sample IDs, shape (N,), where all are integers.
            spans: As in the table, shape (N, 2).
            key_hashes: XXH3 of the keys, shape (N,), where they are no integers.
            rows: Of `out`, one for each record, shape (N,); in this order without.
            helpers: Where they are, if there are any.

        Returns:
            How many of them were not believed before, -1 if one is absent, -2 if none count because
            the file was written to.
        """
        batch = self._batch
        if count != self._count:
            if count > self._noted.shape[1]:
                self._noted = np.empty((3, count), np.uint64)
                batch.found, batch.places, self._numbers_at = (
                    row.ctypes.data for row in self._noted
                )
            self._numbers, self._count = self._noted[2, :count].view(np.int64), count
        batch.mark, batch.turn, batch.written = mark, turn, written
        batch.numbers = None
        if numbers is not None:
            self._numbers[...] = numbers
            batch.numbers = self._numbers_at
        if spans is not None or rows is not None:
            batch.spans, batch.rows = _address(spans), _address(rows)
            batch.key_hashes = _address(key_hashes)
        for at, one in enumerate(out):
            self._out[at] = one.data_ptr()
        num_verified: int = self._serve(
            self._of, batch, count, self._unpacker.context,
            self._unpacker.room(self._source.room_bytes), helpers,
        )  # fmt: skip
        return num_verified

    @property
    def found(self) -> Bytes:
        """How each record was served, shape (N,)."""
        found: Bytes = self._noted[0].view(np.uint8)
        return found[: self._count]

    @property
    def places(self) -> Words:
        """And from where in the file, unless it is absent; shape (N,)."""
        return self._noted[1, : self._count]


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

CHECKSUM_BYTES = 8


def _room_bytes(num_bytes: int) -> int:
    """Return what decoding fields of so many bytes needs besides."""
    return 3 * num_bytes + 80


class _Field(ctypes.Structure):
    _fields_ = [
        ("num_bytes", c_int64),
        ("width", c_int64),
        ("floating", c_int64),
    ]


class Pace(ctypes.Structure):
    """How long records of one layout take, and whether help was of any; noted by the kernel."""

    _fields_ = [
        ("record_ns", c_int64),
        ("patience", c_int64),
        ("alone", c_int64),
        ("num_helped", c_int64),
    ]


class _Source(ctypes.Structure):
    _fields_ = [
        ("descriptor", c_int64),
        ("map", c_void_p),
        ("map_bytes", c_uint64),
        ("hash", c_void_p),
        ("zstd", c_void_p),
        ("identity", c_uint64),
        ("variant", c_uint64),
        ("head", c_char_p),
        ("head_bytes", c_uint64),
        ("num_fields", c_int64),
        ("fields", POINTER(_Field)),
        ("table", c_void_p),
        ("table_rows", c_uint64),
        ("room_bytes", c_uint64),
        ("pace", POINTER(Pace)),
        ("doubts", c_int64),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("numbers", c_void_p),
        ("key_hashes", c_void_p),
        ("spans", c_void_p),
        ("rows", c_void_p),
        ("out", POINTER(c_void_p)),
        ("mark", c_uint64),
        ("turn", c_uint64),
        ("written", c_int64),
        ("found", c_void_p),
        ("places", c_void_p),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("zstd", c_void_p),
        ("context", c_void_p),
        ("width", c_int64),
        ("floating", c_int64),
    ]


SHAPE = [5, *map(ctypes.sizeof, (_Field, _Source, _Batch, _Decoder, Pace))]
"""What the library says of itself. The first is counted up in both when a function takes something
else: a library that was left beside newer sources would write where it should not."""


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _address(array: npt.NDArray[Any] | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    if array.flags.writeable and array.nbytes:  # a fifth of the time
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    address: int = array.ctypes.data
    return address
