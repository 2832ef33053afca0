"""Where a loader stands in its epochs, small enough to go into every checkpoint.

The state names the start of the epoch (the states of the random generators that the sampler draws
from) and the number of batches yielded since. It does not depend on what was read ahead, nor on the
number of workers: resuming draws the same index batches again and drops those that were yielded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

__all__ = ["Progress", "SamplerRng", "skip_batches"]

VERSION = 1


class SamplerRng:
    """The random generators that a loader's sampler may draw from."""

    def __init__(self, generator: torch.Generator | None, batch_sampler: Any) -> None:
        """Find them: torch's, and for samplers that are not torch's own also Python's and NumPy's."""
        sampler = getattr(batch_sampler, "sampler", None)
        own = [getattr(thing, "generator", None) for thing in (batch_sampler, sampler)]
        found = [torch.default_generator, generator, *own]
        self._torch = list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))
        known = type(batch_sampler) is BatchSampler and type(sampler) in (
            RandomSampler,
            SequentialSampler,
        )
        self._others = not known

    def get(self) -> dict[str, Any]:
        """Return their states, as tensors and plain values."""
        state: dict[str, Any] = {"torch": [generator.get_state() for generator in self._torch]}
        if self._others:
            numpy = np.random.get_state(legacy=False)
            state["python"] = random.getstate()
            state["numpy"] = numpy
        return state

    def set(self, state: dict[str, Any]) -> None:
        """Put them back."""
        for generator, value in zip(self._torch, state["torch"], strict=True):
            generator.set_state(value)
        if self._others and "python" in state:
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
            np.random.set_state(state["numpy"])


@dataclass(slots=True)
class Progress:
    """How far one pass over the loader has come."""

    epoch: int
    variant: int
    first_frozen: int
    """The loader's `_first_frozen_epoch` at the time."""
    start: dict[str, Any] = field(repr=False)
    """The sampler's generators when the pass began."""
    yielded: int = 0
    finished: bool = False

    def state_dict(self, now: dict[str, Any]) -> dict[str, Any]:
        """Return the state; `now` are the generators as they are at this moment."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "variant": self.variant,
            "first_frozen": self.first_frozen,
            "yielded": self.yielded,
            "finished": self.finished,
            "start": self.start,
            "now": now,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Read a state.

        Raises:
            ValueError: It is not one of ours, or of a newer version.
        """
        version = state.get("version")
        if version != VERSION:
            raise ValueError(
                f"not a state of EgeriaLoader, or of another version: version={version!r}, "
                f"this release reads {VERSION}"
            )
        return cls(
            state["epoch"],
            state["variant"],
            state["first_frozen"],
            state["start"],
            state["yielded"],
            state["finished"],
        )


def skip_batches(batches: Iterator[Any], count: int) -> None:
    """Drop the next `count` index batches."""
    for _ in range(count):
        if next(batches, None) is None:
            return
