"""Sums over a generation's committed records. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from egeria_cache.store.codecs.codec import Codec
from egeria_cache.store.codecs.lossy import LossyError

__all__ = ["TOTALS_BYTES", "Totals"]

_TOTALS = struct.Struct("<QQdddQ")
TOTALS_BYTES = _TOTALS.size
_NO_CODEC = 255


@dataclass(slots=True)
class Totals:
    """Written in the same commit as the records they count."""

    raw_bytes: int = 0
    """Decoded."""
    stored_bytes: int = 0
    """Encoded, with headers."""
    error: LossyError = field(default_factory=LossyError)
    """What lossy storage changed."""
    codec: Codec | None = None
    """What records were last written with; each field of each record names its own."""

    @classmethod
    def parse(cls, stored: Any) -> Totals:
        """Undo `pack`."""
        raw_bytes, stored_bytes, *error, code = _TOTALS.unpack(stored)
        codec = Codec(code) if code in Codec._value2member_map_ else None
        return cls(raw_bytes, stored_bytes, LossyError(*error), codec)

    def pack(self) -> bytes:
        """Return the bytes of a commit's head."""
        error, codec = self.error, self.codec
        changed = error.squared_error, error.squared_value, error.largest
        code = _NO_CODEC if codec is None else codec
        return _TOTALS.pack(self.raw_bytes, self.stored_bytes, *changed, code)
