"""What happened in a store, and what it holds, in numbers."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["Counts", "StoreStats"]


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
