"""One sample's named values <-> one record of bytes: head, then payload. Pure.

The heads of a batch's raw records are the same bytes but for the checksum, so they are parsed once
and then only compared. Byte for byte: docs/format.md. No pickle.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from egeria_cache.codec import Bytes, Codec, CodecError, Coder, Elements
from egeria_cache.values import RecordError, Value, decode_value, encode_value

__all__ = [
    "CHECKSUM_BYTES",
    "DTYPES",
    "FieldLayout",
    "Head",
    "Record",
    "Rows",
    "encode_rows",
    "open_record",
    "parse_head",
    "payload_seed",
]

MAGIC, VERSION = b"EG", 1
_PREFIX = struct.Struct("<Q2sBBI")
"""Checksum, magic, version, number of fields, bytes of layout."""
CHECKSUM_BYTES = 8
MAX_NDIM, MAX_LAYOUT_BYTES = 32, 64 * 1024
MAX_FIELD_BYTES = 1 << 40
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
"""Stands where a dtype's code would: the field is a tagged scalar, text or byte string."""


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """What one name of a record holds."""

    name: str
    dtype: torch.dtype | None
    """None: a scalar, text or bytes; see `values`."""
    shape: tuple[int, ...]
    num_bytes: int
    """Decoded; -1 if only the record tells (dtype None)."""

    @property
    def elements(self) -> Elements:
        """What the codec wants to know of the numbers; a complex one is two."""
        if self.dtype is None:
            return 1, False
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
    def raw(self) -> bool:
        """Every tensor is stored as it lies in memory."""
        return all(codec == Codec.RAW for codec, _ in self.stored)


def parse_head(value: memoryview) -> Head:
    """Parse and bound a record's head; nothing is allocated by the sizes in it.

    Only the head's own bytes are touched: the length LMDB gave may be damaged, and what lies
    behind it may not be mapped.

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
    lengths = struct.unpack_from(f"<{num_fields}Q", value, _PREFIX.size)
    layout = _parse_layout(bytes(value[end - layout_bytes : end]), num_fields)
    stored = tuple((length >> 56, length & _LENGTH_MASK) for length in lengths)
    record_bytes = end + sum(size for _, size in stored)
    if record_bytes != len(value):
        raise RecordError(f"a record of {record_bytes} bytes in an entry of {len(value)}")
    for field, (codec, size) in zip(layout.fields, stored, strict=True):
        if codec == Codec.RAW and field.num_bytes not in (-1, size):
            raise RecordError(f"field {field.name!r} has {size} bytes, not {field.num_bytes}")
    seed = xxhash.xxh3_64_intdigest(value[CHECKSUM_BYTES:end])
    return Head(layout, stored, end, record_bytes, seed)


def payload_seed(head_seed: int, key: bytes) -> int:
    """Return the seed of a payload's xxh3-64. It covers the head, and the key: an intact record
    found under another sample's key fails too.
    """
    return head_seed ^ xxhash.xxh3_64_intdigest(key)


@functools.lru_cache(maxsize=1024)
def _parse_layout(blob: bytes, num_fields: int) -> Layout:
    try:
        (flags,), at = struct.unpack_from("<B", blob), 1
        fields = []
        for _ in range(num_fields):
            name_bytes, code, ndim = struct.unpack_from("<HBB", blob, at)
            at += 4
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
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > MAX_FIELD_BYTES or max(shape, default=0) > MAX_FIELD_BYTES:
                raise RecordError(f"a tensor of shape {shape}")
            fields.append(FieldLayout(name, dtype, shape, num_bytes))
    except (struct.error, UnicodeDecodeError) as error:
        raise RecordError(f"damaged layout: {error}") from None
    if len(blob) % 8 or len(blob) - at not in range(8) or any(blob[at:]):
        raise RecordError("bytes left over after the layout")
    return Layout(bool(flags & 1), tuple(fields))


def _pack_head(layout: Layout, lengths: Sequence[int]) -> bytes:
    """Return all of the head behind the checksum."""
    parts = [struct.pack("<B", layout.bare)]
    for field in layout.fields:
        name = field.name.encode()
        code = _PLAIN if field.dtype is None else _CODES[field.dtype]
        parts.append(struct.pack("<HBB", len(name), code, len(field.shape)))
        parts.append(name + struct.pack(f"<{len(field.shape)}Q", *field.shape))
    blob = b"".join(parts)
    blob += bytes(-len(blob) % 8)  # the payload is aligned
    count = len(lengths)
    return struct.pack(f"<2sBBI{count}Q", MAGIC, VERSION, count, len(blob), *lengths) + blob


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


Encoded = list[tuple[bytes, Any]]
"""(key, record) per row; the record is any buffer."""


def encode_rows(
    keys: Sequence[bytes], picked: Sequence[int], rows: Rows, codec: Codec, coder: Coder
) -> Encoded:
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
    if codec is Codec.RAW and all(isinstance(value, Tensor) for value in rows.fields.values()):
        return _encode_raw(keys, picked, rows)
    columns = [_column(name, value) for name, value in rows.fields.items()]
    records: Encoded = []
    for row in picked:
        fields, lengths, payload = [], [], []
        for column in columns:
            field, data = column(row)
            # A text stays raw: its decoded size is not in the layout.
            wanted = codec if field.dtype is not None else Codec.RAW
            used, stored = coder.encode(data, wanted, field.elements)
            fields.append(field)
            lengths.append(used << 56 | len(stored))
            payload.append(stored)
        head = _pack_head(Layout(rows.bare, tuple(fields)), lengths)
        body = b"".join(payload)
        seed = payload_seed(xxhash.xxh3_64_intdigest(head), keys[row])
        checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(body, seed=seed))
        records.append((keys[row], b"".join((checksum, head, body))))
    return records


def _encode_raw(keys: Sequence[bytes], picked: Sequence[int], rows: Rows) -> Encoded:
    """All records at once, as the rows of one array."""
    fields, columns = [], []
    for name, value in rows.fields.items():
        assert isinstance(value, Tensor)
        field, data = _matrix(name, value)
        fields.append(field)
        columns.append(data if len(picked) == len(data) else data[np.asarray(picked)])
    head = _pack_head(Layout(rows.bare, tuple(fields)), [field.num_bytes for field in fields])
    start = CHECKSUM_BYTES + len(head)
    at = start
    block = np.empty((len(picked), start + sum(field.num_bytes for field in fields)), np.uint8)
    block[:, CHECKSUM_BYTES:start] = np.frombuffer(head, np.uint8)
    for field, column in zip(fields, columns, strict=True):
        block[:, at : at + field.num_bytes] = column
        at += field.num_bytes
    head_seed, digest = xxhash.xxh3_64_intdigest(head), xxhash.xxh3_64_intdigest
    checksums = [
        digest(block[position, start:].data, seed=payload_seed(head_seed, keys[row]))
        for position, row in enumerate(picked)
    ]
    block[:, :CHECKSUM_BYTES] = np.array(checksums, "<u8")[:, None].view(np.uint8)
    return [(keys[row], block[position].data) for position, row in enumerate(picked)]


def to_bytes(tensor: Tensor) -> Bytes:
    """Return the tensor's elements as one flat array of bytes, without copying if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    flat: Bytes = plain.view(torch.uint8).numpy()
    return flat


def _matrix(name: str, value: Tensor) -> tuple[FieldLayout, Bytes]:
    shape = tuple(value.shape[1:])
    row_bytes = math.prod(shape) * value.dtype.itemsize
    field = FieldLayout(name, value.dtype, shape, row_bytes)
    return field, to_bytes(value).reshape(len(value), row_bytes)


def _column(
    name: str, value: Tensor | Sequence[Value]
) -> Callable[[int], tuple[FieldLayout, Bytes]]:
    """Return a function from the row to what it holds."""
    if isinstance(value, Tensor):
        field, data = _matrix(name, value)
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

    head: Head
    payload: tuple[memoryview, ...]
    """Per field."""

    @property
    def layout(self) -> Layout:
        """Names, dtypes and shapes."""
        return self.head.layout

    def decode_field(self, position: int, coder: Coder, out: Bytes) -> None:
        """Decode one tensor field into `out`, which has the layout's size."""
        codec, _ = self.head.stored[position]
        try:
            coder.decode_into(
                self.payload[position], codec, out, self.layout.fields[position].elements
            )
        except CodecError as error:
            raise RecordError(str(error)) from None

    def codec_name(self, position: int) -> str:
        """Name of the codec of one field, in words."""
        code = self.head.stored[position][0]
        return Codec(code).label if code in Codec._value2member_map_ else f"unknown codec {code}"

    def value(self, position: int) -> Value:
        """Decode one field that is no tensor."""
        if self.head.stored[position][0] != Codec.RAW:
            raise RecordError("a scalar or text with a codec")
        return decode_value(bytes(self.payload[position]))

    def tensor(self, position: int, coder: Coder) -> Tensor:
        """Decode one tensor field into a tensor of its own."""
        field = self.layout.fields[position]
        assert field.dtype is not None
        out = torch.empty(field.shape, dtype=field.dtype)
        self.decode_field(position, coder, out.view(-1).view(torch.uint8).numpy())
        return out


def open_record(key: bytes, value: Any) -> Record:
    """Check a record against its own sizes and its checksum; decode nothing yet.

    Args:
        key: The key it was found under.
        value: Its bytes, any buffer.

    Raises:
        RecordError: Damaged, cut short, of another version, or another sample's.
    """
    view = memoryview(value)
    head = parse_head(view)
    (expected,) = struct.unpack_from("<Q", view)
    seed = payload_seed(head.seed, key)
    if xxhash.xxh3_64_intdigest(view[head.num_bytes :], seed=seed) != expected:
        raise RecordError("the checksum does not match")
    at, payload = head.num_bytes, []
    for _, size in head.stored:
        payload.append(view[at : at + size])
        at += size
    return Record(head, tuple(payload))
