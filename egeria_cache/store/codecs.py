"""Numbers of an activation <-> fewer bytes: losslessly, or stored in fewer bits than were computed.

Pure; one `Coder` per thread, for a zstd context that two share segfaults. No single codec wins:
zstd for anything with repetitions, split planes for dense floats, a bitmap of the zeros before the
split for activations behind a ReLU. Lossy storage (float16, bfloat16, or int8 with a scale per
channel) is never the default: it is part of a generation's address.

They are decoded by what `kernel.c` was compiled to, if it was, which also reads a batch of records
without the interpreter: a plain library, called through `ctypes`, which lets go of the GIL. XXH3
and zstd are those of the libraries that are there anyway; where one is missing, or nothing could be
compiled when Egeria was installed, `kernel()` is None, and raw and zstd records are read in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import math
import os
import struct
import sys
import threading
import weakref
from array import array
from ctypes import c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Storage = str | None
"""A name from `arguments.StorageDtype`, or None: every bit is kept."""
Elements = tuple[int, bool]
"""Width of one element in bytes, and whether it is a floating-point number."""

GROUPS: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((1, 0), (1, 8)),
    4: ((2, 0), (1, 16), (1, 24)),
}
"""Per element width: (bytes, bit position) of the planes, lowest first. Of other widths there is
nothing to be had by planes."""

SMALL_BYTES = 256
"""Fields below this stay raw: a label gains nothing from a codec."""

_WORTH = 0.95
"""A plane is compressed if that leaves at most this part of it; else it is copied, far faster."""

_BITMAP_WORTH = 0.5
"""The same for a bitmap: it is a thirty-second part of what it stands for, or a sixteenth."""

_AS_THEY_ARE = 1 << 63
"""Set in a bitmap's number of elements where those are not rotated."""


class Codec(IntEnum):
    """How the bytes of a field are stored. The number is on disk."""

    RAW = 0
    ZSTD = 1
    SPLIT = 2
    BITMAP = 3

    @property
    def label(self) -> str:
        """Name in settings, manifests and reports."""
        return _LABELS[self]


_LABELS = "raw", "zstd", "split+zstd", "bitmap+split"


class CodecError(ValueError):
    """Stored bytes do not decode to what their record promises."""


class NeedsKernelError(ValueError):
    """Nothing is wrong with stored bytes that cannot be decoded here."""


class Coder:
    """Encodes in one thread, with a codec that is set or tried out, and lossily if so wanted."""

    def __init__(self, label: str = "auto", storage: Storage = None) -> None:
        self.codec = next((one for one in Codec if one.label == label), None)
        self.storage = storage
        self._general = zstandard.ZstdCompressor(level=1)
        # Exponents have a skewed histogram and no repetitions. Without match finding what is left
        # of zstd is its Huffman coder: 0.33 of the plane against 0.39, decoded twice as fast.
        few = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
        self._entropy = zstandard.ZstdCompressor(compression_params=few)

    def encode(self, data: Bytes, elements: Elements) -> tuple[Codec, Any]:
        """Return (codec used, buffer); raw where the codec saves nothing."""
        codec = self.codec
        if codec is None or codec is Codec.RAW or data.nbytes < SMALL_BYTES:
            return Codec.RAW, data
        width, _ = elements
        if codec is Codec.ZSTD or width not in GROUPS:
            codec, packed = Codec.ZSTD, self._general.compress(data.data)
        elif codec is Codec.SPLIT:
            packed = self._split(data.view(f"<u{width}"), elements)
        else:
            numbers = data.view(f"<u{width}")
            present = numbers != 0  # of the bits: -0.0 is no zero
            marked = numbers[present]
            # Without a sign there is nothing to rotate: it would bring a zero to every mantissa,
            # which only a codec takes out again.
            plain = elements[1] and not bool((marked >> (8 * width - 1)).any())
            bitmap, flag = self._shrink(np.packbits(present).data, self._general, _BITMAP_WORTH)
            head = struct.pack("<QQ", len(marked) | plain * _AS_THEY_ARE, len(bitmap) << 1 | flag)
            packed = b"".join((head, bitmap, self._split(marked, elements, rotates=not plain)))
        return (codec, packed) if len(packed) < data.nbytes else (Codec.RAW, data)

    def _split(
        self, numbers: npt.NDArray[Any], elements: Elements, *, rotates: bool = True
    ) -> bytes:
        width, floating = elements
        if floating and rotates:  # sign to the lowest bit: the exponent fills the highest plane
            numbers = (numbers << 1) | (numbers >> (8 * width - 1))
        planes = [(numbers >> position).astype(f"<u{size}") for size, position in GROUPS[width]]
        heads, blocks = [], []
        for plane in planes:
            coder = self._entropy if floating and plane is planes[-1] else self._general
            block, flag = self._shrink(plane.data.cast("B") if len(plane) else b"", coder)
            heads.append(len(block) << 1 | flag)
            blocks.append(block)
        return struct.pack(f"<{len(heads)}Q", *heads) + b"".join(blocks)

    def _shrink(
        self, block: Any, compressor: zstandard.ZstdCompressor, worth: float = _WORTH
    ) -> tuple[Any, int]:
        """Return (block, 1) compressed if worth it, else (block, 0)."""
        if len(block) >= SMALL_BYTES:
            packed = compressor.compress(block)
            if len(packed) <= worth * len(block):
                return packed, 1
        return block, 0


def decode(stored: Any, codec: int, out: Bytes, elements: Elements) -> None:
    """Fill `out` (contiguous, 1-d) with the original bytes.

    Raises:
        CodecError: The stored bytes are damaged, or hold another number of bytes.
        NeedsKernelError: Nothing here can decode them.
    """
    native, num_bytes = kernel(), len(out)
    if codec == Codec.RAW:
        if len(stored) != num_bytes:
            raise CodecError(f"{len(stored)} raw bytes, {num_bytes} promised")
        out[:] = np.frombuffer(stored, np.uint8)
    elif native is not None:
        if not native.decode(codec, stored, out, elements):
            raise CodecError(f"not what was promised of codec {codec}")
    elif codec == Codec.ZSTD:
        with contextlib.suppress(zstandard.ZstdError, ValueError):
            if zstandard.frame_content_size(stored) == num_bytes:  # so much would be allocated
                whole = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
                out[:] = np.frombuffer(whole, np.uint8)
                return
        raise CodecError("not what was promised of a frame of zstd")
    else:
        raise NeedsKernelError("split records are read by the compiled kernel alone")


# -- lossy storage ---------------------------------------------------------------------------

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LEVELS = 127


def channel_dim(shape: tuple[int, ...]) -> int:
    """Return which dimension of a sample has a scale each: channels first for images, last for
    sequences and vectors.
    """
    return 0 if len(shape) >= 3 else len(shape) - 1


def storage_bytes(shape: tuple[int, ...], dtype: torch.dtype, storage: Storage) -> int:
    """Return the size of one sample as stored."""
    count = math.prod(shape)
    if storage is None:
        return count * dtype.itemsize
    if storage == "int8":
        return count + 4 * (shape[channel_dim(shape)] if shape else 1)
    return count * 2


def pack(rows: Tensor, storage: Storage) -> tuple[Tensor, Storage]:
    """Return the rows as stored, uint8 of shape (B, bytes), and in which storage that is.

    Rows that the storage cannot hold (other dtypes, infinities, overflow) keep every bit.
    """
    packed, width = None, 1 if storage == "int8" else 2
    if storage is not None and rows.is_floating_point() and rows.element_size() > width:
        if storage == "int8":
            packed = _pack_int8(rows.float())
        else:
            halves = rows.to(_HALVES[storage])
            packed = _flat(halves) if bool(halves.isfinite().all()) else None
    if packed is None:
        packed, storage = _flat(rows), None
    size = storage_bytes(tuple(rows.shape[1:]), rows.dtype, storage)
    return packed.view(len(rows), size), storage


def unpack(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype, storage: Storage) -> Tensor:
    """Undo `pack`: uint8 (B, bytes) -> (B, *shape) of `dtype`."""
    num_rows = len(packed)
    if storage is None:
        return packed.view(-1).view(dtype).view(num_rows, *shape)
    if storage != "int8":
        return packed.view(-1).view(_HALVES[storage]).view(num_rows, *shape).to(dtype)
    num_scales = shape[channel_dim(shape)] if shape else 1
    scales = packed[:, : 4 * num_scales].contiguous().view(-1).view(torch.float32)
    levels = packed[:, 4 * num_scales :].contiguous().view(torch.int8).view(num_rows, *shape)
    return (levels.float() * _spread(scales.view(num_rows, num_scales), shape)).to(dtype)


def _pack_int8(rows: Tensor) -> Tensor | None:
    shape = tuple(rows.shape[1:])
    if not rows.numel() or not bool(rows.isfinite().all()):
        return None
    others = [1 + dim for dim in range(len(shape)) if dim != channel_dim(shape)]
    largest = rows.abs().amax(others) if others else rows.abs()
    scales = (largest / _LEVELS).clamp_min(torch.finfo(torch.float32).tiny).view(len(rows), -1)
    levels = (rows / _spread(scales, shape)).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    parts = (_flat(scales).view(len(rows), -1), _flat(levels).view(len(rows), -1))
    return torch.cat(parts, 1)


def _spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View (B, channels) so that it multiplies (B, *shape)."""
    if not shape:
        return scales.view(-1)
    sizes = [1] * len(shape)
    sizes[channel_dim(shape)] = -1
    return scales.view(len(scales), *sizes)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# -- what kernel.c was compiled to -------------------------------------------------------------

LIBRARY_NAME = "_kernel.so"
SWITCH = "EGERIA_NATIVE"
"""Environment variable: "0" leaves the library aside."""

ABSENT, INTACT, DAMAGED, UNREADABLE = range(4)
"""How a record was read: not, since it is not in memory; as it should be; not as it should be; not,
since the disk cannot."""


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
        self.context, self._end = _declared(zstd.ZSTD_createDCtx, c_void_p)(), threading.Lock()
        if not self.context:
            raise MemoryError("zstd has no memory for its state")
        free = _declared(zstd.ZSTD_freeDCtx, ctypes.c_size_t, c_void_p)
        # Not when the interpreter ends: daemon threads may still use it then.
        weakref.finalize(self._end, free, self.context).atexit = False
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
