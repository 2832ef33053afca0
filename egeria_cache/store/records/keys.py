"""Sample ID and variant -> key, and back. Pure.

Integers are big-endian with the sign bit flipped, so that their order is that of the integers; the
variants of a sample are neighbours. Layout: docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
import operator
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

SampleId = int | str | tuple[Any, ...]
"""Hashable name of a sample: an integer, a text, or a tuple of these."""
Variants = int | npt.NDArray[np.int64]
"""Of a batch's samples: one number for all of them, or one each, shape (B,)."""

NO_DRAW = (1 << 32) - 1
"""Stands for a draw where there is none to be superseded."""
MAX_KEY_BYTES = 511
"""As LMDB takes them."""
_SIGN = 1 << 63
_INT, _JSON, _HASHED = b"i", b"j", b"h"
_INT_KEY = struct.Struct(">cQI")


def encode_keys(ids: Sequence[SampleId], variant: Variants = 0) -> list[bytes]:
    """Return the keys of a batch.

    Raises:
        TypeError: An ID is not an integer, a text, or a tuple of these.
        ValueError: No variant has this number: it has 32 bits.
    """
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    each = each_variant(variant, len(ids))
    pack = _INT_KEY.pack
    try:
        return [
            pack(_INT, one + _SIGN, which) if type(one) is int else encode_key(one, which)
            for one, which in zip(ids, each, strict=True)
        ]
    except struct.error:  # an integer or a variant too large for that
        return [encode_key(one, which) for one, which in zip(ids, each, strict=True)]


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
        if -_SIGN <= name < _SIGN:
            return _INT + struct.pack(">Q", name + _SIGN) + tail
    key = _JSON + json.dumps(name).encode() + tail
    if len(key) > MAX_KEY_BYTES:
        # The whole key is hashed, not its tail: two long keys then differ by 256 bits.
        key = _HASHED + hashlib.blake2b(key[: -len(tail)], digest_size=32).digest() + tail
    return key


def each_variant(variant: Variants, count: int) -> list[int]:
    """Return the variants of so many samples."""
    found: list[int] = np.full(count, variant).tolist()
    return found


def superseded(keys: Sequence[bytes], last: Variants) -> list[bytes | None]:
    """Return, per sample, the key of the last of its draws that goes; None for `NO_DRAW`."""
    draws = zip(keys, each_variant(last, len(keys)), strict=True)
    return [None if draw == NO_DRAW else key[:-4] + struct.pack(">I", draw) for key, draw in draws]


def decode_key(key: bytes) -> tuple[SampleId | None, int]:
    """Return (sample ID, variant); the ID of a hashed key is None.

    Raises:
        ValueError: These bytes are no sample's key.
    """
    with suppress(struct.error, ValueError, TypeError, RecursionError):
        kind, body, (variant,) = key[:1], key[1:-4], struct.unpack(">I", key[1:][-4:])
        if kind == _INT and len(key) == _INT_KEY.size:
            return struct.unpack(">Q", body)[0] - _SIGN, variant
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
