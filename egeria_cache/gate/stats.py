"""The figures a person or a program asks a cache for."""

from __future__ import annotations

import html
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
    """Size before compression of all samples stored or found so far, in every generation."""
    stored_bytes: int = 0
    """Their size after compression."""
    limit_bytes: int = 0
    """Hard bound on `bytes_on_disk`."""
    saved_s: float = 0.0
    """Training time saved so far, against computing the served samples; negative if lost."""
    gate: str = ""
    """Whether skipping goes on, and why, per loader."""
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

    def report(self) -> str:
        """Return the figures as lines for people."""
        lines = self._lines()
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())

    def _repr_html_(self) -> str:
        """Return the report as a table, for notebooks."""
        rows = (
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
            for name, value in self._lines().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def _lines(self) -> dict[str, str]:
        seen = self.hits + self.misses
        lines = {
            "boundary": self.boundary or "none",
            "samples from the cache": f"{self.hits} of {seen} ({self.hit_rate:.0%})",
            "batches whole / in part / computed": (
                f"{self.hit_batches} / {self.partial_batches} / {self.miss_batches}"
            ),
            "training time saved": f"{self.saved_s:.1f} s",
            "on disk": (
                f"{self.bytes_on_disk / 1e6:.1f} of {self.limit_bytes / 1e6:.0f} MB, "
                f"compressed {self.compression_ratio:.2f}x"
            ),
            "audited": f"{self.audited}, of which {self.audit_failures} differed",
            "loaded after all": str(self.refetched),
            "writes dropped": str(self.dropped_writes),
            "corrupt records": str(self.corrupt),
            "gate": self.gate or "no decision yet",
            "not cached because": self.why_not or "",
        }
        return {name: value for name, value in lines.items() if value}
