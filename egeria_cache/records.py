"""One sample's named values <-> one record of bytes: prefix, lengths, layout, payload. Pure.

The layout (names, kinds, dtypes, shapes) of all records of a batch is usually the same bytes, so
it is parsed once and then only compared. Byte for byte: docs/format.md. No pickle.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from egeria_cache.codec import Bytes, Codec, CodecError, Coder

__all__ = [
    "DTYPES", "FieldLayout", "Layout", "RecordError", "Rows", "Value", "decode_value",
    "encode_rows", "encode_value", "layout_of", "open_record",
]  # fmt: skip

Value = Tensor | str | bytes | int | float | bool | None
"""What one sample may hold under one name."""

MAGIC = b"EG"
VERSION = 1
PREFIX = struct.Struct("<Q2sBBI")
"""Checksum of all that follows it, magic, version, number of fields, bytes of layout."""
MAX_FIELDS, MAX_NDIM, MAX_LAYOUT_BYTES = 255, 32, 64 * 1024
MAX_FIELD_BYTES = 1 << 40
_LENGTH = struct.Struct("<Q")
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
_PLAIN = 255
"""Stands where a dtype's code would: the payload is a tagged scalar, text or bytes."""


class RecordError(ValueError):
    """These bytes are no intact record."""


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """What one name of a record holds."""

    name: str
    dtype: torch.dtype | None
    """None: a scalar, text or bytes; see `decode_value`."""
    shape: tuple[int, ...]
    num_bytes: int
    """Decoded; -1 if only the record's length tells (dtype None)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The constant part of a batch's records."""

    bare: bool
    """The tensors were handed over as one tensor, and come back so."""
    fields: tuple[FieldLayout, ...]


def layout_of(blob: bytes, num_fields: int) -> Layout:
    """Parse and check a layout; nothing is allocated by the sizes in it.

    Raises:
        RecordError: The bytes are no layout.
    """
    return _parse_layout(bytes(blob), num_fields)


@functools.lru_cache(maxsize=1024)
def _parse_layout(blob: bytes, num_fields: int) -> Layout:
    try:
        (flags,), at = struct.unpack_from("<B", blob), 1
        fields = []
        for _ in range(num_fields):
            name_bytes, code, ndim = struct.unpack_from("<HBB", blob, at)
            at += 4
            name = blob[at : at + name_bytes].decode("utf-8")
            at += name_bytes
            if ndim > MAX_NDIM or len(blob) < at + 8 * ndim:
                raise RecordError("a shape exceeds its record")
            shape = struct.unpack_from(f"<{ndim}Q", blob, at)
            at += 8 * ndim
            if code == _PLAIN:
                fields.append(FieldLayout(name, None, (), -1))
                continue
            dtype = DTYPES.get(code)
            if dtype is None:
                raise RecordError(f"unknown dtype code {code}")
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > MAX_FIELD_BYTES:
                raise RecordError(f"a field of {num_bytes} bytes")
            fields.append(FieldLayout(name, dtype, shape, num_bytes))
    except (struct.error, UnicodeDecodeError) as error:
        raise RecordError(f"damaged layout: {error}") from None
    if at != len(blob):
        raise RecordError("bytes left over after the layout")
    return Layout(bool(flags & 1), tuple(fields))


def _pack_layout(layout: Layout) -> bytes:
    parts = [struct.pack("<B", layout.bare)]
    for field in layout.fields:
        name = field.name.encode()
        code = _PLAIN if field.dtype is None else _CODES[field.dtype]
        parts.append(struct.pack("<HBB", len(name), code, len(field.shape)))
        parts.append(name + struct.pack(f"<{len(field.shape)}Q", *field.shape))
    return b"".join(parts)


def checksum(key: bytes, body: Any) -> int:
    """Return xxh3-64 of a record behind its checksum; the key seeds it, so that an intact record
    under another sample's key fails too.
    """
    return xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(key))


# -- scalars, texts, bytes -------------------------------------------------------------------


def encode_value(value: Value) -> bytes:
    """Return a tagged scalar, text or byte string.

    Raises:
        TypeError: The value is of another type.
    """
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        return b"i" + str(value).encode()
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"b" + value
    raise TypeError(
        "a sample may hold tensors, texts, bytes, numbers, bools and None; "
        f"got {type(value).__name__}"
    )


def decode_value(stored: bytes) -> Value:
    """Undo `encode_value`.

    Raises:
        RecordError: No such tag, or no such content.
    """
    tag, content = stored[:1], stored[1:]
    try:
        if tag == b"n" and not content:
            return None
        if tag in (b"t", b"f") and not content:
            return tag == b"t"
        if tag == b"i" and len(content) <= 4096:
            return int(content)
        if tag == b"d":
            return float(struct.unpack("<d", content)[0])
        if tag == b"s":
            return content.decode("utf-8", "surrogatepass")
        if tag == b"b":
            return content
    except (ValueError, struct.error):
        pass
    raise RecordError(f"not a stored value: {stored[:16]!r}")


# -- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch as the writer takes it: per name, a tensor with rows, or a list of values."""

    bare: bool
    fields: Mapping[str, Tensor | Sequence[Value]]

    def num_bytes(self) -> int:
        """Bytes the tensors hold in memory."""
        return sum(
            value.nbytes
            if isinstance(value, Tensor)
            else sum(item.nbytes for item in value if isinstance(item, Tensor))
            for value in self.fields.values()
        )


def to_bytes(tensor: Tensor) -> Bytes:
    """Return the tensor's elements as one flat array of bytes, without copying if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return plain.view(torch.uint8).numpy()


def encode_rows(
    keys: Sequence[bytes], picked: Sequence[int], rows: Rows, codec: Codec, coder: Coder
) -> list[tuple[bytes, Any]]:
    """Return (key, record) of the picked rows.

    Args:
        keys: One per row of the batch.
        picked: Rows to encode.
        rows: The batch.
        codec: Tried on every field large enough; a field it does not shrink stays raw.
        coder: This thread's own.

    Raises:
        TypeError: A value of a type that no record holds.
    """
    columns = [_column(name, value) for name, value in rows.fields.items()]
    records = []
    for row in picked:
        fields, lengths, payload = [], [], []
        for column in columns:
            field, data = column(row)
            used, stored = coder.encode(data, codec)
            fields.append(field)
            lengths.append(used << 56 | len(stored))
            payload.append(stored)
        layout = _pack_layout(Layout(rows.bare, tuple(fields)))
        head = struct.pack("<2sBBI", MAGIC, VERSION, len(fields), len(layout))
        body = b"".join((head, struct.pack(f"<{len(fields)}Q", *lengths), layout, *payload))
        records.append((keys[row], _LENGTH.pack(checksum(keys[row], body)) + body))
    return records


def _column(name: str, value: Tensor | Sequence[Value]) -> Any:
    if isinstance(value, Tensor):
        shape = tuple(value.shape[1:])
        row_bytes = math.prod(shape) * value.dtype.itemsize
        data = to_bytes(value).reshape(len(value), row_bytes)
        field = FieldLayout(name, value.dtype, shape, row_bytes)
        return lambda row: (field, data[row])

    def one(row: int) -> tuple[FieldLayout, Bytes]:
        item = value[row]
        if isinstance(item, Tensor):
            return FieldLayout(name, item.dtype, tuple(item.shape), item.nbytes), to_bytes(item)
        return FieldLayout(name, None, (), -1), np.frombuffer(encode_value(item), np.uint8)

    return one


# -- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """An intact record, still encoded."""

    layout: Layout
    stored: tuple[tuple[int, Any], ...]
    """Per field: codec and the bytes it made."""

    def decode_field(self, position: int, coder: Coder, out: Bytes) -> None:
        """Decode one tensor field into `out`, which has the layout's size."""
        codec, stored = self.stored[position]
        try:
            coder.decode_into(stored, codec, out)
        except CodecError as error:
            raise RecordError(str(error)) from None

    def value(self, position: int) -> Value:
        """Decode one field that is no tensor."""
        return decode_value(bytes(self.stored[position][1]))

    def tensor(self, position: int, coder: Coder) -> Tensor:
        """Decode one tensor field into a tensor of its own."""
        field = self.layout.fields[position]
        assert field.dtype is not None
        out = torch.empty(field.shape, dtype=field.dtype)
        self.decode_field(position, coder, out.view(-1).view(torch.uint8).numpy())
        return out


def open_record(key: bytes, value: Any) -> Record:
    """Check a record against its checksum and its own sizes; decode nothing yet.

    Args:
        key: The key it was found under.
        value: Its bytes, any buffer.

    Raises:
        RecordError: Damaged, cut short, of another version, or another sample's.
    """
    view = memoryview(value)
    if len(view) < PREFIX.size:
        raise RecordError(f"{len(view)} bytes are no record")
    expected, magic, version, num_fields, layout_bytes = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise RecordError("not a record")
    if version != VERSION:
        raise RecordError(f"record version {version}; this release reads {VERSION}")
    if checksum(key, view[8:]) != expected:
        raise RecordError("the checksum does not match")
    start = PREFIX.size + 8 * num_fields
    if layout_bytes > MAX_LAYOUT_BYTES or start + layout_bytes > len(view):
        raise RecordError("the layout exceeds the record")
    lengths = struct.unpack_from(f"<{num_fields}Q", view, PREFIX.size)
    layout = layout_of(bytes(view[start : start + layout_bytes]), num_fields)
    at, stored = start + layout_bytes, []
    for field, length in zip(layout.fields, lengths, strict=True):
        codec, size = length >> 56, length & _LENGTH_MASK
        if size > len(view) - at or (codec == Codec.RAW and 0 <= field.num_bytes != size):
            raise RecordError(f"field {field.name!r} exceeds the record")
        stored.append((codec, view[at : at + size]))
        at += size
    if at != len(view):
        raise RecordError("bytes left over after the payload")
    return Record(layout, tuple(stored))
