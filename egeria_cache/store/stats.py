"""What happened in a store, and what it holds, in numbers."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field
from typing import Any

from egeria_cache.store.codecs.codec import Codec
from egeria_cache.store.codecs.lossy import LossyError

__all__ = ["Counts", "StoreStats", "Totals"]

_TOTALS = struct.Struct("<QQdddQ")
_NO_CODEC = 255


class Counts:
    """What happened in this process, in all generations of a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = self.misses = self.writes = self.dropped_writes = self.corrupt = 0

    def add(self, **changes: int) -> None:
        """Count some more."""
        with self._lock:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """Counts of this process since the store was opened, and sizes on disk now."""

    hits: int
    """Rows read and intact."""
    misses: int
    """Rows asked for and not served."""
    writes: int
    """Rows committed."""
    dropped_writes: int
    """Rows handed over and not stored: queue full, limit, disk trouble, changed tensors."""
    corrupt: int
    """Records that failed their check."""
    num_samples: int
    """Records in the generations open here."""
    raw_bytes: int
    """Their size decoded."""
    stored_bytes: int
    """Their size encoded."""
    lossy_error: float
    """Root mean square of what lossy storage changed, over that of the values; 0 if lossless."""
    bytes_on_disk: int
    """Of the whole directory, in whole pages."""
    limit_bytes: int
    """Never exceeded by `bytes_on_disk`."""


@dataclass(slots=True)
class Totals:
    """Sums over a generation's records, written in the same commit as these."""

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
