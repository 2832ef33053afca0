"""Mid-epoch resume: where a loader stands in its epochs, small enough for every checkpoint.

The state names the start of the epoch (the states of the random generators that the sampler draws
from), the number of batches given out since, and how many were drawn. The number of workers may be
another: resuming draws the same index batches again and drops those that were used.

An iterable data set has no index batches: DataLoader's own iterator goes over it, its batches are
counted, and loaded again where it keeps no state.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from egeria_cache.attempt import Attempt
from egeria_cache.samples import Clock

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
    yielded: int = 0
    """Batches given out."""
    asked: int = 0
    """How often the sampler was asked for one, or for one more after the last: ahead, as a rule."""
    finished: bool = False
    """Whether the pass came to its end; resuming then begins the next epoch."""
    dataset: Any = field(default=None, repr=False)
    """The state of an iterable data set, or of its iterator, that has one, where this process draws
    from it: {"dataset": state} or {"iterator": state}."""
    sampler: Any = field(default=None, repr=False)
    """The state of a sampler that has one, when the last batch given out had been drawn; before
    the first and after the last, as it was then."""
    drawn: deque[Any] = field(default_factory=deque, repr=False)
    """The same for the batches that were drawn, but not given out; no part of the state."""
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


_NOT_STORED = ("drawn", "may_be_empty")
_STORED = [f.name for f in fields(Progress) if f.name not in _NOT_STORED]


class SamplerRng:
    """The random generators that a loader's sampler may draw from."""

    def __init__(self, generator: torch.Generator | None, index_sampler: Any) -> None:
        # The index sampler, those that it wraps, and the sampler that they draw from.
        self._samplers, pending = list[Any](), [index_sampler]
        while pending:
            thing = pending.pop()
            if thing is not None and all(thing is not other for other in self._samplers):
                self._samplers.append(thing)
                pending += [getattr(thing, name, None) for name in ("sampler", "batch_sampler")]
        own = [getattr(thing, "generator", None) for thing in self._samplers]
        found = [torch.default_generator, generator, *own]
        self._torch = list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))
        # torch's own samplers draw from torch alone; a user's may draw from anything.
        sampler = getattr(index_sampler, "sampler", None)
        self._is_torch = type(index_sampler) is BatchSampler and isinstance(
            sampler, RandomSampler | SequentialSampler
        )

    def get(self) -> dict[str, Any]:
        """Return their states, as values that JSON can write."""
        state: dict[str, Any] = {
            "torch": [_text(generator.get_state().numpy()) for generator in self._torch]
        }
        if not self._is_torch:
            state["python"] = random.getstate()
            numpy = np.random.get_state(legacy=False)  # whatever makes its bits
            state["numpy"] = json.loads(json.dumps(numpy, default=np.ndarray.tolist))
        return state

    def set(self, state: dict[str, Any]) -> None:
        """Put them back."""
        states = state["torch"]
        for sampler in self._samplers:
            if len(self._torch) < len(states) and getattr(sampler, "generator", 0) is None:
                # It makes one with its first pass, and had made it when the state was taken.
                sampler.generator = torch.Generator()
                self._torch.append(sampler.generator)
        for generator, value in zip(self._torch, states, strict=True):
            generator.set_state(torch.frombuffer(_bytes(value), dtype=torch.uint8))
        if "python" in state:
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
            if not isinstance(numpy := state["numpy"], dict):  # as it was noted formerly
                numpy = (numpy[0], np.frombuffer(_bytes(numpy[1]), "<u4"), *numpy[2:])
            np.random.set_state(numpy)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _bytes(text: str) -> bytearray:
    return bytearray(base64.b64decode(text))  # torch wants memory that can be written


def noting(
    whole: Iterable[Any],
    batches: Iterator[Any],
    state: Callable[[], Any] | None,
    progress: Progress,
) -> Iterator[Any]:
    """Draw `batches` from `whole`, an index sampler, and note its `state` with every one, if it has
    one. They are asked by next() alone: to some, iter() is a new epoch.
    """
    again, progress.may_be_empty = progress.may_be_empty, False
    while True:
        while (batch := next(batches, None)) is not None:
            again, now = False, None
            if state is not None:
                with Attempt():
                    now = state()
                progress.drawn.append(now)
            yield batch
        if not again:
            return
        again, batches = False, iter(whole)


def state_of(stateful: Any) -> Any:
    """Return a copy of the state of what has one; None of None."""
    return None if stateful is None else copy.deepcopy(stateful.state_dict())


def is_stateful(one: Any) -> bool:
    """Return whether it keeps its own place, in torchdata's protocol."""
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


class CountingIterator:
    """DataLoader's own iterator, which keeps the loader's `Progress`."""

    def __init__(self, iterator: Any, progress: Progress) -> None:
        self.iterator, self.progress = iterator, progress

    def __iter__(self) -> CountingIterator:
        return self

    def __len__(self) -> int:
        return len(self.iterator)

    def __next__(self) -> Any:
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.progress.finished = True
            raise
        self.progress.yielded += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "iterator":  # not made yet
            raise AttributeError(name)
        return getattr(self.iterator, name)
