"""The one event that crosses from the freeze controller to the cache. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BoundaryMoved:
    """The frozen prefix changed. Published between two training steps."""

    step: int
    """First training step whose forward uses the new prefix."""
    boundary: str | None
    """Qualified name of the last frozen module; None after an unfreeze."""
    previous: str | None
    """The boundary before this event."""
    reason: str
    """In words, for logs and history."""
