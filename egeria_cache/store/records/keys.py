"""Sample ID and variant -> key, and back. Pure.

Integers are big-endian with the sign bit flipped, so that their order is that of the integers; the
variants of a sample are neighbours. Layout: docs/format.md.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SampleId", "Variants", "decode_key", "encode_key", "encode_keys", "plain_integers"]

SampleId = int | str | tuple[Any, ...]
"""Hashable name of a sample: an integer, a text, or a tuple of these."""
Variants = int | npt.NDArray[np.int64]
"""Of a batch's samples: one number for all of them, or one each, shape (B,)."""

MAX_KEY_BYTES = 511
"""As LMDB takes them."""
_SIGN = 1 << 63
_INT, _TEXT, _TUPLE, _HASHED = b"i", b"s", b"t", b"h"
_INT_KEY = np.dtype([("kind", "S1"), ("number", ">u8"), ("variant", ">u4")])
_INT_KEY_BYTES, _VARIANT_BYTES = _INT_KEY.itemsize, 4
_INT64 = np.dtype(np.int64)


def encode_keys(ids: Sequence[SampleId], variant: Variants = 0) -> list[bytes]:
    """Return the keys of a batch.

    Raises:
        TypeError: An ID is not an integer, a text, or a tuple of these.
        ValueError: No variant has this number: it has 32 bits.
    """
    variants = np.asarray(variant)
    if variants.size and not 0 <= int(variants.min()) <= int(variants.max()) < 1 << 32:
        wrong = int(variants.min()) if int(variants.min()) < 0 else int(variants.max())
        raise ValueError(f"variant must be from 0 to {(1 << 32) - 1}, got {wrong}")
    numbers = plain_integers(ids)
    if numbers is None:
        each = np.broadcast_to(variants, len(ids)).tolist()
        return [encode_key(one, which) for one, which in zip(ids, each, strict=True)]
    table = np.empty(len(numbers), _INT_KEY)
    table["kind"], table["variant"] = _INT, variants
    table["number"] = numbers.view(np.uint64) ^ np.uint64(_SIGN)
    whole = table.tobytes()
    return [whole[at : at + _INT_KEY_BYTES] for at in range(0, len(whole), _INT_KEY_BYTES)]


def encode_key(sample_id: SampleId, variant: int = 0) -> bytes:
    """Return the key of one sample.

    Raises:
        TypeError: The ID is not an integer, a text, or a tuple of these.
    """
    tail = struct.pack(">I", variant)
    if isinstance(sample_id, str):
        key = _TEXT + sample_id.encode("utf-8", "surrogatepass") + tail
    elif isinstance(sample_id, tuple):
        key = _TUPLE + b"".join(map(_element, sample_id)) + tail
    else:
        number = _integer(sample_id)
        if -_SIGN <= number < _SIGN:
            return _INT + struct.pack(">Q", number + _SIGN) + tail
        key = _TUPLE + _element(number) + tail
    if len(key) > MAX_KEY_BYTES:
        # The whole key is hashed, not its tail: two long keys then differ by 256 bits.
        key = _HASHED + hashlib.blake2b(key[:-_VARIANT_BYTES], digest_size=32).digest() + tail
    return key


def plain_integers(ids: Sequence[SampleId]) -> npt.NDArray[np.int64] | None:
    """Return the IDs as int64, shape (B,), if every one of them is an integer of 64 bits."""
    if isinstance(ids, np.ndarray):
        if ids.dtype is _INT64 and ids.ndim == 1:
            return np.ascontiguousarray(ids)
        fits = ids.dtype.kind == "i" or (ids.dtype.kind == "u" and ids.dtype.itemsize < 8)
        return ids.astype(np.int64) if fits and ids.ndim == 1 else None
    try:
        array = np.array(ids)
    except (ValueError, OverflowError):  # tuples of different lengths
        return None
    if array.ndim == 1 and (array.dtype.kind in "ib" or not len(ids)):
        return array.astype(np.int64, copy=False)
    return None


def decode_key(key: bytes) -> tuple[SampleId | None, int]:
    """Return (sample ID, variant); the ID of a hashed key is None.

    Raises:
        ValueError: These bytes are no sample's key.
    """
    try:
        kind, body, (variant,) = key[:1], key[1:-4], struct.unpack(">I", key[1:][-4:])
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
