"""What happened in a store, and what it holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["GenerationCounts", "StoreStats"]


@dataclass(slots=True)
class GenerationCounts:
    """What happened in this process."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    dropped_writes: int = 0
    corrupt: int = 0

    def add(self, other: GenerationCounts) -> None:
        """Take another generation's counts in."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


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
