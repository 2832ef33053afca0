"""Scalars, texts and byte strings of one sample <-> tagged bytes. Pure; no pickle."""

from __future__ import annotations

import struct

from torch import Tensor

__all__ = ["RecordError", "Value", "decode_value", "encode_value"]

Value = Tensor | str | bytes | int | float | bool | None
"""What one sample may hold under one name."""

MAX_INTEGER_DIGITS = 4096


class RecordError(ValueError):
    """These bytes are no intact record."""


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
