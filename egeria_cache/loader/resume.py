"""Mid-epoch resume: where a loader stands in its epochs, small enough for every checkpoint.

The state names the start of the epoch (the states of the random generators that the sampler draws
from) and the number of batches given out since. It does not depend on what was read ahead, nor on
the number of workers: resuming draws the same index batches again and drops those that were used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
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

from egeria_cache.attempt import Attempt
from egeria_cache.loader.counted import CountedMulti, CountedSingle
from egeria_cache.loader.entered import Noted, Rest, is_stateful, state_of
from egeria_cache.loader.progress import Progress
from egeria_cache.loader.sampler_rng import SamplerRng
from egeria_cache.loader.samplers import LeanRandomSampler, ShardAffineSampler

__all__ = ["ResumableLoader", "draw_base_seed"]

_WITHOUT_STATE = (
    RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler,
    DistributedSampler, LeanRandomSampler, ShardAffineSampler,
)  # fmt: skip
"""Neither they nor their iterators have one: they are drawn from again."""
T_co = TypeVar("T_co", covariant=True)
log = logging.getLogger("egeria")


class ResumableLoader(DataLoader[T_co]):
    """A DataLoader with `state_dict` and `load_state_dict`, in torchdata's Stateful protocol."""

    _progress: Progress
    _resumes: bool
    _rest: Rest | None
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

    def _take_draws(self, state: dict[str, Any]) -> None:
        """Give the samples of the epochs to come the random draws that follow `state`.

        For those who find their place in the epoch by other means.

        Raises:
            ValueError: It is not a state of this loader's kind.
        """
        self._progress.take_draws(Progress.from_state(state))

    def _begin(self, enter: Callable[[int, Progress], tuple[int, int]]) -> torch.Generator:
        """Begin the next pass, or the rest of one.

        Sets `_progress`, and lets `_index_sampler` give the batches that are left.

        Args:
            enter: The epoch and how far the pass before it came -> `Progress.ahead` and `since`.

        Returns:
            A generator in the state from which DataLoader draws the base seed of this pass.
        """
        last, resumes, self._resumes = self._progress, self._resumes, False
        rng, draws_base_seed = self._sampler_rng, not self._keeps_workers
        if resumes and last.start is not None and not last.finished:
            rng.set(last.start)
            if last.yielded and not self._starts_over(last):
                return self._continue(last, rng)
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
            num_drawn=self._num_drawn(), sampler=self._sampler_state(),
            any_order=self.num_workers > 0 and not self.in_order,
            may_be_empty=loaded and last.finished,
        )  # fmt: skip
        return _copy_of(self._base_generator)

    @property
    def _keeps_workers(self) -> bool:
        return self._iterator is not None

    def _num_drawn(self) -> int | None:
        """Return what an epoch draws; None if nobody says, or if it changes on the way."""
        whole = super()._index_sampler
        if self._stateful is not None or self._is_iterable:
            return None
        with Attempt():  # of whatever kind: not every sampler has a length
            return len(cast(Any, whole.sampler if type(whole) is BatchSampler else whole))
        return None

    def _starts_over(self, last: Progress) -> bool:
        """Whether nobody knows which samples were given out: the epoch begins anew then."""
        if last.any_order or self._is_iterable:
            log.warning(
                "%s cannot go on in the middle of an epoch, for which samples were given out is not"
                " known: the epoch begins anew. Take states between two epochs",
                "an IterableDataset" if self._is_iterable else "a loader with in_order=False",
            )
        return last.any_order or self._is_iterable

    def _continue(self, last: Progress, rng: SamplerRng) -> torch.Generator:
        num_drawn = self._num_drawn()
        if None not in (last.num_drawn, num_drawn) and last.num_drawn != num_drawn:
            log.warning(
                "the loader's state was taken in the middle of an epoch of %d draws, and an epoch "
                "has %d now: what follows is not the rest of that one. Load the state with the "
                "data set and the sampler that it was taken with, or begin an epoch",
                last.num_drawn, num_drawn,
            )  # fmt: skip
        base = _copy_of(self._base_generator)
        if last.drew_base_seed:
            draw_base_seed(self.generator)
        whole, known = self._index_sampler, last.sampler is not None and self._stateful is not None
        if known:
            self._stateful.load_state_dict(last.sampler)  # it knows where it was
        if isinstance(whole, Noted) and last.iterator is not None:
            batches = whole.entered(last.iterator)
        else:
            batches = iter(whole)
            for _ in range(0 if known else last.yielded):
                if next(batches, None) is None:
                    break
            last.drawn.clear()
        assert last.now is not None, "a loaded state holds the generators of its moment"
        rng.set(last.now)
        self._rest = Rest(batches, self._index_sampler)
        self._progress = replace(last, now=None, front=last.yielded)
        return base

    def _plain_iter(self) -> Any:
        """Iterate as DataLoader does, counting what is given out."""
        if self._progress.drew_base_seed and self._rest is None:
            self._iterator = None  # DataLoader draws a seed where it starts workers
        elif self._rest is None and self._iterator is None:
            batches = iter(self._index_sampler)
            self._rest = Rest(chain(list(islice(batches, 1)), batches), self._index_sampler)
        continued = self._rest is not None
        before = self._sampler_rng.get() if continued else None
        iterator: Any = super().__iter__()
        if before is not None:  # the base seed was drawn when the pass began
            self._sampler_rng.set(before)
        self._rest = None
        iterator.progress = self._progress
        return iterator

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return CountedSingle(self)
        self.check_worker_number_rationality()
        return CountedMulti(self)

    @property
    def _index_sampler(self) -> Any:
        rest = self.__dict__.get("_rest")
        if rest is not None:
            return rest
        whole = super()._index_sampler
        if type(whole.sampler if type(whole) is BatchSampler else whole) in _WITHOUT_STATE:
            return whole
        # Without a way back to the loader: see `Pass` about cycles.
        return Noted(whole, partial(state_of, self._stateful), self._progress)

    @property
    def _is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def _sampler_state(self) -> Any:
        return state_of(self._stateful)

    @property
    def _stateful(self) -> Any:
        """The sampler that keeps its own place, in torchdata's protocol; None if there is none."""
        batch_sampler = super()._index_sampler
        for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
            if is_stateful(one):
                return one
        return None

    @property
    def _base_generator(self) -> torch.Generator:
        return self.generator if self.generator is not None else torch.default_generator

    @property
    def _sampler_rng(self) -> SamplerRng:
        return SamplerRng(self.generator, super()._index_sampler)


def draw_base_seed(generator: torch.Generator | None) -> None:
    """Consume what DataLoader consumes when it starts a pass."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _copy_of(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
