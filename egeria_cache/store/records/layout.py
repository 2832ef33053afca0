"""What the records of a generation hold: names, dtypes, shapes. Stored once, not in each. Pure.

A batch of another layout than those before it (a lossy storage that could not hold it, say) adds
one. Byte for byte: docs/format.md. What is no tensor is tagged bytes; no pickle.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from egeria_cache.store.codecs.codec import GROUPS, Elements
from egeria_cache.store.codecs.lossy import CODES, Storage, storage_bytes

__all__ = [
    "DTYPES",
    "RAGGED",
    "FieldLayout",
    "Layout",
    "RecordError",
    "Value",
    "decode_value",
    "encode_value",
]

Value = Tensor | str | bytes | int | float | bool | None
"""What one sample may hold under one name."""

MAX_INTEGER_DIGITS = 4096

MAX_FIELDS, MAX_NDIM, MAX_LAYOUT_BYTES = 255, 32, 64 * 1024
MAX_FIELD_BYTES = 1 << 40
RAGGED = (1 << 64) - 1
"""Stands for a dimension in which samples differ: each record has its own."""

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


class RecordError(ValueError):
    """These bytes are no intact record."""


@dataclass(frozen=True)
class FieldLayout:
    """What one name of a record holds."""

    name: str
    dtype: torch.dtype | None
    """None: a scalar, text or bytes; see `values`."""
    shape: tuple[int, ...] = ()
    """`RAGGED` where samples differ."""
    storage: Storage = None
    """Lossy number format of the stored elements; None: `dtype` itself."""

    @cached_property
    def num_ragged(self) -> int:
        """Dimensions in which samples differ."""
        return self.shape.count(RAGGED)

    @cached_property
    def num_bytes(self) -> int:
        """Before the codec; -1 if only the record tells."""
        if self.dtype is None or self.num_ragged:
            return -1
        return storage_bytes(self.shape, self.dtype, self.storage)

    @cached_property
    def elements(self) -> Elements:
        """What the codec wants to know of the numbers; a complex one is two."""
        if self.dtype is None or self.storage == "int8":
            return 1, False
        if self.storage is not None:
            return 2, True
        if self.dtype.is_complex:
            return self.dtype.itemsize // 2, True
        return self.dtype.itemsize, self.dtype.is_floating_point

    def sized(self, sizes: list[int]) -> tuple[tuple[int, ...], int]:
        """Return the shape of one record, whose own sizes are taken off the list, and its bytes.

        Raises:
            RecordError: No tensor is so large.
        """
        assert self.dtype is not None
        shape = tuple(sizes.pop(0) if one == RAGGED else one for one in self.shape)
        if max(shape, default=0) > MAX_FIELD_BYTES or math.prod(shape) > MAX_FIELD_BYTES:
            raise RecordError(f"a tensor of shape {shape}")
        return shape, storage_bytes(shape, self.dtype, self.storage)


@dataclass(frozen=True)
class Layout:
    """All fields of a record, in their order."""

    bare: bool
    """The tensors were handed over as one tensor, and come back so."""
    fields: tuple[FieldLayout, ...]

    @cached_property
    def num_ragged(self) -> int:
        """Sizes that each record has of its own."""
        return sum(field.num_ragged for field in self.fields)

    @cached_property
    def is_plain(self) -> bool:
        """All records are tensors of one size, of numbers that the kernel knows."""
        return all(one.num_bytes >= 0 and one.elements[0] in GROUPS for one in self.fields)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the tensors of fixed size, decoded."""
        return sum(max(field.num_bytes, 0) for field in self.fields)

    @cached_property
    def seed(self) -> int:
        """Part of every record's checksum, so that none is read by another layout."""
        return xxhash.xxh3_64_intdigest(self.packed)

    @cached_property
    def number(self) -> int:
        """What entries and records name it by: of its hash, so that no process need be asked."""
        return self.seed & 0xFFFF

    @cached_property
    def packed(self) -> bytes:
        """The bytes that stand for it.

        Raises:
            ValueError: More fields, dimensions or bytes of names than can be told, or a dtype that
                has no code.
        """
        if len(self.fields) > MAX_FIELDS or any(len(one.shape) > MAX_NDIM for one in self.fields):
            raise ValueError(f"a record holds {MAX_FIELDS} fields of {MAX_NDIM} dimensions at most")
        num_bytes = sum(5 + len(one.name.encode()) + 8 * len(one.shape) for one in self.fields)
        if num_bytes >= MAX_LAYOUT_BYTES:
            raise ValueError(f"{num_bytes} bytes of names and shapes, fewer than 65536 are stored")
        parts = [struct.pack("<BB", self.bare, len(self.fields))]
        for one in self.fields:
            name, code = one.name.encode(), _PLAIN if one.dtype is None else _CODES.get(one.dtype)
            if code is None:
                raise ValueError(f"{one.name!r}: no record holds tensors of {one.dtype}")
            storage = _STORAGE_CODES[one.storage]
            parts.append(struct.pack("<HBBB", len(name), code, storage, len(one.shape)))
            parts.append(name + struct.pack(f"<{len(one.shape)}Q", *one.shape))
        return b"".join(parts)

    @classmethod
    def parse(cls, stored: bytes) -> Layout:
        """Undo `pack`.

        Raises:
            RecordError: It is none.
        """
        try:
            (flags, count), at, fields = struct.unpack_from("<BB", stored), 2, []
            for _ in range(count):
                name_bytes, code, storage_code, ndim = struct.unpack_from("<HBBB", stored, at)
                name = stored[at + 5 : at + 5 + name_bytes].decode()
                at += 5 + name_bytes
                shape = struct.unpack_from(f"<{ndim}Q", stored, at)
                at += 8 * ndim
                dtype = None if code == _PLAIN else DTYPES[code]
                field = FieldLayout(name, dtype, shape, CODES[storage_code])
                if dtype is not None and not field.num_ragged:
                    field.sized([])
                fields.append(field)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise RecordError(f"damaged layout: {error}") from None
        if at != len(stored):
            raise RecordError("bytes left over after the layout")
        return cls(bool(flags & 1), tuple(fields))


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
        if tag == b"i" and len(content) <= MAX_INTEGER_DIGITS:
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
