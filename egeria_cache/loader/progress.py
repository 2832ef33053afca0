"""How far a pass over a loader has come: counted by whoever gives out batches, and stored."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

from egeria_cache.samples import Clock

__all__ = ["Progress"]

VERSION = 3


@dataclass(slots=True)
class Progress:
    """How far one pass over the loader has come."""

    epoch: int = 0
    ahead: int | None = None
    """Passes of earlier runs whose random draws are gone on with; None before the first."""
    since: int = 0
    """See `Clock.since`."""
    is_random: bool = False
    """Whether samples were seen to draw random numbers that the front reads."""
    is_steady: bool = False
    """Whether those that they draw were seen to change nothing that it reads."""
    start: dict[str, Any] | None = field(default=None, repr=False)
    """The sampler's generators when the pass began; None before the first pass."""
    drew_base_seed: bool = False
    """Whether DataLoader drew a base seed for new workers when the pass began."""
    keeps_workers: bool = False
    """Whether the next pass goes on with the workers of this one, and draws no base seed."""
    now: dict[str, Any] | None = field(default=None, repr=False)
    """The generators when the state was taken."""
    num_drawn: int | None = None
    """What the sampler draws in an epoch, samples or batches, if it says so."""
    yielded: int = 0
    """Batches given out."""
    finished: bool = False
    """Whether the pass came to its end; resuming then begins the next epoch."""
    any_order: bool = False
    """Whether batches overtake each other (`in_order=False`)."""
    sampler: Any = field(default=None, repr=False)
    """The state of a sampler that has one, when the last batch given out had been drawn; before
    the first and after the last, as it was then."""
    drawn: deque[Any] = field(default_factory=deque, repr=False)
    """The same for the batches that were drawn, but not given out; no part of the state."""
    front: int = 0
    """The number after the foremost batch given out; no part of the state."""
    may_be_empty: bool = False
    """Whether a sampler whose state was loaded may think that it is still at the end of its last
    epoch; no part of the state."""

    @property
    def clock(self) -> Clock:
        """Which random draws this pass uses."""
        return Clock(self.epoch + (self.ahead or 0), self.since)

    def take_draws(self, other: Progress) -> None:
        """Go on with the random draws of another's passes."""
        self.ahead, self.since = other.ahead, other.since
        self.is_random, self.is_steady = other.is_random, other.is_steady

    def state_dict(self) -> dict[str, Any]:
        """Return values that JSON can write, if those of a sampler are; a few kilobytes."""
        return {"version": VERSION} | {name: getattr(self, name) for name in _STORED}

    def count(self, number: int | None = None) -> None:
        """A batch is given out: of this number in the pass, or the next."""
        number = self.yielded if number is None else number
        self.yielded += 1
        for _ in range(min(number + 1 - self.front, len(self.drawn))):
            self.sampler = self.drawn.popleft()
        self.front = max(self.front, number + 1)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Read a state.

        Raises:
            ValueError: It is not one of ours, or of another version.
        """
        version = state.get("version")
        if version != VERSION:
            raise ValueError(
                f"not a state of EgeriaLoader, or of another version: found version {version!r}, "
                f"this release reads {VERSION}"
            )
        return cls(**{name: state[name] for name in _STORED if name in state})


_NOT_STORED = ("drawn", "front", "may_be_empty")
_STORED = [f.name for f in fields(Progress) if f.name not in _NOT_STORED]
