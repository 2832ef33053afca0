"""One sample's named values <-> one record of bytes. Pure; no pickle.

A record tells its own length and key, so that it can be found without the index. Its checksum
covers both, the layout of all records, and which generation it is of.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from egeria_cache.store import codecs
from egeria_cache.store.codecs import Codec, CodecError, Coder, Storage, decode
from egeria_cache.store.native import Bytes, kernel
from egeria_cache.store.schema import (
    FieldLayout,
    Layout,
    RecordError,
    Value,
    decode_value,
    encode_value,
)

ALIGNMENT = 8
HEAD = struct.Struct("<QII")
"""Checksum, bytes of the record, bytes of its key."""
CHECKSUM_BYTES, HEAD_BYTES = 8, HEAD.size
MAX_RECORD_BYTES = 1 << 31
MAX_RATIO_BITS = 22
"""zstd stores a block of 128 KiB in four bytes at best, a byte of a bitmap stands for 64 bytes of
zeros at most: 2^21 together. A field that claims twice that is refused before room is made."""
LENGTH_MASK = (1 << 56) - 1
NUM_RECORDS = 16
MIN_SAVING = 0.05
"""A codec that saves less than this part of the raw bytes is not worth its decoding."""
SAME_BYTES = 0.03
"""Within this margin of the smallest, the codec that decodes fastest is taken."""
FASTEST = (Codec.SPLIT, Codec.BITMAP, Codec.ZSTD)
"""To decode. What the clock said of a few records beside a training changed from run to run."""


Rows = Mapping[str, Tensor | Sequence[Value]]
"""A batch as the writer takes it: per name, a tensor with rows, or a list of values."""


def aligned(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def checksum_of(first: Any, payload: Iterable[Any], seed: int) -> int:
    """Return the checksum of a record's beginning and its stored fields."""
    checksum = xxhash.xxh3_64_intdigest(first, seed)
    for stored in payload:
        checksum = xxhash.xxh3_64_intdigest(stored, checksum)
    return checksum


# -- writing ---------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A record as the pieces that it is put together from when it is written."""

    layout: Layout
    key: bytes
    pieces: Sequence[Any]
    """Buffers."""
    size: int
    """Bytes of the record."""
    replaced: bytes | None = None
    """The last variant that it supersedes, as a key, which goes with the same commit, or nothing;
    None: nothing ever will be."""


Records = Sequence[Encoded]
"""Of one layout; of all or of none something may be superseded."""


def blocks(records: Records, most_bytes: int) -> Iterator[tuple[list[int], bytes]]:
    """Yield where each of some neighbours begins, and their bytes, each record at a multiple of 8:
    so many bytes together at most, or one record that is more.
    """
    starts, pieces, end = list[int](), list[Any](), 0
    for one in records:
        if starts and end + aligned(one.size) > most_bytes:
            yield starts, b"".join(pieces)
            starts, pieces, end = [], [], 0
        starts.append(end)
        pieces += (*one.pieces, bytes(aligned(one.size) - one.size))
        end += aligned(one.size)
    if starts:
        yield starts, b"".join(pieces)


def encode_rows(
    keys: Sequence[bytes],
    rows: Rows,
    coder: Coder,
    identity: int = 0,
    replaced: Sequence[bytes] | None = None,
    known: Layout | None = None,
) -> list[Encoded]:
    """Return the records of a batch's first rows.

    Args:
        keys: Of these rows.
        rows: The batch.
        coder: Its codec is tried on every field large enough; one it does not shrink stays raw.
        identity: Of the generation; part of the checksums.
        replaced: Per row, see `Encoded`.
        known: What the generation's records hold; None before the first one.

    Raises:
        TypeError: A value of a type that no record holds.
        ValueError: A record too large, or not of the layout that is known.
    """
    storages = {one.name: one.storage for one in known.fields} if known is not None else {}
    columns = [
        _column(name, value, storages.get(name, coder.storage)) for name, value in rows.items()
    ]
    layout = Layout(tuple(field for field, _ in columns))
    if known is not None and layout != known:
        raise ValueError(
            f"records here hold ({_in_words(known)}), and it holds ({_in_words(layout)})"
        )
    stored = [
        [coder.encode(data[row], field.elements) for row in range(len(keys))]
        if isinstance(data, np.ndarray)
        else [_encode_free(data[row], coder) for row in range(len(keys))]
        for field, data in columns
    ]
    every: Sequence[bytes | None] = replaced or [None] * len(keys)
    seed = identity ^ layout.seed
    made = [_pieces(key, own, seed) for key, *own in zip(keys, *stored, strict=True)]
    return [
        Encoded(layout, key, pieces, sum(map(len, pieces)), last)
        for key, pieces, last in zip(keys, made, every, strict=True)
    ]


def choose_codec(keys: Sequence[bytes], rows: Rows, coder: Coder) -> str:
    """Set the codec for these records; return what each made of them in words.

    Smallest wins; among equals the fastest to decode; raw unless something is saved.
    """
    sizes = {}
    for codec in Codec if kernel() is not None else (Codec.RAW, Codec.ZSTD):
        trial = Coder(codec.label, coder.storage)
        sizes[codec] = sum(one.size for one in encode_rows(keys[:NUM_RECORDS], rows, trial))
    best, least = Codec.RAW, min(sizes.values())
    if least <= (1 - MIN_SAVING) * sizes[best]:
        small = [codec for codec, size in sizes.items() if size <= (1 + SAME_BYTES) * least]
        best = next((codec for codec in FASTEST if codec in small), small[0])
    coder.codec = best
    made = ", ".join(f"{codec.label} {size} B" for codec, size in sizes.items())
    return f"{best.label}: {made}"


def _in_words(layout: Layout) -> str:
    return ", ".join(f"{one.name}: {one.kind}" for one in layout.fields)


def _pieces(key: bytes, fields: Sequence[tuple[int, Any]], seed: int) -> Sequence[Any]:
    head, words, payload = _first(len(key), len(fields)), [], []
    for codec, stored in fields:
        words.append(codec << 56 | len(stored))
        payload.append(stored)
    size = CHECKSUM_BYTES + head.size + sum(map(len, payload))
    if size > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {size} bytes; {MAX_RECORD_BYTES} are stored at most")
    first = head.pack(size, len(key), key, *words)
    return checksum_of(first, payload, seed).to_bytes(8, "little"), first, *payload


@cache
def _first(key_bytes: int, num_fields: int) -> struct.Struct:
    """What of a record stands between its checksum and its fields."""
    return struct.Struct(f"<II{aligned(key_bytes)}s{num_fields}Q")


def _column(
    name: str, value: Tensor | Sequence[Value], storage: Storage
) -> tuple[FieldLayout, Bytes | Sequence[Value]]:
    """Return what is the same in all rows, and (B, bytes), without copying if possible; or what
    each record tells of itself.
    """
    if not isinstance(value, Tensor):
        return FieldLayout(name), value
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    packed, used = codecs.pack(plain, storage)
    return FieldLayout(name, value.dtype, tuple(value.shape[1:]), used), packed.numpy()


def _encode_free(value: Value, coder: Coder) -> tuple[Codec, bytes]:
    if not isinstance(value, Tensor):
        return Codec.RAW, encode_value(value)
    field, data = _column("", value[None], coder.storage)
    assert isinstance(data, np.ndarray)
    used, stored = coder.encode(data[0], field.elements)
    head = json.dumps(field.told(), separators=(",", ":")).encode()
    return used, b"".join((b"t", len(head).to_bytes(2, "little"), head, stored))


# -- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """An intact record, still encoded."""

    whole: memoryview
    layout: Layout
    codecs: tuple[int, ...]
    """Per field."""
    payload: tuple[memoryview, ...]
    """Per field."""

    @classmethod
    def open(cls, key: bytes, value: Any, layout: Layout, identity: int = 0) -> Record:
        """Check a record against its own sizes and its checksum; decode nothing yet.

        Args:
            key: The key it was found under.
            value: Its bytes, any buffer.
            layout: Of the generation's records.
            identity: Of the generation.

        Raises:
            RecordError: Damaged, cut short, or of another sample, layout or generation.
        """
        view, count = memoryview(value), len(layout.fields)
        if len(view) < HEAD_BYTES:
            raise RecordError(f"{len(view)} bytes are no record")
        expected, size, key_bytes = HEAD.unpack_from(view)
        begin = HEAD_BYTES + aligned(key_bytes)
        end = begin + 8 * count
        if size != len(view) or end > size:
            raise RecordError(f"a record of {size} bytes in an entry of {len(view)}")
        if view[HEAD_BYTES : HEAD_BYTES + key_bytes] != key:
            raise RecordError("it is another sample's")
        words = struct.unpack_from(f"<{count}Q", view, begin)
        ends = [*itertools.accumulate((word & LENGTH_MASK for word in words), initial=end)]
        payload = tuple(view[one:next_] for one, next_ in itertools.pairwise(ends))
        checksum = checksum_of(view[CHECKSUM_BYTES:end], payload, identity ^ layout.seed)
        if ends[-1] != size or checksum != expected:
            raise RecordError("the checksum does not match")
        return cls(view, layout, tuple(word >> 56 for word in words), payload)

    def field(self, position: int) -> tuple[FieldLayout, memoryview]:
        """Return what a field holds in this record, and its numbers.

        Raises:
            RecordError: It tells of no tensor that there is.
        """
        field, stored = self.layout.fields[position], self.payload[position]
        if field.dtype is not None or bytes(stored[:1]) != b"t":
            return field, stored
        end = 3 + int.from_bytes(stored[1:3], "little")
        return _told(bytes(stored[3:end])), stored[end:]

    def value(self, position: int) -> Value:
        """Decode one field.

        Raises:
            RecordError: It is not what the layout says.
            NeedsKernelError: Nothing here can decode it.
        """
        (field, stored), codec = self.field(position), self.codecs[position]
        if field.dtype is None:
            if codec != Codec.RAW:
                raise RecordError("a scalar or text with a codec")
            return decode_value(bytes(stored))
        if field.num_bytes > len(stored) << MAX_RATIO_BITS:
            raise RecordError(f"{field.kind}: only {len(stored)} bytes")
        packed = torch.empty(field.num_bytes, dtype=torch.uint8)
        try:
            decode(stored, codec, packed.numpy(), field.elements)
            if field.storage is None:
                return packed.view(field.dtype).view(field.shape)
            return codecs.unpack(packed[None], field.shape, field.dtype, field.storage)[0]
        except (CodecError, RuntimeError) as error:  # a forged shape that no tensor can have
            raise RecordError(str(error)) from None


@lru_cache(4096)
def _told(head: bytes) -> FieldLayout:
    """Return what a tensor of a record tells of itself."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return FieldLayout.of(json.loads(head))
    raise RecordError("what it tells of itself is damaged")


def key_of(record: Any) -> bytes:
    """Return the key that a record claims."""
    return bytes(record[HEAD_BYTES : HEAD_BYTES + HEAD.unpack_from(record)[2]])


def split_block(block: memoryview) -> Iterator[memoryview]:
    """Yield the records of a block, unchecked, as far as their lengths lead."""
    at = 0
    while len(block) - at >= HEAD_BYTES:
        size = HEAD.unpack_from(block, at)[1]
        if not HEAD_BYTES <= size <= len(block) - at:
            return
        yield block[at : at + size]
        at += aligned(size)
