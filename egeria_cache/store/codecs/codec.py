"""Bytes of fields -> fewer bytes, and back, losslessly. Pure; one `Coder` per thread.

No single codec wins: zstd for anything with repetitions, split planes for dense floats, a bitmap of
the zeros before the split for activations behind a ReLU. A zstd context must not be shared between
threads (it segfaults), hence the class.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from egeria_cache.store.native import Bytes, kernel

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
            packed = b"".join(
                (
                    struct.pack("<QQ", len(marked) | plain * _AS_THEY_ARE, len(bitmap) << 1 | flag),
                    bitmap,
                    self._split(marked, elements, rotates=not plain),
                )
            )
        return (codec, packed) if len(packed) < data.nbytes else (Codec.RAW, data)

    def decode_into(self, stored: Any, codec: int, out: Bytes, elements: Elements) -> None:
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
        elif codec == Codec.ZSTD:
            out[:] = np.frombuffer(self._expanded(stored, num_bytes), np.uint8)
        elif codec not in (Codec.SPLIT, Codec.BITMAP) or elements[0] not in GROUPS:
            raise CodecError(f"unknown codec {codec}")
        elif native is None:
            raise NeedsKernelError("split records are read by the compiled kernel alone")
        elif not native.decode(codec, stored, out, elements):
            raise CodecError("planes or bitmap are damaged")

    def _expanded(self, stored: Any, num_bytes: int) -> bytes:
        problem: object = "another size"
        try:  # what the frame says is what would be allocated
            if zstandard.frame_content_size(stored) == num_bytes:
                return self._decompressor.decompress(stored, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            problem = error
        raise CodecError(f"not what was promised: {problem}")

    # -- encoding ---------------------------------------------------------------------------

    def _split(
        self, numbers: npt.NDArray[Any], elements: Elements, *, rotates: bool = True
    ) -> bytes:
        width, floating = elements
        planes = cut(numbers, (width, floating and rotates))
        heads, blocks = [], []
        for plane in planes:
            highest = floating and plane is planes[-1]
            block, flag = self._shrink(
                plane.data.cast("B") if len(plane) else b"",
                self._entropy if highest else self._general,
            )
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


def cut(numbers: npt.NDArray[Any], elements: Elements) -> list[npt.NDArray[Any]]:
    """Return the planes, lowest first, each of the shape of `numbers`."""
    width, floating = elements
    if floating:  # sign to the lowest bit: the exponent then fills the highest plane alone
        numbers = (numbers << 1) | (numbers >> (8 * width - 1))
    return [(numbers >> position).astype(f"<u{size}") for size, position in GROUPS[width]]
