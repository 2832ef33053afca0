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
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from egeria_cache.attempt import Attempt
from egeria_cache.samples import Clock

VERSION = 3
T_co = TypeVar("T_co", covariant=True)
log = logging.getLogger("egeria")
_OTHER_LENGTH = (
    "the loader's state was taken in the middle of an epoch of %d draws, and an epoch has %d now: "
    "what follows is not the rest of that one. Load the state with the data set and the sampler "
    "that it was taken with, or begin an epoch"
)


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

    def count(self) -> None:
        """The next batch is given out."""
        self.yielded += 1
        if self.drawn:
            self.sampler = self.drawn.popleft()

    def skip(self) -> None:
        """The next batch could not be loaded."""
        if self.drawn:
            self.drawn.popleft()

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
            version, internal, gauss = random.getstate()
            state["python"] = [version, list(internal), gauss]
            name, keys, *rest = np.random.get_state()
            state["numpy"] = [name, _text(np.asarray(keys, "<u4")), *rest]
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
            name, keys, *rest = state["numpy"]
            np.random.set_state((name, np.frombuffer(_bytes(keys), "<u4"), *rest))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _bytes(text: str) -> bytearray:
    return bytearray(base64.b64decode(text))  # torch wants memory that can be written


def _asking(batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
    """Draw `batches`, and count how often they were asked for one."""
    for batch in batches:
        progress.asked += 1
        yield batch
    progress.asked += 1


def noting(
    whole: Iterable[Any], batches: Iterator[Any], state: Callable[[], Any], progress: Progress
) -> Iterator[Any]:
    """Draw `batches` from `whole`, a stateful index sampler, and note its state with every one."""
    again, progress.may_be_empty = progress.may_be_empty, False
    while True:
        for batch in batches:
            again, now = False, None
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
        self.progress.count()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "iterator":  # not made yet
            raise AttributeError(name)
        return getattr(self.iterator, name)


class ResumableLoader(DataLoader[T_co]):
    """A DataLoader with `state_dict` and `load_state_dict`, in torchdata's Stateful protocol."""

    _progress: Progress
    _resumes: bool
    _drawn_from: Any = None
    """The latest iterator over an iterable data set in this process."""
    _outer_epoch: Callable[[], int] | None = None
    """Tells the number of the epoch, at least, where somebody else counts them as well."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, a few kilobytes.

        Batches that were read ahead but not given out do not count. Where several passes are
        alive, it is the latest one's.
        """
        progress = self._progress
        if self._resumes:
            return progress.state_dict()
        now = replace(progress, now=self._sampler_rng.get(), keeps_workers=self._keeps_workers)
        if progress.finished or progress.start is None:
            now.sampler = state_of(self._stateful)
        fetcher = None if self._drawn_from is None else self._drawn_from._dataset_fetcher
        iterator = getattr(fetcher, "dataset_iter", None)
        now.dataset = None
        if is_stateful(iterator):
            now.dataset = None if progress.finished else {"iterator": state_of(iterator)}
        elif iterator is not None and is_stateful(self.dataset):
            now.dataset = {"dataset": state_of(self.dataset)}
        return now.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state` was taken, and the following epochs after it.

        The next `iter()` also puts back the random generators that the sampler draws from (torch's
        default one, and the loader's or the sampler's own).

        Raises:
            ValueError: It is not a state of this loader's kind.
        """
        self._progress, self._resumes = Progress.from_state(state), True

    def _take_draws(self, state: dict[str, Any]) -> None:
        """Give the samples of the epochs to come the random draws that follow `state`.

        For those who find their place in the epoch by other means.

        Raises:
            ValueError: It is not a state of this loader's kind.
        """
        self._progress.take_draws(Progress.from_state(state))

    def _begin(self, enter: Callable[[int, Progress], tuple[int, int]]) -> bool:
        """Begin the next pass; whether it is the rest of the one that a loaded state tells of.

        Args:
            enter: The epoch and how far the pass before it came -> `Progress.ahead` and `since`.
        """
        last, resumes, self._resumes = self._progress, self._resumes, False
        rng, draws_base_seed = self._sampler_rng, not self._keeps_workers
        if resumes and self.num_workers == 0 and "dataset" in (last.dataset or ()):
            cast(Any, self.dataset).load_state_dict(copy.deepcopy(last.dataset["dataset"]))
        if resumes and last.start is not None and not last.finished:
            rng.set(last.start)
            if last.yielded or last.dataset is not None:
                return True
            epoch, draws_base_seed = last.epoch, last.drew_base_seed
        else:
            if resumes and last.now is not None:
                rng.set(last.now)
                draws_base_seed = not last.keeps_workers
            epoch = 0 if last.start is None else last.epoch + 1
            if self._outer_epoch is not None:
                epoch = max(epoch, self._outer_epoch())
        loaded = resumes and last.sampler is not None and self._stateful is not None
        if loaded:
            self._stateful.load_state_dict(last.sampler)
        ahead, since = enter(epoch, last)
        self._progress = Progress(
            epoch, ahead, since, start=rng.get(), drew_base_seed=draws_base_seed,
            num_drawn=self._num_drawn(), sampler=state_of(self._stateful),
            may_be_empty=loaded and last.finished,
        )  # fmt: skip
        return False

    @property
    def _keeps_workers(self) -> bool:
        return self._iterator is not None

    def _num_drawn(self) -> int | None:
        """Return what an epoch draws; None if nobody says, or if it changes on the way."""
        whole = self._index_sampler
        if self._stateful is not None:
            return None
        with Attempt():  # of whatever kind: not every sampler has a length
            return len(cast(Any, whole.sampler if type(whole) is BatchSampler else whole))
        return None

    def _index_batches(self, *, goes_on: bool) -> tuple[Iterator[Any], torch.Generator]:
        """Return the index batches of the pass that has begun, or those that are left of it, and a
        generator in the state from which DataLoader draws its base seed.
        """
        base = (torch.default_generator if self.generator is None else self.generator).clone_state()
        progress, stateful = self._progress, self._stateful
        knows_place = goes_on and progress.sampler is not None and stateful is not None
        if knows_place:
            stateful.load_state_dict(progress.sampler)
        batches = iter(self._index_sampler)
        if stateful is not None:
            # Without a way back to the loader: see `Pass` about cycles.
            state = partial(state_of, stateful)
            batches = noting(self._index_sampler, batches, state, progress)
        asked, progress.asked = progress.asked, 0
        batches = _asking(batches, progress)
        if progress.drew_base_seed:
            # What DataLoader draws when it starts a pass.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if goes_on:
            before, num_drawn = progress.num_drawn, self._num_drawn()
            if None not in (before, num_drawn) and before != num_drawn:
                log.warning(_OTHER_LENGTH, before, num_drawn)
            if not knows_place:
                # As many as had been: with the last one a sampler may draw random numbers again.
                drawn = list(islice(batches, max(asked, progress.yielded)))
                batches = chain(drawn[progress.yielded :], batches)
                for _ in drawn[: progress.yielded]:
                    progress.skip()
            assert progress.now is not None, "a loaded state holds the generators of its moment"
            self._sampler_rng.set(progress.now)
            progress.now = None
        return batches, base

    def _iterate(self, *, goes_on: bool) -> Any:
        """Iterate over an iterable data set, or without batches, as DataLoader does, and count.

        Without a state of its own, what was given out can only be loaded again, from the same
        random numbers.
        """
        progress, rng = self._progress, self._sampler_rng
        self.in_order = True  # else nobody would know what was given out
        if goes_on and self._stateful is not None and progress.sampler is not None:
            self._stateful.load_state_dict(progress.sampler)
        here = (progress.dataset or {}) if goes_on and self.num_workers == 0 else {}
        after = progress.now if goes_on else None
        if progress.drew_base_seed:
            self._iterator = None  # DataLoader draws a seed where it starts workers
        elif self._iterator is None:
            after = after or rng.get()  # no seed was drawn for those that go on elsewhere
        iterator: Any = super().__iter__()
        if "iterator" in here:
            iterator._dataset_fetcher.dataset_iter.load_state_dict(copy.deepcopy(here["iterator"]))
        for _ in range(progress.yielded if goes_on and not here else 0):
            if next(iterator, None) is None:
                break
        if after is not None:
            rng.set(after)
        progress.now = None
        self._drawn_from = iterator if self.num_workers == 0 else None
        return CountingIterator(iterator, progress)

    @property
    def _stateful(self) -> Any:
        """The sampler that keeps its own place, in torchdata's protocol; None if there is none."""
        batch_sampler = self._index_sampler
        for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
            if is_stateful(one):
                return one
        return None

    @property
    def _sampler_rng(self) -> SamplerRng:
        return SamplerRng(self.generator, self._index_sampler)
