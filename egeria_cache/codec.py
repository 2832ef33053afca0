"""Bytes of one field -> fewer bytes, and back, losslessly. Pure; one `Coder` per thread.

No single codec wins (measured in docs/format.md): zstd for anything with repetitions, split planes
for dense floats, a bitmap of the zeros before the split for activations behind a ReLU. A zstd
context must not be shared between threads (it segfaults), hence the class.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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

_NO_ELEMENTS = {width: memoryview(bytes(8 * len(groups))) for width, groups in _GROUPS.items()}
"""Planes of nothing: stand in for those of a damaged field."""

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
        failed = self.decode_many([stored], codec, out[None], elements)
        if failed:
            raise failed[0]

    def decode_many(
        self, stored: Sequence[Any], codec: int, out: Bytes, elements: Elements
    ) -> dict[int, CodecError]:
        """Decode fields of one layout together: the passes over planes are then few and long.

        Args:
            stored: Encoded fields, N.
            codec: Of all of them.
            out: Shape (N, bytes), contiguous; filled.
            elements: Of all of them.

        Returns:
            The positions that could not be decoded, and why; their rows are arbitrary.
        """
        width, _ = elements
        if codec in (Codec.SPLIT, Codec.BITMAP) and width in _GROUPS:
            views = [memoryview(one) for one in stored]
            if codec == Codec.SPLIT:
                counts = np.full(len(views), out.shape[1] // width)
                return self._join(views, counts, _numbers(out.reshape(-1), width), elements)
            return self._scatter(views, out, elements)
        failed = {}
        for position, one in enumerate(stored):
            try:
                if codec == Codec.RAW:
                    if len(one) != out.shape[1]:
                        raise CodecError(f"{len(one)} raw bytes, {out.shape[1]} promised")
                    out[position] = np.frombuffer(one, np.uint8)
                elif codec == Codec.ZSTD:
                    out[position] = self._expand(one, out.shape[1])
                else:
                    raise CodecError(f"unknown codec {codec}")
            except CodecError as error:
                failed[position] = error
        return failed

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

    def _join(
        self,
        stored: Sequence[memoryview],
        counts: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        elements: Elements,
    ) -> dict[int, CodecError]:
        """Fill `out` (1-d) with the elements of all fields, `counts` of each."""
        width, floating = elements
        groups = _GROUPS[width]
        planes: list[list[Bytes]] = [[] for _ in groups]
        failed = {}
        for position, (view, count) in enumerate(zip(stored, counts.tolist(), strict=True)):
            try:
                blocks = self._blocks(view, count, groups)
            except CodecError as error:
                failed[position] = error
                blocks = [np.zeros(count * size, np.uint8) for size, _ in groups]
            for plane, block in zip(planes, blocks, strict=True):
                plane.append(block)
        whole: list[npt.NDArray[Any]] = [
            (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(f"<u{size}")
            for parts, (size, _) in zip(planes, groups, strict=True)
        ]
        joined: npt.NDArray[Any] = whole[-1]
        for lower, (size, _) in zip(whole[-2::-1], groups[-2::-1], strict=True):
            # Twice as wide at each step, so that the first passes are over few bytes.
            joined = joined.astype(f"<u{2 * size}")
            np.left_shift(joined, 8 * size, out=joined)
            np.bitwise_or(joined, lower, out=joined)
        if floating:
            np.left_shift(joined, 8 * width - 1, out=out)
            joined = joined >> 1 if joined is whole[-1] else np.right_shift(joined, 1, out=joined)
            np.bitwise_or(out, joined, out=out)
        else:
            out[:] = joined
        return failed

    def _blocks(
        self, stored: memoryview, count: int, groups: tuple[tuple[int, int], ...]
    ) -> list[Bytes]:
        """Return the planes of one field of `count` elements."""
        at = 8 * len(groups)
        if len(stored) < at:
            raise CodecError("planes cut short")
        heads = struct.unpack_from(f"<{len(groups)}Q", stored)
        blocks = []
        for head, (size, _) in zip(heads, groups, strict=True):
            blocks.append(self._block(stored[at : at + (head >> 1)], head, count * size))
            at += head >> 1
        if at != len(stored):
            raise CodecError("planes of another length than promised")
        return blocks

    def _scatter(
        self, stored: Sequence[memoryview], out: Bytes, elements: Elements
    ) -> dict[int, CodecError]:
        """Fill `out` (N, bytes) from bitmaps and the planes of what they mark."""
        width, _ = elements
        num_elements = out.shape[1] // width
        bitmap_bytes = -(-num_elements // 8)
        bitmaps = np.zeros((len(stored), bitmap_bytes), np.uint8)
        promised = np.zeros(len(stored), np.int64)
        rest, failed = [], {}
        for position, view in enumerate(stored):
            try:
                if len(view) < 16:
                    raise CodecError("bitmap cut short")
                count, head = struct.unpack_from("<QQ", view)
                end = 16 + (head >> 1)
                if count > num_elements or end > len(view):
                    raise CodecError("a bitmap of more elements than the field has")
                bitmaps[position] = self._block(view[16:end], head, bitmap_bytes)
                promised[position] = count
                rest.append(view[end:])
            except CodecError as error:
                failed[position] = error
                rest.append(_NO_ELEMENTS[width])
        marks = np.unpackbits(bitmaps, axis=1, count=num_elements).view(np.bool_)
        present = np.count_nonzero(marks, axis=1)
        for position in np.flatnonzero(present != promised).tolist():
            failed[position] = CodecError("the bitmap marks another number of elements")
            marks[position], promised[position], rest[position] = False, 0, _NO_ELEMENTS[width]
        numbers = _numbers(out.reshape(-1), width)
        places = np.flatnonzero(marks)
        values = np.empty(len(places), numbers.dtype)
        failed.update(self._join(rest, promised, values, elements))
        numbers[:] = 0
        numbers[places] = values
        return failed

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
