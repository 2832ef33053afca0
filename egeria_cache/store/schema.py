"""What a generation's table holds: keys of samples, and what their records have. Pure; no pickle.

A key is a sample's ID and a variant. Integers are big-endian with the sign bit flipped, so that
their order is that of the integers; the variants of a sample are neighbours. A layout is one for
all records: a field is a tensor of one dtype and shape in all of them, or free; then each record
tells what it has there. Byte for byte: docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from egeria_cache.arguments import StorageDtype
from egeria_cache.store.codecs import Elements, Storage, storage_bytes
from egeria_cache.store.native import MOST_HEAD_BYTES, room_bytes

SampleId = int | str | tuple[Any, ...]
"""Hashable name of a sample: an integer, a text, or a tuple of these."""
Variants = int | npt.NDArray[np.int64]
"""Of a batch's samples: one number for all of them, or one each, shape (B,)."""

NO_DRAW = (1 << 32) - 1
"""Stands for a draw where there is none to be superseded."""
MAX_KEY_BYTES = 511
"""As LMDB takes them."""
SIGN = 1 << 63
INT, _JSON, _HASHED = b"i", b"j", b"h"
INT_KEY = struct.Struct(">cQI")


def encode_key(sample_id: SampleId, variant: int = 0) -> bytes:
    """Return the key of one sample.

    Raises:
        TypeError: The ID is not an integer, a text, or a tuple of these.
        ValueError: No variant has this number: it has 32 bits.
    """
    if not 0 <= variant < 1 << 32:
        raise ValueError(f"variant must be from 0 to {(1 << 32) - 1}, got {variant}")
    tail = struct.pack(">I", variant)
    if isinstance(sample_id, str):
        name: Any = sample_id
    elif isinstance(sample_id, tuple):
        name = [one if isinstance(one, str) else _integer(one) for one in sample_id]
    else:
        name = _integer(sample_id)
        if -SIGN <= name < SIGN:
            return INT + struct.pack(">Q", name + SIGN) + tail
    # As they are: two halves of a character that stand alone are not that character.
    key = _JSON + json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass") + tail
    if len(key) > MAX_KEY_BYTES:
        # The whole key is hashed, not its tail: two long keys then differ by 256 bits.
        key = _HASHED + hashlib.blake2b(key[: -len(tail)], digest_size=32).digest() + tail
    return key


def superseded(keys: Sequence[bytes], last: Variants) -> list[bytes]:
    """Return, per sample, the key of the last of its draws that goes; nothing for `NO_DRAW`."""
    draws = zip(keys, np.full(len(keys), last).tolist(), strict=True)
    return [b"" if draw == NO_DRAW else key[:-4] + struct.pack(">I", draw) for key, draw in draws]


def decode_key(key: bytes) -> tuple[SampleId | None, int]:
    """Return (sample ID, variant); the ID of a hashed key is None.

    Raises:
        ValueError: These bytes are no sample's key.
    """
    with suppress(struct.error, ValueError, TypeError, RecursionError):
        kind, body, (variant,) = key[:1], key[1:-4], struct.unpack(">I", key[1:][-4:])
        if kind == INT and len(key) == INT_KEY.size:
            return struct.unpack(">Q", body)[0] - SIGN, variant
        if kind == _JSON:
            found = json.loads(body)
            return found if isinstance(found, int | str) else tuple(found), variant
        if kind == _HASHED and len(body) == 32:
            return None, variant
    raise ValueError(f"not the key of a sample: {key[:32]!r}")


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"a sample ID is an integer, a text, or a tuple of these; got {type(value).__name__}"
        ) from None


# -- layout ----------------------------------------------------------------------------------

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
    def room(self) -> tuple[int, int]:
        """Bytes of what it takes to decode a field, and a record with that: more is none."""
        sizes = [one.num_bytes for one in self.fields]
        decoding = room_bytes(max(sizes, default=0))
        return decoding, decoding + sum(sizes) + MOST_HEAD_BYTES

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
    if value is None or isinstance(value, bool | int | float | str):
        return b"j" + json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
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
        if tag == b"b":
            return content
        value: Plain = json.loads(content.decode("utf-8", "surrogatepass"))
        if tag == b"j" and (value is None or isinstance(value, int | float | str)):
            return value
    raise RecordError(f"not a stored value: {stored[:16]!r}")
