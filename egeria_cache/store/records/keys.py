"""Sample ID and variant -> key, and back. Pure.

Integers are big-endian with the sign bit flipped, so that their order is that of the integers.
Layout: docs/format.md.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = [
    "Keys",
    "SampleId",
    "all_integers",
    "check_variant",
    "decode_key",
    "encode_key",
    "encode_keys",
    "hashes_of",
    "is_integer_key",
    "parse_integer_keys",
    "plain_integers",
    "split_keys",
]

SampleId = int | str | tuple[Any, ...]
"""Hashable name of a sample: an integer, a text, or a tuple of these."""

MAX_KEY_BYTES = 511
_SIGN = 1 << 63
_INT, _TEXT, _TUPLE, _HASHED = b"i", b"s", b"t", b"h"
_INT_KEY = np.dtype([("kind", "S1"), ("variant", ">u4"), ("number", ">u8")])
_INT_KEY_BYTES = _INT_KEY.itemsize
_INT64 = np.dtype(np.int64)


class Keys(Sequence[bytes]):
    """The keys of a batch. Those of integers are made when they are asked for: where records lie is
    known without.
    """

    def __init__(self, ids: Sequence[SampleId], variant: int = 0) -> None:
        """Name samples.

        Raises:
            TypeError: An ID is not an integer, a text, or a tuple of these.
            ValueError: No variant has this number.
        """
        check_variant(variant)
        self.variant = variant
        self.numbers = plain_integers(ids)
        """The IDs as int64, shape (B,), if every one of them is an integer of 64 bits."""
        self._encoded = [] if self.numbers is not None else encode_keys(ids, variant)

    def __len__(self) -> int:
        return len(self._encoded) if self.numbers is None else len(self.numbers)

    @overload
    def __getitem__(self, row: int) -> bytes: ...
    @overload
    def __getitem__(self, row: slice) -> list[bytes]: ...
    def __getitem__(self, row: int | slice) -> bytes | list[bytes]:
        if self.numbers is None:
            return self._encoded[row]
        if isinstance(row, slice):
            return encode_keys(self.numbers[row].tolist(), self.variant)
        return encode_key(int(self.numbers[row]), self.variant)

    def hashes(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return XXH3 (64 bits) of the keys of some rows."""
        return hashes_of([self[row] for row in rows.tolist()])


def check_variant(variant: int) -> None:
    """Raise `ValueError` if no variant has this number: it has 32 bits."""
    if not 0 <= variant < 1 << 32:
        raise ValueError(f"variant must be from 0 to {(1 << 32) - 1}, got {variant}")


def encode_key(sample_id: SampleId, variant: int = 0) -> bytes:
    """Return the key of one sample.

    Raises:
        TypeError: The ID is not an integer, a text, or a tuple of these.
    """
    head = struct.pack(">I", variant)
    if isinstance(sample_id, str):
        key = _TEXT + head + sample_id.encode("utf-8", "surrogatepass")
    elif isinstance(sample_id, tuple):
        key = _TUPLE + head + b"".join(map(_element, sample_id))
    else:
        number = _integer(sample_id)
        if -_SIGN <= number < _SIGN:
            return _INT + head + struct.pack(">Q", number + _SIGN)
        key = _TUPLE + head + _element(number)
    if len(key) > MAX_KEY_BYTES:
        # The whole key is hashed, not its tail: two long keys then differ by 256 bits.
        key = _HASHED + head + hashlib.blake2b(key, digest_size=32).digest()
    return key


def plain_integers(ids: Sequence[SampleId]) -> npt.NDArray[np.int64] | None:
    """Return the IDs as int64, shape (B,), if every one of them is an integer of 64 bits."""
    if isinstance(ids, np.ndarray):
        if ids.dtype is _INT64 and ids.ndim == 1:
            return ids
        fits = ids.dtype.kind == "i" or (ids.dtype.kind == "u" and ids.dtype.itemsize < 8)
        return ids.astype(np.int64) if fits and ids.ndim == 1 else None
    try:
        array = np.array(ids)
    except (ValueError, OverflowError):  # tuples of different lengths
        return None
    if array.ndim == 1 and (array.dtype.kind in "ib" or not len(ids)):
        return array.astype(np.int64, copy=False)
    return None


def encode_keys(ids: Sequence[SampleId], variant: int = 0) -> list[bytes]:
    """Return the keys of a batch."""
    plain: Any = ids.tolist() if isinstance(ids, np.ndarray) else ids
    head, pack = _INT + struct.pack(">I", variant), struct.Struct(">Q").pack
    try:  # Python's own integers: NumPy's would wrap around
        return [head + pack(number + _SIGN) for number in map(operator.index, plain)]
    except (TypeError, struct.error):  # not all are integers of 64 bits
        return [encode_key(sample_id, variant) for sample_id in plain]


def hashes_of(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return XXH3 (64 bits) of each key."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))


def parse_integer_keys(keys: bytes) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Return (variants, IDs) of keys of integers, given one behind the other."""
    table = np.frombuffer(keys, _INT_KEY)
    numbers = (table["number"].astype(np.uint64) ^ np.uint64(_SIGN)).view(np.int64)
    return table["variant"].astype(np.uint32), numbers


def split_keys(keys: bytes, lengths: npt.NDArray[np.uint16]) -> list[bytes]:
    """Cut apart keys that lie one behind the other."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [keys[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def all_integers(keys: bytes, lengths: npt.NDArray[np.uint16]) -> bool:
    """Tell whether all of them, one behind the other, are keys of integers of 64 bits."""
    if not (lengths == _INT_KEY_BYTES).all():
        return False
    return bool((np.frombuffer(keys, _INT_KEY)["kind"] == _INT).all())


def is_integer_key(key: bytes) -> bool:
    """Tell the keys of integers of 64 bits."""
    return len(key) == _INT_KEY_BYTES and key[:1] == _INT


def decode_key(key: bytes) -> tuple[SampleId | None, int]:
    """Return (sample ID, variant); the ID of a hashed key is None.

    Raises:
        ValueError: These bytes are no sample's key.
    """
    try:
        kind, (variant,), body = key[:1], struct.unpack(">I", key[1:5]), key[5:]
        if kind == _INT and len(key) == _INT_KEY_BYTES:
            return struct.unpack(">Q", body)[0] - _SIGN, variant
        if kind == _TEXT:
            return body.decode("utf-8", "surrogatepass"), variant
        if kind == _TUPLE:
            elements: list[Any] = []
            while body:
                size = struct.unpack(">I", body[1:5])[0]
                content, kind_of = body[5 : 5 + size], body[:1]
                if len(content) != size or kind_of not in (b"i", b"s"):
                    raise ValueError
                text = content.decode("utf-8", "surrogatepass")
                elements.append(int(text) if kind_of == b"i" else text)
                body = body[5 + size :]
            return tuple(elements), variant
        if kind == _HASHED and len(body) == 32:
            return None, variant
    except (struct.error, ValueError, IndexError):
        pass
    raise ValueError(f"not the key of a sample: {key[:32]!r}")


def _element(value: Any) -> bytes:
    if isinstance(value, str):
        content, kind = value.encode("utf-8", "surrogatepass"), b"s"
    else:
        content, kind = str(_integer(value)).encode(), b"i"
    return kind + struct.pack(">I", len(content)) + content


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"a sample ID is an integer, a text, or a tuple of these; got {type(value).__name__}"
        ) from None
