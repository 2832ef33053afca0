"""Mid-epoch resume: where a loader stands in its epochs, small enough for every checkpoint.

The state names the start of the epoch (the states of the random generators that the sampler draws
from) and the number of batches given out since. It does not depend on what was read ahead, nor on
the number of workers: resuming draws the same index batches again and drops those that were used.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from egeria_cache.loader.samplers import LeanRandomSampler, ShardAffineSampler

__all__ = ["Progress", "ResumableLoader"]

VERSION = 1
_WITHOUT_STATE = (
    RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler,
    DistributedSampler, LeanRandomSampler, ShardAffineSampler,
)  # fmt: skip
"""Neither they nor their iterators have one: they are drawn from again."""
T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)
class Progress:
    """How far one pass over the loader has come."""

    epoch: int = 0
    variant: int = 0
    """Augmented version of this epoch's samples."""
    first_frozen: int = 0
    """The epoch since which the boundary has been set, for the versions to come."""
    start: dict[str, Any] | None = field(default=None, repr=False)
    """The sampler's generators when the pass began; None before the first pass."""
    drew_base_seed: bool = False
    """Whether DataLoader drew a base seed for new workers when the pass began."""
    now: dict[str, Any] | None = field(default=None, repr=False)
    """The generators when the state was taken."""
    yielded: int = 0
    """Batches given out."""
    finished: bool = False
    """Whether the pass came to its end; resuming then begins the next epoch."""
    sampler: Any = field(default=None, repr=False)
    """The state of a sampler that has one, when the last batch given out had been drawn; before
    the first and after the last, as it was then."""
    iterator: Any = field(default=None, repr=False)
    """The same for the sampler's iterator, if that has a state."""
    drawn: deque[tuple[Any, Any]] = field(default_factory=deque, repr=False)
    """The same for the batches that were drawn, but not given out; no part of the state."""
    may_be_empty: bool = False
    """Whether a sampler whose state was loaded may think that it is still at the end of its last
    epoch; no part of the state."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and byte tensors, a few kilobytes."""
        return {"version": VERSION} | {name: getattr(self, name) for name in _STORED}

    def count(self) -> None:
        """A batch is given out."""
        self.yielded += 1
        if self.drawn:
            self.sampler, self.iterator = self.drawn.popleft()

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


_STORED = [f.name for f in fields(Progress) if f.name not in ("drawn", "may_be_empty")]


class ResumableLoader(DataLoader[T_co]):
    """A DataLoader with `state_dict` and `load_state_dict`, in torchdata's Stateful protocol."""

    _progress: Progress
    _resumes: bool
    _rest: _Rest | None
    outer_epoch: Callable[[], int] | None = None
    """Tells the number of the epoch, at least, where somebody else counts them as well."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, a few kilobytes.

        Batches that were read ahead but not given out do not count. Where several passes are
        alive, it is the latest one's.
        """
        progress = self._progress
        if self._resumes:
            return progress.state_dict()
        now = replace(progress, now=self._sampler_rng.get())
        if progress.finished or progress.start is None:
            now.sampler, now.iterator = self._sampler_state(), None
        return now.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state` was taken, and the following epochs after it.

        The next `iter()` also puts back the random generators that the sampler draws from (torch's
        default one, and the loader's or the sampler's own).

        Raises:
            ValueError: It is not a state of this loader's kind.
        """
        self._progress, self._resumes = Progress.from_state(state), True

    def take_versions(self, state: dict[str, Any]) -> None:
        """Give the samples of the epochs to come the augmented versions that follow `state`.

        For those who find their place in the epoch by other means.

        Raises:
            ValueError: It is not a state of this loader's kind.
        """
        self._progress.first_frozen = Progress.from_state(state).first_frozen

    def _begin(
        self, variant_of: Callable[[int, int], tuple[int, int]], draws_base_seed: bool
    ) -> torch.Generator:
        """Begin the next pass, or the rest of one.

        Sets `_progress`, and lets `_index_sampler` give the batches that are left.

        Args:
            variant_of: (epoch, first frozen epoch) -> (variant, first frozen epoch).
            draws_base_seed: Whether new workers will be started.

        Returns:
            A generator in the state from which DataLoader draws the base seed of this pass.
        """
        last, resumes, self._resumes = self._progress, self._resumes, False
        rng = self._sampler_rng
        if resumes and last.start is not None and not last.finished:
            rng.set(last.start)
            if last.yielded:
                return self._continue(last, rng)
            epoch = last.epoch
        else:
            if resumes and last.now is not None:
                rng.set(last.now)
            epoch = 0 if last.start is None else last.epoch + 1
            if self.outer_epoch is not None:
                epoch = max(epoch, self.outer_epoch())
        loaded = resumes and last.sampler is not None and self._stateful is not None
        if loaded:
            self._stateful.load_state_dict(last.sampler)
        variant, first_frozen = variant_of(epoch, last.first_frozen)
        self._progress = Progress(
            epoch, variant, first_frozen, start=rng.get(), drew_base_seed=draws_base_seed,
            sampler=self._sampler_state(), may_be_empty=loaded and last.finished,
        )  # fmt: skip
        return _copy_of(self._base_generator)

    def _continue(self, last: Progress, rng: _SamplerRng) -> torch.Generator:
        base = _copy_of(self._base_generator)
        if last.drew_base_seed:
            draw_base_seed(self.generator)
        whole, known = self._index_sampler, last.sampler is not None and self._stateful is not None
        if known:
            self._stateful.load_state_dict(last.sampler)  # it knows where it was
        if isinstance(whole, _Noted) and last.iterator is not None:
            batches = whole.entered(last.iterator)
        else:
            batches = iter(whole)
            for _ in range(0 if known else last.yielded):
                if next(batches, None) is None:
                    break
            last.drawn.clear()
        assert last.now is not None, "a loaded state holds the generators of its moment"
        rng.set(last.now)
        self._rest = _Rest(batches, self._index_sampler)
        self._progress = replace(last, now=None)
        return base

    def _plain_iter(self) -> Any:
        """Iterate as DataLoader does, counting what is given out."""
        continued = self._rest is not None
        before = self._sampler_rng.get() if continued else None
        iterator = super().__iter__()
        if before is not None:  # the base seed was drawn when the pass began
            self._sampler_rng.set(before)
        self._rest = None
        iterator.progress = self._progress  # type: ignore[attr-defined]
        return iterator

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return _CountedSingle(self)
        self.check_worker_number_rationality()
        return _CountedMulti(self)

    @property
    def _index_sampler(self) -> Any:
        rest = self.__dict__.get("_rest")
        if rest is not None:
            return rest
        whole = super()._index_sampler
        if type(whole) is BatchSampler and type(whole.sampler) in _WITHOUT_STATE:
            return whole
        return _Noted(whole, self._sampler_state, self._progress)

    def _sampler_state(self) -> Any:
        stateful = self._stateful
        return None if stateful is None else copy.deepcopy(stateful.state_dict())

    @property
    def _stateful(self) -> Any:
        """The sampler that keeps its own place, in torchdata's protocol; None if there is none."""
        batch_sampler = super()._index_sampler
        for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
            if _is_stateful(one):
                return one
        return None

    @property
    def _base_generator(self) -> torch.Generator:
        return self.generator if self.generator is not None else torch.default_generator

    @property
    def _sampler_rng(self) -> _SamplerRng:
        return _SamplerRng(self.generator, super()._index_sampler)


class _SamplerRng:
    """The random generators that a loader's sampler may draw from."""

    def __init__(self, generator: torch.Generator | None, index_sampler: Any) -> None:
        sampler = getattr(index_sampler, "sampler", None)
        self._samplers = _samplers(index_sampler)
        own = [getattr(thing, "generator", None) for thing in self._samplers]
        found = [torch.default_generator, generator, *own]
        self._torch = list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))
        # torch's own samplers draw from torch alone; a user's may draw from anything.
        self._is_torch = type(index_sampler) is BatchSampler and isinstance(
            sampler, RandomSampler | SequentialSampler
        )

    def get(self) -> dict[str, Any]:
        """Return their states, as byte tensors and plain values."""
        state: dict[str, Any] = {"torch": [generator.get_state() for generator in self._torch]}
        if not self._is_torch:
            state["python"] = random.getstate()
            state["numpy"] = np.random.get_state()
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
            generator.set_state(value)
        if "python" in state:
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
            np.random.set_state(state["numpy"])


def _samplers(index_sampler: Any) -> list[Any]:
    """Return an index sampler, those that it wraps, and the sampler that they draw from."""
    found: list[Any] = []
    pending = [index_sampler]
    while pending:
        thing = pending.pop()
        if thing is not None and all(thing is not other for other in found):
            found.append(thing)
            pending += [getattr(thing, name, None) for name in ("sampler", "batch_sampler")]
    return found


class _Rest:
    """An index sampler that was entered in mid-epoch; from its second pass on it is whole."""

    def __init__(self, rest: Iterator[Any], whole: Iterable[Any]) -> None:
        self._once: Iterator[Any] | None = rest
        self._whole = whole

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole) if self._once is None else self._run(self._once)

    def _run(self, rest: Iterator[Any]) -> Iterator[Any]:
        # Only now: DataLoader asks for an iterator twice before it uses one.
        self._once = None
        yield from rest


class _Noted:
    """An index sampler that notes its state, and its iterator's, whenever it was drawn from."""

    def __init__(self, whole: Iterable[Any], state: Callable[[], Any], progress: Progress) -> None:
        self._whole, self._state, self._progress = whole, state, progress

    def __len__(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # DataLoader asks a batch sampler now, and what lies in a BatchSampler with the first batch.
        return self._run(None if type(self._whole) is BatchSampler else iter(self._whole))

    def entered(self, state: Any) -> Iterator[Any]:
        """Return an iterator that goes on where another one had this state."""
        batches = self._begun()
        _bearer(batches).load_state_dict(copy.deepcopy(state))
        return self._run(batches)

    def _begun(self) -> Iterator[Any]:
        return _Batches(self._whole) if type(self._whole) is BatchSampler else iter(self._whole)

    def _run(self, batches: Iterator[Any] | None) -> Iterator[Any]:
        batches = self._begun() if batches is None else batches
        again, self._progress.may_be_empty = self._progress.may_be_empty, False
        drawn = self._progress.drawn
        while True:
            for batch in batches:
                again, bearer = False, _bearer(batches)
                own = copy.deepcopy(bearer.state_dict()) if _is_stateful(bearer) else None
                state = self._state()
                if state is not None or own is not None:
                    drawn.append((state, own))
                yield batch
            if not again:
                return
            again, batches = False, self._begun()


class _Batches:
    """What `BatchSampler` gives, with the sampler's iterator in reach."""

    def __init__(self, whole: BatchSampler) -> None:
        self.indices = iter(whole.sampler)
        self._size, self._drop_last = whole.batch_size, whole.drop_last

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> list[Any]:
        batch = list(islice(self.indices, self._size))
        if not batch or (self._drop_last and len(batch) < self._size):
            raise StopIteration
        return batch


def _bearer(batches: Any) -> Any:
    """Return the iterator that may have a state."""
    return batches.indices if isinstance(batches, _Batches) else batches


def _is_stateful(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


class _Counted:
    """Mixed into DataLoader's own iterators: keeps the loader's `Progress`."""

    progress: Progress

    def __next__(self) -> Any:
        try:
            batch = super().__next__()  # type: ignore[misc]
        except StopIteration:
            self.progress.finished = True
            raise
        self.progress.count()
        return batch


class _CountedSingle(_Counted, _SingleProcessDataLoaderIter):
    pass


class _CountedMulti(_Counted, _MultiProcessingDataLoaderIter):
    pass


def draw_base_seed(generator: torch.Generator | None) -> None:
    """Consume what DataLoader consumes when it starts a pass."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _copy_of(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
