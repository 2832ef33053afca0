"""The figures a person or a program asks a cache for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(kw_only=True, slots=True)
class CacheStats:
    """Counts since the cache was opened; sizes are in bytes, times in seconds."""

    boundary: str | None = None
    """The frozen boundary at the moment."""
    hits: int = 0
    """Samples whose prefix was skipped."""
    misses: int = 0
    """Samples whose prefix was computed while a boundary was set."""
    hit_batches: int = 0
    """Batches that were served whole from the cache."""
    partial_batches: int = 0
    """Batches with hits and misses."""
    miss_batches: int = 0
    """Batches without a hit, while a boundary was set."""
    refetched: int = 0
    """Planned hits whose raw samples had to be loaded after all."""
    dropped_writes: int = 0
    """Samples that were not stored: the writer's queue or the limit was full."""
    corrupt: int = 0
    """Records that failed their checksum; they counted as misses."""
    audited: int = 0
    """Hits that were recomputed from the raw sample and compared."""
    audit_failures: int = 0
    """Audited hits that differed: each voided its generation."""
    voided: int = 0
    """Generations declared stale."""
    num_samples: int = 0
    """Samples stored in the generations in use."""
    bytes_on_disk: int = 0
    """Of the whole cache directory."""
    raw_bytes: int = 0
    """Size of the stored samples before compression."""
    stored_bytes: int = 0
    """Size of the stored samples after compression."""
    limit_bytes: int = 0
    """Hard bound on `bytes_on_disk`."""
    why_not: str | None = None
    """Why nothing is cached at the moment, if so."""

    @property
    def hit_rate(self) -> float:
        """Hits among the samples seen while a boundary was set; 0 before the first."""
        seen = self.hits + self.misses
        return self.hits / seen if seen else 0.0

    @property
    def compression_ratio(self) -> float:
        """Raw over stored size; 1 while nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0
