"""The head of a record: which fields, how stored, how long. Pure.

The heads of a batch's records are the same bytes but for checksum and lengths, so one is parsed and
the others are only compared. Byte for byte: docs/format.md.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from egeria_cache.store.codecs.codec import Codec, Elements
from egeria_cache.store.codecs.lossy import CODES, Storage, storage_bytes
from egeria_cache.store.records.values import RecordError

__all__ = [
    "CHECKSUM",
    "CHECKSUM_BYTES",
    "DTYPES",
    "PREFIX_BYTES",
    "FieldLayout",
    "Head",
    "Layout",
    "pack_head",
    "parse_head",
    "payload_seed",
    "split_lengths",
]

MAGIC, VERSION = b"EG", 1
_PREFIX = struct.Struct("<Q2sBBI")
"""Checksum, magic, version, number of fields, bytes of layout."""
CHECKSUM = struct.Struct("<Q")
CHECKSUM_BYTES, PREFIX_BYTES = CHECKSUM.size, _PREFIX.size
MAX_FIELDS, MAX_NDIM, MAX_LAYOUT_BYTES = 255, 32, 64 * 1024
MAX_FIELD_BYTES = 1 << 40
MAX_RATIO_BITS = 22
"""zstd stores a block of 128 KiB in four bytes at best, a byte of a bitmap stands for 64 bytes of
zeros at most: 2^21 together. A field that claims twice that is refused before room is made."""
_LENGTH_MASK = (1 << 56) - 1

_DTYPE_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32",
)  # fmt: skip
DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
"""Codes on disk; a code this torch does not know makes the record unreadable, not wrong."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_STORAGE_CODES = {storage: code for code, storage in CODES.items()}
_PLAIN = 255
"""Stands where a dtype's code would: the field is a tagged scalar, text or byte string."""


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """What one name of a record holds."""

    name: str
    dtype: torch.dtype | None
    """None: a scalar, text or bytes; see `values`."""
    shape: tuple[int, ...]
    num_bytes: int
    """Before the codec; -1 if only the record tells (dtype None)."""
    storage: Storage = None
    """Lossy number format of the stored elements; None: `dtype` itself."""

    @property
    def elements(self) -> Elements:
        """What the codec wants to know of the numbers; a complex one is two."""
        if self.dtype is None or self.storage == "int8":
            return 1, False
        if self.storage is not None:
            return 2, True
        if self.dtype.is_complex:
            return self.dtype.itemsize // 2, True
        return self.dtype.itemsize, self.dtype.is_floating_point


@dataclass(frozen=True, slots=True)
class Layout:
    """The constant part of a batch's records."""

    bare: bool
    """The tensors were handed over as one tensor, and come back so."""
    fields: tuple[FieldLayout, ...]

    @property
    def names(self) -> list[str]:
        """Of the fields."""
        return [field.name for field in self.fields]


@dataclass(frozen=True, slots=True)
class Head:
    """All of a record before its payload, but for the checksum."""

    layout: Layout
    stored: tuple[tuple[int, int], ...]
    """Per field: codec and length of what it made."""
    num_bytes: int
    """Where the payload begins."""
    record_bytes: int
    """Length the whole record must have."""
    seed: int
    """Hash of these bytes; part of the payload's checksum."""

    @property
    def row_bytes(self) -> int:
        """Bytes of its tensors, decoded."""
        return sum(max(field.num_bytes, 0) for field in self.layout.fields)

    @property
    def raw(self) -> bool:
        """Every tensor is stored as it lies in memory."""
        return all(codec == Codec.RAW for codec, _ in self.stored)


def parse_head(value: memoryview) -> Head:
    """Parse and bound a record's head; nothing is allocated by the sizes in it.

    Raises:
        RecordError: No record, of another version, or its sizes contradict its length.
    """
    if len(value) < _PREFIX.size:
        raise RecordError(f"{len(value)} bytes are no record")
    _, magic, version, num_fields, layout_bytes = _PREFIX.unpack_from(value)
    if magic != MAGIC:
        raise RecordError("not a record")
    if version != VERSION:
        raise RecordError(f"record version {version}; this release reads {VERSION}")
    end = _PREFIX.size + 8 * num_fields + layout_bytes
    if layout_bytes > MAX_LAYOUT_BYTES or end > len(value):
        raise RecordError("the head exceeds the record")
    return _parse_head(bytes(value[CHECKSUM_BYTES:end]), num_fields, layout_bytes, len(value))


@functools.lru_cache(maxsize=1024)
def _parse_head(blob: bytes, num_fields: int, layout_bytes: int, record_bytes: int) -> Head:
    """Many records have the same head, those of raw tensors all of one size."""
    layout = _parse_layout(blob[len(blob) - layout_bytes :], num_fields)
    lengths = struct.unpack_from(f"<{num_fields}Q", blob, PREFIX_BYTES - CHECKSUM_BYTES)
    end = CHECKSUM_BYTES + len(blob)
    return _bounded(layout, lengths, end, xxhash.xxh3_64_intdigest(blob), record_bytes)


def split_lengths(
    lengths: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return (codecs, stored bytes) of the numbers behind the prefix."""
    return lengths >> np.uint64(56), (lengths & np.uint64(_LENGTH_MASK)).astype(np.int64)


def _bounded(
    layout: Layout, lengths: Sequence[int], end: int, seed: int, record_bytes: int
) -> Head:
    stored = tuple((length >> 56, length & _LENGTH_MASK) for length in lengths)
    promised = end + sum(size for _, size in stored)
    if promised != record_bytes:
        raise RecordError(f"a record of {promised} bytes in an entry of {record_bytes}")
    for field, (codec, size) in zip(layout.fields, stored, strict=True):
        if codec == Codec.RAW and field.num_bytes not in (-1, size):
            raise RecordError(f"field {field.name!r} has {size} bytes, not {field.num_bytes}")
        if field.num_bytes > size << MAX_RATIO_BITS:
            raise RecordError(f"field {field.name!r}: {size} bytes for {field.num_bytes}")
    return Head(layout, stored, end, record_bytes, seed)


def payload_seed(head_seed: int, key: bytes, identity: int) -> int:
    """Return the seed of a payload's xxh3-64. It covers the head, the key and the generation: an
    intact record found under another sample's key, or in another generation, fails too.
    """
    return head_seed ^ xxhash.xxh3_64_intdigest(key) ^ identity


@functools.lru_cache(maxsize=1024)
def _parse_layout(blob: bytes, num_fields: int) -> Layout:
    try:
        (flags,), at = struct.unpack_from("<B", blob), 1
        fields = []
        for _ in range(num_fields):
            name_bytes, code, storage_code, ndim = struct.unpack_from("<HBBB", blob, at)
            at += 5
            name = blob[at : at + name_bytes].decode()
            at += name_bytes
            if ndim > MAX_NDIM:
                raise RecordError(f"a tensor of {ndim} dimensions")
            shape = struct.unpack_from(f"<{ndim}Q", blob, at)
            at += 8 * ndim
            if code == _PLAIN:
                fields.append(FieldLayout(name, None, (), -1))
                continue
            dtype = DTYPES.get(code)
            if dtype is None:
                raise RecordError(f"unknown dtype code {code}")
            if storage_code not in CODES:
                raise RecordError(f"unknown storage code {storage_code}")
            storage = CODES[storage_code]
            num_bytes = storage_bytes(shape, dtype, storage)
            if num_bytes > MAX_FIELD_BYTES or max(shape, default=0) > MAX_FIELD_BYTES:
                raise RecordError(f"a tensor of shape {shape}")
            fields.append(FieldLayout(name, dtype, shape, num_bytes, storage))
    except (struct.error, UnicodeDecodeError) as error:
        raise RecordError(f"damaged layout: {error}") from None
    if len(blob) % 8 or len(blob) - at not in range(8) or any(blob[at:]):
        raise RecordError("bytes left over after the layout")
    return Layout(bool(flags & 1), tuple(fields))


def pack_head(layout: Layout, lengths: Sequence[int]) -> bytes:
    """Return all of the head behind the checksum.

    Raises:
        ValueError: More fields, dimensions or bytes of names than a record can tell of, or a dtype
            that has no code.
    """
    count = len(lengths)
    if count > MAX_FIELDS or any(len(field.shape) > MAX_NDIM for field in layout.fields):
        raise ValueError(f"a record holds {MAX_FIELDS} fields of {MAX_NDIM} dimensions at most")
    num_bytes = sum(5 + len(field.name.encode()) + 8 * len(field.shape) for field in layout.fields)
    if num_bytes >= MAX_LAYOUT_BYTES:
        raise ValueError(f"{num_bytes} bytes of names and shapes, a record holds fewer than 65536")
    parts = [struct.pack("<B", layout.bare)]
    for field in layout.fields:
        name = field.name.encode()
        code = _PLAIN if field.dtype is None else _CODES.get(field.dtype)
        if code is None:
            raise ValueError(f"{field.name!r}: no record holds tensors of {field.dtype}")
        storage_code = _STORAGE_CODES[field.storage]
        parts.append(struct.pack("<HBBB", len(name), code, storage_code, len(field.shape)))
        parts.append(name + struct.pack(f"<{len(field.shape)}Q", *field.shape))
    blob = b"".join(parts)
    blob += bytes(-len(blob) % 8)  # the payload is aligned
    return struct.pack(f"<2sBBI{count}Q", MAGIC, VERSION, count, len(blob), *lengths) + blob
