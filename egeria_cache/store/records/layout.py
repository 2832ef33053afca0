"""What the records of a generation hold: names, dtypes, shapes. One for all of them. Pure.

A field is a tensor of one dtype and shape in all records, or free: then each record tells what it
has there. Byte for byte: docs/format.md; no pickle.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
import xxhash
from torch import Tensor

from egeria_cache.arguments import StorageDtype
from egeria_cache.store.codecs import Elements, Storage, storage_bytes

Value = Tensor | str | bytes | int | float | bool | None
"""What one sample may hold under one name."""
Plain = str | bytes | int | float | bool | None

MAX_FIELD_BYTES = 1 << 40
_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32",
)  # fmt: skip
DTYPES = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""What records hold: quantized numbers, say, are no plain bytes."""


class RecordError(ValueError):
    """These bytes are no intact record."""


@dataclass(frozen=True)
class FieldLayout:
    """What one name of a record holds."""

    name: str
    dtype: torch.dtype | None = None
    """None: free, each record tells."""
    shape: tuple[int, ...] = ()
    storage: Storage = None
    """Lossy number format of the stored elements; None: `dtype` itself."""

    @property
    def kind(self) -> str:
        """What it holds, in words."""
        if self.dtype is None:
            return "scalar, text or bytes"
        lossy = f" as {self.storage}" if self.storage else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{lossy}"

    @cached_property
    def num_bytes(self) -> int:
        """Before the codec; -1 if only the record tells."""
        return -1 if self.dtype is None else storage_bytes(self.shape, self.dtype, self.storage)

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

    def told(self) -> list[Any]:
        """Return what stands for it in JSON.

        Raises:
            ValueError: No record holds such tensors.
        """
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"no record holds tensors of {self.dtype}")
        return [self.name, dtype, self.shape, self.storage]

    @classmethod
    def of(cls, told: Any) -> FieldLayout:
        """Undo `told`.

        Raises:
            TypeError, ValueError, KeyError: It tells of nothing that there is.
        """
        name, dtype, shape, storage = told
        found = cls(name, None if dtype is None else DTYPES[dtype], tuple(shape), storage)
        is_known = type(name) is str and storage in (None, *get_args(StorageDtype))
        is_known = is_known and all(type(n) is int and 0 <= n <= MAX_FIELD_BYTES for n in shape)
        if not is_known or math.prod(shape) > MAX_FIELD_BYTES:
            raise RecordError(f"a tensor of shape {shape}")
        return found


@dataclass(frozen=True)
class Layout:
    """All fields of a record, in their order."""

    fields: tuple[FieldLayout, ...]

    @cached_property
    def is_plain(self) -> bool:
        """All fields are tensors of one size."""
        return all(one.dtype for one in self.fields)

    @cached_property
    def seed(self) -> int:
        """Part of every record's checksum, so that none is read by another layout."""
        return xxhash.xxh3_64_intdigest(self.packed)

    @cached_property
    def packed(self) -> bytes:
        """The bytes that stand for it: JSON."""
        fields = [one.told() for one in self.fields]
        return json.dumps(fields, separators=(",", ":")).encode()

    def sealed(self, identity: int) -> bytes:
        """Return the same behind its hash, which no other generation's has."""
        return xxhash.xxh3_64_intdigest(self.packed, identity).to_bytes(8, "little") + self.packed

    @classmethod
    def unsealed(cls, stored: bytes, identity: int) -> Layout:
        """Undo `sealed`; `RecordError` where it is another generation's, or damaged."""
        found = cls.parse(stored[8:])
        if found.sealed(identity) != stored:
            raise RecordError("another generation's layout")
        return found

    @classmethod
    def parse(cls, stored: bytes) -> Layout:
        """Undo `packed`.

        Raises:
            RecordError: It is none.
        """
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            found = cls(tuple(map(FieldLayout.of, json.loads(stored))))
            if found.packed == stored:
                return found
        raise RecordError("damaged layout")


def encode_value(value: Plain) -> bytes:
    """Return a scalar, text or byte string as tagged bytes.

    Raises:
        TypeError: The value is of another type.
    """
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if value is None or isinstance(value, bool | int | float):
        return b"j" + json.dumps(value).encode()
    raise TypeError(
        "a sample may hold tensors, texts, bytes, numbers, bools and None; "
        f"got {type(value).__name__}"
    )


def decode_value(stored: bytes) -> Plain:
    """Undo `encode_value`.

    Raises:
        RecordError: These bytes are no such value.
    """
    tag, content = stored[:1], stored[1:]
    with suppress(ValueError, RecursionError):
        if tag in (b"b", b"s"):
            return content if tag == b"b" else content.decode("utf-8", "surrogatepass")
        value: Plain = json.loads(content)
        if tag == b"j" and (value is None or isinstance(value, int | float)):
            return value
    raise RecordError(f"not a stored value: {stored[:16]!r}")
