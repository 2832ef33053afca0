"""Bytes of one field -> fewer bytes, and back, losslessly. Pure; one `Coder` per thread.

A zstd context must not be shared between threads (it segfaults), hence the class.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

__all__ = ["Codec", "CodecError", "Coder"]

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 256
"""Fields below this stay raw: a label gains nothing from a codec."""


class Codec(IntEnum):
    """How the bytes of a field are stored. The number is on disk."""

    RAW = 0
    ZSTD = 1


class CodecError(ValueError):
    """Stored bytes do not decode to what their record promises."""


class Coder:
    """Encodes and decodes in one thread."""

    def __init__(self, level: int = 1) -> None:
        self._compressor = zstandard.ZstdCompressor(
            level=level, write_checksum=False, write_content_size=True
        )
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, data: Bytes, codec: Codec) -> tuple[Codec, Any]:
        """Return (codec used, buffer); raw where the codec saves nothing."""
        if codec is Codec.RAW or data.nbytes < SMALL_BYTES:
            return Codec.RAW, data
        packed = self._compressor.compress(data.data)
        return (Codec.ZSTD, packed) if len(packed) < data.nbytes else (Codec.RAW, data)

    def decode_into(self, stored: Any, codec: int, out: Bytes) -> None:
        """Fill `out` (contiguous, 1-d) with the original bytes.

        Raises:
            CodecError: The stored bytes are damaged, or hold another number of bytes.
        """
        if codec == Codec.RAW:
            if len(stored) != out.nbytes:
                raise CodecError(f"{len(stored)} raw bytes where {out.nbytes} are promised")
            out[:] = np.frombuffer(stored, np.uint8)
            return
        if codec != Codec.ZSTD:
            raise CodecError(f"unknown codec {codec}")
        try:
            # The frame states its size; asking first bounds what may be allocated.
            if zstandard.frame_content_size(stored) != out.nbytes:
                raise CodecError(f"a zstd frame of another size than {out.nbytes} bytes")
            unpacked = self._decompressor.decompress(stored, max_output_size=out.nbytes)
        except zstandard.ZstdError as error:
            raise CodecError(str(error)) from None
        if len(unpacked) != out.nbytes:
            raise CodecError(f"{len(unpacked)} bytes decoded, {out.nbytes} promised")
        out[:] = np.frombuffer(unpacked, np.uint8)
