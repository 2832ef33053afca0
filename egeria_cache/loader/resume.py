"""Mid-epoch resume: where a loader stands in its epochs, small enough for every checkpoint.

The state names the start of the epoch (the states of the random generators that the sampler draws
from) and the number of batches given out since. It does not depend on what was read ahead, nor on
the number of workers: resuming draws the same index batches again and drops those that were used.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from egeria_cache.loader.sampler_rng import SamplerRng
from egeria_cache.loader.samplers import LeanRandomSampler, ShardAffineSampler

__all__ = ["Progress", "ResumableLoader"]

VERSION = 2
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
    keeps_workers: bool = False
    """Whether the next pass goes on with the workers of this one, and draws no base seed."""
    now: dict[str, Any] | None = field(default=None, repr=False)
    """The generators when the state was taken."""
    yielded: int = 0
    """Batches given out."""
    finished: bool = False
    """Whether the pass came to its end; resuming then begins the next epoch."""
    late: list[Any] = field(default_factory=list, repr=False)
    """Index batches that were overtaken by one given out (`in_order=False`), and did not follow."""
    dataset: Any = field(default=None, repr=False)
    """The state of an iterable data set, or of its iterator, that has one, where this process draws
    from it: {"dataset": state} or {"iterator": state}."""
    sampler: Any = field(default=None, repr=False)
    """The state of a sampler that has one, when the last batch given out had been drawn; before
    the first and after the last, as it was then."""
    iterator: Any = field(default=None, repr=False)
    """The same for the sampler's iterator, if that has a state."""
    drawn: deque[tuple[Any, Any]] = field(default_factory=deque, repr=False)
    """The same for the batches that were drawn, but not given out; no part of the state."""
    waiting: dict[int, Any] = field(default_factory=dict, repr=False)
    """`late`, by the batches' numbers in this pass; no part of the state."""
    front: int = 0
    """The number after the foremost batch given out; no part of the state."""
    may_be_empty: bool = False
    """Whether a sampler whose state was loaded may think that it is still at the end of its last
    epoch; no part of the state."""

    def state_dict(self) -> dict[str, Any]:
        """Return values that JSON can write, if those of a sampler are; a few kilobytes."""
        return {"version": VERSION} | {name: getattr(self, name) for name in _STORED}

    def count(self, number: int | None = None, overtaken: Mapping[int, Any] | None = None) -> None:
        """A batch is given out.

        Args:
            number: Its number in the pass; None for the next.
            overtaken: Index batches of lower numbers that were drawn, but not given out.
        """
        number = self.yielded if number is None else number
        self.yielded += 1
        for _ in range(min(number + 1 - self.front, len(self.drawn))):
            self.sampler, self.iterator = self.drawn.popleft()
        self.waiting.pop(number, None)
        if overtaken:
            self.waiting |= {n: overtaken[n] for n in overtaken if n >= self.front}
        self.front = max(self.front, number + 1)
        if self.late or self.waiting:
            self.late = list(self.waiting.values())

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


_NOT_STORED = ("drawn", "waiting", "front", "may_be_empty")
_STORED = [f.name for f in fields(Progress) if f.name not in _NOT_STORED]


class ResumableLoader(DataLoader[T_co]):
    """A DataLoader with `state_dict` and `load_state_dict`, in torchdata's Stateful protocol."""

    _progress: Progress
    _resumes: bool
    _rest: _Rest | None
    _drawn_from: Any = None
    """The latest iterator over an iterable data set in this process."""
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
        now = replace(progress, now=self._sampler_rng.get(), keeps_workers=self._keeps_workers)
        if progress.finished or progress.start is None:
            now.sampler, now.iterator = self._sampler_state(), None
        now.dataset = self._dataset_state(progress.finished)
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

    def _begin(self, variant_of: Callable[[int, int], tuple[int, int]]) -> torch.Generator:
        """Begin the next pass, or the rest of one.

        Sets `_progress`, and lets `_index_sampler` give the batches that are left.

        Args:
            variant_of: (epoch, first frozen epoch) -> (variant, first frozen epoch).

        Returns:
            A generator in the state from which DataLoader draws the base seed of this pass.
        """
        last, resumes, self._resumes = self._progress, self._resumes, False
        rng, draws_base_seed = self._sampler_rng, not self._keeps_workers
        if resumes and self.num_workers == 0 and "dataset" in (last.dataset or ()):
            cast(Any, self.dataset).load_state_dict(copy.deepcopy(last.dataset["dataset"]))
        if resumes and last.start is not None and not last.finished:
            rng.set(last.start)
            if last.yielded or last.dataset is not None:
                return self._continue(last, rng)
            epoch, draws_base_seed = last.epoch, last.drew_base_seed
        else:
            if resumes and last.now is not None:
                rng.set(last.now)
                draws_base_seed = not last.keeps_workers
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

    @property
    def _keeps_workers(self) -> bool:
        return self._iterator is not None

    def _continue(self, last: Progress, rng: SamplerRng) -> torch.Generator:
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
            for _ in range(0 if known else last.yielded + len(last.late)):
                if next(batches, None) is None:
                    break
            last.drawn.clear()
        assert last.now is not None, "a loaded state holds the generators of its moment"
        rng.set(last.now)
        self._rest = _Rest(chain(last.late, batches), self._index_sampler)
        front = last.yielded + len(last.late)
        waiting = dict(enumerate(last.late, last.yielded))
        self._progress = replace(last, now=None, waiting=waiting, front=front)
        return base

    def _plain_iter(self) -> Any:
        """Iterate as DataLoader does, counting what is given out."""
        if self._progress.drew_base_seed and self._rest is None:
            self._iterator = None  # DataLoader draws a seed where it starts workers
        elif self._rest is None and self._iterator is None:
            batches = iter(self._index_sampler)
            self._rest = _Rest(chain(list(islice(batches, 1)), batches), self._index_sampler)
        continued = self._rest is not None
        before = self._sampler_rng.get() if continued else None
        iterator: Any = self._repeated() if continued and self._is_iterable else super().__iter__()
        if before is not None:  # the base seed was drawn when the pass began
            self._sampler_rng.set(before)
        self._rest = None
        self._drawn_from = iterator if self._is_iterable and self.num_workers == 0 else None
        iterator.progress = self._progress
        return iterator

    def _repeated(self) -> Any:
        """Iterate over an iterable data set from the pass's beginning, past what was given out.

        Without a state of its own, its batches can only be loaded again, from the same random
        numbers.
        """
        if self.num_workers and not self.in_order:
            raise ValueError(
                "an IterableDataset whose batches come in any order (in_order=False) cannot go on "
                "in mid-epoch: which samples were given out is not known; begin an epoch"
            )
        progress = self._progress
        assert progress.start is not None, "a pass had begun"
        if progress.drew_base_seed:
            self._iterator = None  # the numbers of persistent workers have gone on: others start
        here = (progress.dataset or {}) if self.num_workers == 0 else {}
        if not here:
            self._sampler_rng.set(progress.start)
        self._rest = None
        iterator: Any = super().__iter__()
        if "iterator" in here:
            iterator._dataset_fetcher.dataset_iter.load_state_dict(copy.deepcopy(here["iterator"]))
        if here:
            return iterator
        iterator.progress = Progress()  # these do not count
        for _ in range(progress.yielded):
            if next(iterator, None) is None:
                break
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
        if type(whole.sampler if type(whole) is BatchSampler else whole) in _WITHOUT_STATE:
            return whole
        # Without a way back to the loader: see `Pass` about cycles.
        return _Noted(whole, partial(_state_of, self._stateful), self._progress)

    @property
    def _is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def _dataset_state(self, finished: bool) -> dict[str, Any] | None:
        if self._drawn_from is None:
            return None
        iterator = self._drawn_from._dataset_fetcher.dataset_iter
        if _is_stateful(iterator):
            return None if finished else {"iterator": _state_of(iterator)}
        return {"dataset": _state_of(self.dataset)} if _is_stateful(self.dataset) else None

    def _sampler_state(self) -> Any:
        return _state_of(self._stateful)

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
    def _sampler_rng(self) -> SamplerRng:
        return SamplerRng(self.generator, super()._index_sampler)


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


def _state_of(stateful: Any) -> Any:
    return None if stateful is None else copy.deepcopy(stateful.state_dict())


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
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # Persistent workers serve many passes, and each may have an index sampler of its own.
        self._index_sampler = loader._index_sampler
        super()._reset(loader, first_iter)


def draw_base_seed(generator: torch.Generator | None) -> None:
    """Consume what DataLoader consumes when it starts a pass."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _copy_of(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
