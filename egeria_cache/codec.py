"""Bytes of one field -> fewer bytes, and back, losslessly. Pure; one `Coder` per thread.

No single codec wins (measured in docs/format.md): zstd for anything with repetitions, split planes
for dense floats, a bitmap of the zeros before the split for activations behind a ReLU. A zstd
context must not be shared between threads (it segfaults), hence the class.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

__all__ = ["Bytes", "Codec", "CodecError", "Coder", "Elements"]

Bytes = npt.NDArray[np.uint8]
Elements = tuple[int, bool]
"""Width of one element in bytes, and whether it is a floating-point number."""

SMALL_BYTES = 256
"""Fields below this stay raw: a label gains nothing from a codec."""

_GROUPS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((1, 0),),
    2: ((1, 0), (1, 8)),
    4: ((2, 0), (1, 16), (1, 24)),
    8: ((4, 0), (2, 32), (1, 48), (1, 56)),
}
"""Per element width: (bytes, bit position) of the planes, lowest first. The low planes are the
mantissa's noise, so they are cut coarsely: fewer passes, and nothing lost."""

_WORTH = 0.95
"""A plane is compressed if that leaves at most this part of it; else it is copied, far faster."""


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

    @classmethod
    def named(cls, label: str) -> Codec:
        """Undo `label`."""
        return next(codec for codec, name in _LABELS.items() if name == label)


_LABELS = {
    Codec.RAW: "raw",
    Codec.ZSTD: "zstd",
    Codec.SPLIT: "split+zstd",
    Codec.BITMAP: "bitmap+split",
}


class CodecError(ValueError):
    """Stored bytes do not decode to what their record promises."""


class Coder:
    """Encodes and decodes in one thread."""

    def __init__(self) -> None:
        self._general = zstandard.ZstdCompressor(level=1)
        # Exponents have a skewed histogram and no repetitions. Without match finding what is left
        # of zstd is its Huffman coder: 0.33 of the plane against 0.39, decoded twice as fast.
        self._entropy = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(
                1, min_match=7, hash_log=6
            )
        )
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, data: Bytes, codec: Codec, elements: Elements) -> tuple[Codec, Any]:
        """Return (codec used, buffer); raw where the codec saves nothing."""
        if codec is Codec.RAW or data.nbytes < SMALL_BYTES:
            return Codec.RAW, data
        width, _ = elements
        if codec is Codec.ZSTD or width not in _GROUPS:
            codec, packed = Codec.ZSTD, self._general.compress(data.data)
        elif codec is Codec.SPLIT:
            packed = self._split(_numbers(data, width), elements)
        else:
            numbers = _numbers(data, width)
            present = numbers != 0  # of the bits: -0.0 is no zero
            bitmap, flag = self._shrink(np.packbits(present).data, self._general)
            packed = b"".join(
                (
                    struct.pack("<QQ", int(present.sum()), len(bitmap) << 1 | flag),
                    bitmap,
                    self._split(numbers[present], elements),
                )
            )
        return (codec, packed) if len(packed) < data.nbytes else (Codec.RAW, data)

    def decode_into(self, stored: Any, codec: int, out: Bytes, elements: Elements) -> None:
        """Fill `out` (contiguous, 1-d) with the original bytes.

        Raises:
            CodecError: The stored bytes are damaged, or hold another number of bytes.
        """
        if codec == Codec.RAW:
            if len(stored) != out.nbytes:
                raise CodecError(f"{len(stored)} raw bytes where {out.nbytes} are promised")
            out[:] = np.frombuffer(stored, np.uint8)
        elif codec == Codec.ZSTD:
            out[:] = self._expand(stored, out.nbytes)
        elif codec == Codec.SPLIT and elements[0] in _GROUPS:
            self._join(memoryview(stored), _numbers(out, elements[0]), elements)
        elif codec == Codec.BITMAP and elements[0] in _GROUPS:
            self._scatter(memoryview(stored), _numbers(out, elements[0]), elements)
        else:
            raise CodecError(f"unknown codec {codec}")

    # -- planes -----------------------------------------------------------------------------

    def _split(self, numbers: npt.NDArray[Any], elements: Elements) -> bytes:
        width, floating = elements
        if floating:  # sign to the lowest bit: the exponent then fills the highest plane alone
            numbers = (numbers << 1) | (numbers >> (8 * width - 1))
        heads, blocks = [], []
        groups = _GROUPS[width]
        for size, position in groups:
            plane = (numbers >> position).astype(f"<u{size}")
            highest = floating and (size, position) == groups[-1]
            block, flag = self._shrink(
                plane.data.cast("B") if len(plane) else b"",
                self._entropy if highest else self._general,
            )
            heads.append(len(block) << 1 | flag)
            blocks.append(block)
        return struct.pack(f"<{len(heads)}Q", *heads) + b"".join(blocks)

    def _join(self, stored: memoryview, out: npt.NDArray[Any], elements: Elements) -> None:
        width, floating = elements
        groups = _GROUPS[width]
        at = 8 * len(groups)
        if len(stored) < at:
            raise CodecError("planes cut short")
        heads = struct.unpack_from(f"<{len(groups)}Q", stored)
        planes = []
        for head, (size, _) in zip(heads, groups, strict=True):
            block = stored[at : at + (head >> 1)]
            at += head >> 1
            plane = self._block(block, head, len(out) * size)
            planes.append(plane.view(f"<u{size}"))
        if at != len(stored):
            raise CodecError("planes of another length than promised")
        scratch = np.empty_like(out)
        out[:] = planes[-1]
        above = groups[-1][1]
        for plane, (_, position) in zip(planes[-2::-1], groups[-2::-1], strict=True):
            np.left_shift(out, above - position, out=out)
            scratch[:] = plane
            np.bitwise_or(out, scratch, out=out)
            above = position
        if floating:
            np.left_shift(out, 8 * width - 1, out=scratch)
            np.right_shift(out, 1, out=out)
            np.bitwise_or(out, scratch, out=out)

    def _scatter(self, stored: memoryview, out: npt.NDArray[Any], elements: Elements) -> None:
        if len(stored) < 16:
            raise CodecError("bitmap cut short")
        num_present, head = struct.unpack_from("<QQ", stored)
        end = 16 + (head >> 1)
        if num_present > len(out) or end > len(stored):
            raise CodecError("a bitmap of more elements than the field has")
        bitmap = self._block(stored[16:end], head, -(-len(out) // 8))
        places = np.flatnonzero(np.unpackbits(bitmap, count=len(out)))
        if len(places) != num_present:
            raise CodecError("the bitmap holds another number of elements than promised")
        values = np.empty(num_present, out.dtype)
        self._join(stored[end:], values, elements)
        out[:] = 0
        out[places] = values

    # -- zstd -------------------------------------------------------------------------------

    def _shrink(self, block: Any, compressor: zstandard.ZstdCompressor) -> tuple[Any, int]:
        """Return (block, 1) compressed if worth it, else (block, 0)."""
        if len(block) >= SMALL_BYTES:
            packed = compressor.compress(block)
            if len(packed) <= _WORTH * len(block):
                return packed, 1
        return block, 0

    def _block(self, block: memoryview, head: int, num_bytes: int) -> Bytes:
        if head & 1:
            return self._expand(block, num_bytes)
        if len(block) != num_bytes:
            raise CodecError(f"{len(block)} bytes where {num_bytes} are promised")
        return np.frombuffer(block, np.uint8)

    def _expand(self, stored: Any, num_bytes: int) -> Bytes:
        try:
            # The frame states its size; asking first bounds what may be allocated.
            if zstandard.frame_content_size(stored) != num_bytes:
                raise CodecError(f"a zstd frame of another size than {num_bytes} bytes")
            unpacked = self._decompressor.decompress(stored, max_output_size=num_bytes)
        except zstandard.ZstdError as error:
            raise CodecError(str(error)) from None
        if len(unpacked) != num_bytes:
            raise CodecError(f"{len(unpacked)} bytes decoded, {num_bytes} promised")
        return np.frombuffer(unpacked, np.uint8)


def _numbers(data: Bytes, width: int) -> npt.NDArray[Any]:
    return data.view(f"<u{width}")
