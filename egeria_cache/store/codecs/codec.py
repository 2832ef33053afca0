"""Bytes of fields -> fewer bytes, and back, losslessly. Pure; one `Coder` per thread.

No single codec wins (measured in docs/format.md): zstd for anything with repetitions, split planes
for dense floats, a bitmap of the zeros before the split for activations behind a ReLU. A zstd
context must not be shared between threads (it segfaults), hence the class.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from egeria_cache.store.codecs.gather import Bytes, Places, Scratch, Source, copy_parts
from egeria_cache.store.codecs.planes import GROUPS, Elements, cut, expand, join, numbers_of, rank
from egeria_cache.store.native import Kernel, Unpacker, kernel

__all__ = ["Bytes", "Codec", "CodecError", "Coder", "Elements", "Fields"]

SMALL_BYTES = 256
"""Fields below this stay raw: a label gains nothing from a codec."""

CHUNK_BYTES = 2 * 2**20
"""Decoded bytes that are worked on at a time without the kernel: few passes, and the temporaries
are bounded."""

_WORTH = 0.95
"""A plane is compressed if that leaves at most this part of it; else it is copied, far faster."""

_BITMAP_WORTH = 0.5
"""The same for a bitmap: it is a thirty-second part of what it stands for, or a sixteenth."""

_BITMAP_HEAD_BYTES = 16
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


@dataclass(frozen=True, slots=True)
class Fields:
    """N encoded fields of one layout."""

    source: Source
    """Where they lie."""
    starts: Places
    """Of each of them, shape (N,)."""
    sizes: Places
    """Of each of them, shape (N,); all of it within the source."""
    codec: int
    elements: Elements

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, chosen: slice | Places) -> Fields:
        """Return some of them."""
        return replace(self, starts=self.starts[chosen], sizes=self.sizes[chosen])


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
        self._unpacker: Unpacker | None = None
        self.scratch = Scratch()
        """Of this thread, as is the coder."""

    def unpacker(self, native: Kernel) -> Unpacker:
        """Return zstd's state for the kernel."""
        if self._unpacker is None:
            self._unpacker = native.unpacker()
        return self._unpacker

    def encode(self, data: Bytes, codec: Codec, elements: Elements) -> tuple[Codec, Any]:
        """Return (codec used, buffer); raw where the codec saves nothing."""
        if codec is Codec.RAW or data.nbytes < SMALL_BYTES:
            return Codec.RAW, data
        width, _ = elements
        if codec is Codec.ZSTD or width not in GROUPS:
            codec, packed = Codec.ZSTD, self._general.compress(data.data)
        elif codec is Codec.SPLIT:
            packed = self._split(numbers_of(data, width), elements)
        else:
            numbers = numbers_of(data, width)
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
        """
        zero, size = np.zeros(1, np.int64), np.array([len(stored)], np.int64)
        fields = Fields(Source.of(stored), zero, size, codec, elements)
        failed = self.decode_many(fields, out[None], zero)
        if failed:
            raise failed[0]

    def decode_many(self, fields: Fields, out: Bytes, rows: Places) -> dict[int, CodecError]:
        """Decode fields.

        Args:
            fields: What to decode.
            out: Shape (B, bytes), contiguous.
            rows: Of `out`, in rising order; filled. Shape (N,).

        Returns:
            The positions, of N, that could not be decoded, and why; their rows are arbitrary.
        """
        failed: dict[int, CodecError] = {}
        left = self._decode_natively(fields, out, rows)
        at_once = max(1, CHUNK_BYTES // max(out.shape[1], 1))
        for begin in range(0, len(left), at_once):
            chosen = left[begin : begin + at_once]
            problems = self._decode_chunk(fields[chosen], out, rows[chosen])
            failed |= {int(chosen[at]): error for at, error in problems.items()}
        return failed

    # -- decoding ---------------------------------------------------------------------------

    def _decode_natively(self, fields: Fields, out: Bytes, rows: Places) -> Places:
        """Decode by the kernel; return the positions that are left, all of them without one."""
        native, num_bytes, (width, _) = kernel(), out.shape[1], fields.elements
        if native is None or width not in GROUPS or num_bytes % width:
            return np.arange(len(fields))
        found = native.decode(
            self.unpacker(native), fields.codec, fields.source.data, fields.starts, fields.sizes,
            out, rows, fields.elements,
        )  # fmt: skip
        return np.flatnonzero(~found)

    def _decode_chunk(self, fields: Fields, out: Bytes, rows: Places) -> dict[int, CodecError]:
        """Decode some together, in passes of NumPy; return those that failed, by position."""
        first, end = int(rows[0]), int(rows[-1]) + 1
        adjacent = end - first == len(rows)
        part = out[first:end] if adjacent else np.empty_like(out[: len(rows)])
        failed: dict[int, CodecError] = {}
        try:
            self._decode(fields, part)
        except CodecError:
            for at in range(len(fields)):
                one = slice(at, at + 1)
                try:
                    self._decode(fields[one], part[one])
                except CodecError as error:
                    failed[at] = error
        if not adjacent:
            out[rows] = part
        return failed

    def _decode(self, fields: Fields, out: Bytes) -> None:
        source, starts, sizes, codec = fields.source, fields.starts, fields.sizes, fields.codec
        num_bytes, (width, _) = out.shape[1], fields.elements
        if codec == Codec.RAW:
            if (sizes != num_bytes).any():
                raise CodecError(f"{sizes.tolist()[0]} raw bytes, {num_bytes} promised")
            out[:] = source.rows(starts, num_bytes)
        elif codec == Codec.ZSTD:
            promised = np.full(len(starts), num_bytes)
            unpacked = self._expand(source.slices(starts, sizes), promised)
            copy_parts(unpacked, promised.tolist(), out.reshape(-1))
        elif codec == Codec.SPLIT and width in GROUPS:
            counts = np.full(len(starts), num_bytes // width)
            blocks = _planes(source, starts, sizes, counts, width)
            numbers = numbers_of(out.reshape(-1), width)
            join(self._unpack(source, blocks), numbers, fields.elements, self.scratch)
        elif codec == Codec.BITMAP and width in GROUPS:
            if (sizes < _BITMAP_HEAD_BYTES).any():
                raise CodecError("bitmap cut short")
            plain = source.words(starts, 1)[:, 0] >= _AS_THEY_ARE
            for chosen in (~plain, plain):
                if chosen.all():
                    self._scatter(fields, out, rotates=chosen is not plain)
                elif chosen.any():
                    part = np.empty_like(out[chosen])
                    self._scatter(fields[np.flatnonzero(chosen)], part, rotates=chosen is not plain)
                    out[chosen] = part
        else:
            raise CodecError(f"unknown codec {codec}")

    def _scatter(self, fields: Fields, out: Bytes, *, rotates: bool) -> None:
        """Fill `out` (N, bytes) from bitmaps and the planes of what they mark."""
        source, starts, sizes = fields.source, fields.starts, fields.sizes
        width, floating = fields.elements
        num_elements = out.shape[1] // width
        if not num_elements:
            raise CodecError("bitmap of nothing")
        heads = source.words(starts, 2)
        heads[:, 0] &= np.uint64(_AS_THEY_ARE - 1)
        lengths = heads[:, 1] >> 1
        if (heads[:, 0] > num_elements).any() or (lengths + _BITMAP_HEAD_BYTES > sizes).any():
            raise CodecError("a bitmap of more elements than the field has")
        counts, ends = heads[:, 0].astype(np.int64), _BITMAP_HEAD_BYTES + lengths.astype(np.int64)
        promised = np.full(len(starts), -(-num_elements // 8))
        bitmap = _Blocks.of(starts + _BITMAP_HEAD_BYTES, heads[:, 1], promised)
        planes = _planes(source, starts + ends, sizes - ends, counts, width)
        bitmaps, *joined = self._unpack(source, [bitmap, *planes])
        scratch = self.scratch
        ranks, marked = rank(bitmaps.reshape(len(starts), -1), num_elements, scratch)
        if (marked != counts).any():
            raise CodecError("the bitmap marks another number of elements")
        numbers = numbers_of(out.reshape(-1), width)
        values = scratch.array("values", 1 + int(counts.sum()), numbers.dtype)
        values[0] = 0
        join(joined, values[1:], (width, floating and rotates), scratch)
        expand(ranks, values, numbers)

    def _unpack(self, source: Source, kinds: Sequence[_Blocks]) -> list[Bytes]:
        """Return, per kind, its blocks of all records, unpacked, one behind the other.

        All that is compressed goes through zstd in one call, which holds no GIL.
        """
        frames: list[Any] = []
        for kind in kinds:
            frames += source.slices(kind.starts[kind.packed], kind.sizes[kind.packed])
        promised = np.concatenate([kind.promised[kind.packed] for kind in kinds])
        unpacked = iter(self._expand(frames, promised))
        whole: list[Bytes] = []
        for kind in kinds:
            parts: list[Any] = source.slices(kind.starts, kind.sizes)
            for at in np.flatnonzero(kind.packed).tolist():
                parts[at] = next(unpacked)
            name = f"blocks {len(whole)}"
            whole.append(self.scratch.joined(name, parts, kind.promised.tolist()))
        return whole

    def _expand(self, frames: list[Any], promised: Places) -> list[Any]:
        """Unpack zstd frames to exactly the promised sizes, which bound what is allocated."""
        if not frames:  # zstandard would divide by zero
            return []
        if (promised <= 0).any():  # it would believe the frame instead
            raise CodecError("a zstd frame of nothing")
        sizes: Any = promised.astype("<u8").tobytes()
        try:
            # One thread: starting a second one takes longer than it saves, and batches are
            # divided among the store's own threads already.
            unpacked: Any = self._decompressor.multi_decompress_to_buffer(
                frames, decompressed_sizes=sizes, threads=1
            )
        except (zstandard.ZstdError, ValueError) as error:
            raise CodecError(f"not what was promised: {error}") from None
        parts = [unpacked[position] for position in range(len(unpacked))]
        if len(parts) != len(frames):
            raise CodecError("zstd frames that hold several fields")
        return parts

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


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The same part of each of N records: one plane, or the bitmap."""

    starts: Places
    sizes: Places
    packed: npt.NDArray[np.bool_]
    """By zstd."""
    promised: Places
    """Bytes when unpacked."""

    @classmethod
    def of(cls, starts: Places, heads: npt.NDArray[np.uint64], promised: Places) -> _Blocks:
        """Read the length and flag of each.

        Raises:
            CodecError: One that is not compressed has another size than it should.
        """
        sizes, packed = (heads >> 1).astype(np.int64), (heads & 1).astype(np.bool_)
        if (sizes[~packed] != promised[~packed]).any():
            raise CodecError("a plane of another size than promised")
        return cls(starts, sizes, packed, promised)


def _planes(
    source: Source, starts: Places, sizes: Places, counts: Places, width: int
) -> list[_Blocks]:
    """Find the planes of fields of `counts` elements each."""
    groups = GROUPS[width]
    at = 8 * len(groups)
    if (sizes < at).any():
        raise CodecError("planes cut short")
    heads = source.words(starts, len(groups))
    lengths = heads >> 1
    if (lengths > sizes[:, None]).any() or (lengths.sum(1) + at != sizes).any():
        raise CodecError("planes of another length than promised")
    blocks, begins = [], starts + at
    for position, (size, _) in enumerate(groups):
        blocks.append(_Blocks.of(begins, heads[:, position], size * counts))
        begins = begins + lengths[:, position].astype(np.int64)
    return blocks
