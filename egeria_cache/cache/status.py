"""What every side of a cache has to know. Written on the training thread."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Status:
    """The state of one cache."""

    gate: str
    """"auto", "always" or "never"."""
    boundary: str | None = None
    """The last frozen module, as whoever set it named it."""
    set_by_hand: bool = True
    is_sought: bool = False
    """Whether the next call of the model finds the boundary."""
    is_told: bool = False
    """Whether it was said under this boundary that the prefix changes."""
    is_proved: bool = False
    """Whether the model was cut under this boundary: it is no mistake of whoever set it."""
    num_moves: int = 0
    """How often the boundary, or the cut before it, has moved."""
    uncached: dict[str, str] = field(default_factory=dict)
    """Loaders whose samples cannot be cached, and why."""
    together: dict[str, str] = field(default_factory=dict)
    """Loaders in whose batches not every leaf is the samples' own, and why."""
    is_closed: bool = False
    is_filling: bool = False
    """Whether samples are stored ahead of training: no step is measured then."""
    is_compiled: bool = False
    """Whether the model was last called as code that was compiled whole: it is served nothing."""
    since: float = field(default_factory=time.time)
    """When the cache was made, in seconds since the epoch."""
    process: int = field(default_factory=os.getpid)
    """Where the cache was made. A forked child has none of its threads: it computes everything."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that made the cache."""
        return os.getpid() != self.process


def shown_name(loader_key: str) -> str:
    """Return the name that the user gave a loader (`LoaderSource.key` tells it from others)."""
    return loader_key.rpartition("#")[0]
