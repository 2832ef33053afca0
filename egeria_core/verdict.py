"""What comes of one evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Verdict:
    """Readings of the step at which they were taken."""

    step: int
    layer: int
    """The frontmost active one then."""
    value: float | None
    """Of that layer; None: there was nothing to read against, or all layers were read."""
    values: tuple[float | None, ...] | None = None
    """Of all layers."""
    reference: str = "none"
    noise: float = 0.0
    costly: bool = False
    """Whether a refresh of the reference is much dearer than copying weights."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
