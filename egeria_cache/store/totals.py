"""Sums over a generation's committed records, and where its record file ends. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import xxhash

from egeria_cache.store.codecs.lossy import LossyError

__all__ = ["TOTALS_KEY", "Totals"]

TOTALS_KEY = b"\x00totals"
_TOTALS = struct.Struct("<QQQddd")


@dataclass(slots=True)
class Totals:
    """Written in the same transaction as the records they count."""

    end: int | None = 0
    """Where the next record goes; None if that is not known, and the whole file is in use."""
    raw_bytes: int = 0
    """Decoded."""
    stored_bytes: int = 0
    """Encoded, with headers."""
    error: LossyError = field(default_factory=LossyError)
    """What lossy storage changed."""

    @classmethod
    def parse(cls, stored: Any) -> Totals:
        """Read them back; zeros if there are none, or they are damaged."""
        if stored is None:
            return cls()
        content, check = bytes(stored[:-8]), bytes(stored[-8:])
        if len(content) != _TOTALS.size or xxhash.xxh3_64_digest(content) != check:
            return cls(end=None)
        end, raw_bytes, stored_bytes, *error = _TOTALS.unpack(content)
        return cls(end, raw_bytes, stored_bytes, LossyError(*error))

    def pack(self) -> bytes:
        """Undo `parse`."""
        error = self.error
        content = _TOTALS.pack(
            self.end or 0,
            self.raw_bytes,
            self.stored_bytes,
            error.squared_error,
            error.squared_value,
            error.largest,
        )
        return content + xxhash.xxh3_64_digest(content)
