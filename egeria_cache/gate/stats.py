"""What a cache has done so far, as counts: the figures a person or a program asks it for."""

from __future__ import annotations

from dataclasses import dataclass, field

from egeria_cache.store import StoreStats
from egeria_cache.tables import as_text, size


@dataclass(kw_only=True, slots=True)
class CacheStats(StoreStats):
    """Counts since the cache was opened, and its store's; sizes are in bytes, times in seconds."""

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
    reuse: dict[str, int | None] = field(default_factory=dict)
    """Of loaders whose samples draw random numbers: epochs that a draw is used; None: for ever."""
    random_samples: int = 0
    """Samples of theirs that were given out while a boundary was set."""
    fresh_samples: int = 0
    """Of them, those whose draw was not read: new ones, and the few that could not be."""
    refetched: int = 0
    """Planned hits whose raw samples had to be reloaded."""
    audited: int = 0
    """Hits that were recomputed from the raw sample and compared."""
    audit_failures: int = 0
    """Audited hits that differed: each voided its generation."""
    failures: int = 0
    """Errors of what is done beside the training (proofs, checks, audits, look-ups), which took no
    part in it."""
    voided: int = 0
    """Generations declared stale."""
    saved_s: float = 0.0
    """Training time saved so far: what the same steps would have taken if they had been computed,
    less what they took, proofs, writes, audits and comparisons included; negative if lost."""
    proof_s: float = 0.0
    """What proofs, and looks at samples, have taken of it."""
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
    def freshness(self) -> float:
        """Part of the random samples whose draw was new; about 1 / `reuse` in the long run."""
        return self.fresh_samples / self.random_samples if self.random_samples else 0.0

    @property
    def compression_ratio(self) -> float:
        """Raw over stored size; 1 while nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def report(self) -> str:
        """Return the figures as lines for people."""
        seen, ratio = self.hits + self.misses, self.compression_ratio
        proof = f", after {self.proof_s:.1f} s for the proof" if self.proof_s else ""
        density = f", compressed {ratio:.2f}x" if ratio >= 1 else f", grown {1 / ratio:.2f}x"
        lines = {
            "boundary": self.boundary or "none: nothing is skipped until one is set, or found",
            "samples from the cache": f"{self.hits} of {seen} ({self.hit_rate:.0%})",
            "batches whole / in part / computed": (
                f"{self.hit_batches} / {self.partial_batches} / {self.miss_batches}"
            ),
            "random draws": self._random_draws(),
            "training time saved": f"{self.saved_s:.1f} s{proof}",
            "on disk": f"{size(self.bytes_on_disk)} of {size(self.limit_bytes)}"
            + (density if self.stored_bytes else ""),
            "audited": f"{self.audited}, of which {self.audit_failures} differed",
            "reloaded": str(self.refetched), "writes dropped": str(self.dropped_writes),
            "corrupt records": str(self.corrupt), "gate": self.gate or "no decision yet",
            "not cached because": self.why_not or "",
        }  # fmt: skip
        return as_text({name: value for name, value in lines.items() if value})

    def _random_draws(self) -> str:
        if not self.random_samples:
            return ""
        uses = {"for ever" if n is None else f"for {n} epochs each" for n in self.reuse.values()}
        used = f"used {' or '.join(sorted(uses))}, " if uses else ""
        return f"{used}{self.freshness:.0%} of the samples seen were drawn anew"
