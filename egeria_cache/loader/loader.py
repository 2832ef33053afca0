"""`EgeriaLoader`: a `torch.utils.data.DataLoader` that knows which samples come next.

The way of a batch through a pass (`one_pass.py`): the batch sampler's index batches are drawn ahead
and planned (`plan.py`); the misses go to DataLoader's own workers, each sample under its own seed
(`samples/loading.py`); the hits are read ahead (`prefetch/prefetcher.py`); the batch is put
together as DataLoader would have given it (`assembly.py`), its tensors knowing their samples
(`batch/tensor.py`).
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from egeria_cache.arguments import check_whole_number, names_known
from egeria_cache.attempt import in_turns
from egeria_cache.cache import ActivationCache
from egeria_cache.loader import resume
from egeria_cache.loader.assembly import Assembly
from egeria_cache.loader.one_pass import Pass
from egeria_cache.loader.plan import Planner
from egeria_cache.samples import DEFAULT_REUSE, Draws, Loaded, LoaderSource

T_co = TypeVar("T_co", covariant=True)
log = logging.getLogger("egeria")
_OF_BATCHES = frozenset({"batch_size", "sampler", "batch_sampler", "drop_last"})
"""Arguments that a batch sampler replaces."""
_LOADERS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Those that are served, or seed their samples, by key: the latest last."""
MAX_CHANGES = 3
"""Passes in a row that find another data set; then samples are loaded in each, and compared. What
the front reads may be another so often where only a number has changed."""


class EgeriaLoader(DataLoader[T_co]):
    """DataLoader that skips the loading of cached samples, and reads their activations ahead.

    Takes all of DataLoader's arguments; without `cache` and `seed` it gives what DataLoader gives.
    Batches come in order, also under `in_order=False`: the place in an epoch is always known.

    Args:
        cache: The `ActivationCache` of the model that is trained on these batches.
        seed: Seed of the samples' random augmentation. Each sample is loaded with `random`, NumPy's
            global state and torch's default generator seeded from (seed, sample ID, number of the
            draw), and they are restored afterwards. Defaults to 0 with a cache.
        reuse: For how many epochs a random draw of a sample is used once there is a boundary. Then
            it is drawn anew, each sample in its turn: of every batch, about 1 - 1/reuse is served.
            With 1 every epoch draws anew, and nothing is served; with None the first draws are kept
            for ever. Samples that draw nothing are served always, and while nothing is frozen every
            epoch draws anew. See docs/augmentation.md.
        augmentation_variants: How many draws of each sample are kept on disk: each epoch that makes
            no new one takes any of them.
        name: Distinguishes the loaders of one cache ("train", "val").
        sample_id: Maps an index drawn by the sampler to the sample's stable identity: an int, a
            string, or a tuple of them. Defaults to the data set's `sample_id` method if it has
            one, else to the index itself.
        sample_version: Maps an index to the version of the sample's content (a file's time of
            change, say): another version is another sample. Defaults to the data set's
            `sample_version` method if it has one.

    Raises:
        TypeError: A cache was given, and the dataset has no length, or is a DataLoader.
        ValueError: `reuse` or `augmentation_variants` is below 1.
    """

    _asked_by_accelerate: ClassVar[Callable[[], None] | None] = None
    """Called where Accelerate is about to rebuild a loader of this kind from its attributes."""
    _outer_epoch: Callable[[], int] | None = None
    """Tells the number of the epoch, at least, where somebody else counts them as well."""
    _drawn_from: Any = None
    """The latest iterator over an iterable data set in this process."""

    @names_known
    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        cache: ActivationCache | None = None,
        seed: int | None = None,
        reuse: int | None = DEFAULT_REUSE,
        augmentation_variants: int = 1,
        name: str = "train",
        sample_id: Callable[[Any], Any] | None = None,
        sample_version: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        # Trainers that build a loader anew read its arguments from attributes of the same names.
        self.name, self.seed, self.reuse = name, seed, reuse
        self.augmentation_variants = augmentation_variants
        self.sample_id, self.sample_version = sample_id, sample_version
        self._serve(cache)

    def _serve(self, cache: ActivationCache | None) -> None:
        """Be served from `cache` from the next pass on."""
        if cache is not None and not isinstance(cache, ActivationCache):
            raise TypeError(f"cache is an ActivationCache of a model, got {type(cache).__name__}")
        check_whole_number("augmentation_variants", self.augmentation_variants)
        if self.reuse is not None:
            check_whole_number("reuse, in epochs, or None for ever,", self.reuse)
        if cache is not None and not isinstance(self.dataset, IterableDataset):
            _check_sized(self.dataset)
            if "api" in vars(cache):  # else it opens with the first pass
                cache.api.engine.is_awaited = True
        self.cache = cache
        self.seed = 0 if self.seed is None and cache is not None else self.seed
        self.source = LoaderSource(
            self.dataset, self.collate_fn, sample_id=self.sample_id,
            sample_version=self.sample_version, name=self.name, seed=self.seed,
            draws=Draws(self.seed or 0, self.reuse, self.augmentation_variants),
            workers=self._worker_options() if self.num_workers else None,
        )  # fmt: skip
        # Without a cache every epoch draws anew, whether or not drawing is seen.
        self.source.is_known_random = cache is None
        self._progress, self._resumes = resume.Progress(), False
        self._persistent: tuple[Planner, DataLoader[Loaded]] | None = None
        self._passes = WeakSet[Pass]()
        self._is_uncached = self._why_uncached() is not None
        self._changed = set[int]()
        """Passes in a row, by number, that found another data set, and not one of those before."""
        self._assembly = Assembly(self.source)
        if not self._is_uncached and self.seed is not None:
            _LOADERS[self.source.key] = self

    def _around(self, batch_sampler: Any) -> EgeriaLoader[T_co]:
        """Return a loader of the same samples, and what is stored of them, in other batches.

        It goes on with this one's random draws, and begins with an epoch of its own.

        Args:
            batch_sampler: Yields lists of indices, as DataLoader's `batch_sampler`.
        """
        arguments = {name: getattr(self, name) for name in _ARGUMENTS if name not in _OF_BATCHES}
        other: EgeriaLoader[T_co] = EgeriaLoader(**arguments, batch_sampler=batch_sampler)
        other.source, other._assembly = self.source, self._assembly
        other._progress.take_draws(self._progress)
        other._outer_epoch = self._outer_epoch
        return other

    @cached_property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate asks this of every loader before it rebuilds it: it is told how."""
        asked = type(self)._asked_by_accelerate
        if not self._is_uncached and asked is not None:
            asked()
        return False

    def __repr__(self) -> str:
        size, cached = "?", "not cached"
        with suppress(TypeError):
            size = str(len(cast(Sized, self.dataset)))
        if self.cache is None:
            cached = "no cache"
        elif not self._is_uncached:
            boundary = self.cache.boundary
            cached = f"cached at {boundary!r}" if boundary else "nothing frozen"
        return (
            f"{type(self).__name__}({self.name!r}, {size} samples by {self.batch_size}, epoch "
            f"{self._progress.epoch}, {self._progress.yielded} batches given out, {cached})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and the place in the epoch: another process makes its own parts."""
        arguments = {name: getattr(self, name) for name in _ARGUMENTS}
        if self.batch_sampler is not None and type(self.batch_sampler) is not BatchSampler:
            arguments |= {"batch_size": 1, "sampler": None, "drop_last": False}
        elif self.batch_sampler is not None or self.batch_size is None:
            arguments["batch_sampler"] = None
        # As bytes: processes share the memory of tensors, and these are gone before a child looks.
        torch.save(self.state_dict(), place := io.BytesIO())
        return {"arguments": arguments, "place": place.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        EgeriaLoader.__init__(self, **state["arguments"])
        self.load_state_dict(torch.load(io.BytesIO(state["place"]), weights_only=False))

    @in_turns()
    def __iter__(self) -> Any:
        self.source.use_collate(self.collate_fn)
        if self.cache is not None and not self._is_uncached:
            with self.cache.api.beside(self.source.key):
                if not self.cache.api.is_beside(self.source):
                    self._ask_data_again(at_end=False)
                self.cache.api.adopt(self.source)
        self.source.is_known_random |= self._progress.is_random
        self.source.is_steady |= self._progress.is_steady
        self._progress.is_steady = False  # from now on the source knows
        goes_on = self._begin()
        if self._is_uncached:
            return self._iterate(goes_on=goes_on)
        return Pass(self, self._progress, *self._index_batches(goes_on=goes_on))

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, a few kilobytes.

        Batches that were read ahead but not given out do not count. Where several passes are
        alive, it is the latest one's.
        """
        progress = self._progress
        if self._resumes:
            return progress.state_dict()
        now = replace(
            progress, now=self._sampler_rng.get(), keeps_workers=self._keeps_workers,
            is_random=progress.is_random or self.source.is_random, is_steady=self.source.is_steady,
        )  # fmt: skip
        if progress.finished or progress.start is None:
            now.sampler = resume.state_of(self._stateful)
        fetcher = None if self._drawn_from is None else self._drawn_from._dataset_fetcher
        iterator = getattr(fetcher, "dataset_iter", None)
        now.dataset = None
        if resume.is_stateful(iterator):
            now.dataset = None if progress.finished else {"iterator": resume.state_of(iterator)}
        elif iterator is not None and resume.is_stateful(self.dataset):
            now.dataset = {"dataset": resume.state_of(self.dataset)}
        return now.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state` was taken, and the following epochs after it.

        The next `iter()` also puts back the random generators that the sampler draws from (torch's
        default one, and the loader's or the sampler's own).

        Raises:
            ValueError: It is not a state of this loader's kind.
        """
        self._progress, self._resumes = resume.Progress.from_state(state), True

    def _take_draws(self, state: dict[str, Any]) -> None:
        """Give the samples of the epochs to come the random draws that follow `state`.

        For those who find their place in the epoch by other means.

        Raises:
            ValueError: It is not a state of this loader's kind.
        """
        self._progress.take_draws(resume.Progress.from_state(state))

    def _begin(self) -> bool:
        """Begin the next pass; whether it is the rest of the one that a loaded state tells of."""
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
        ahead, since = self._enter(epoch, last)
        self._progress = resume.Progress(
            epoch, ahead, since, start=rng.get(), drew_base_seed=draws_base_seed,
            sampler=resume.state_of(self._stateful), may_be_empty=loaded and last.finished,
        )  # fmt: skip
        return False

    @property
    def _keeps_workers(self) -> bool:
        return self._persistent is not None or self._iterator is not None

    def _index_batches(self, *, goes_on: bool) -> tuple[Iterator[Any], torch.Generator]:
        """Return the index batches of the pass that has begun, or those that are left of it, and a
        generator in the state from which DataLoader draws its base seed.
        """
        progress, stateful = self._progress, self._stateful
        knows_place = goes_on and progress.sampler is not None and stateful is not None
        if knows_place:
            stateful.load_state_dict(progress.sampler)
        batches = iter(self._index_sampler)
        base = (torch.default_generator if self.generator is None else self.generator).clone_state()
        if progress.drew_base_seed:
            # What DataLoader draws when it starts a pass; which it begins again behind workers.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            batches = iter(self._index_sampler) if self.num_workers and not stateful else batches
        if stateful is not None or goes_on:
            # Without a way back to the loader: see `Pass` about cycles.
            state = None if stateful is None else partial(resume.state_of, stateful)
            batches = resume.noting(self._index_sampler, batches, state, progress)
        if goes_on:
            if not knows_place:
                # As many as had been: with the last one a sampler may draw random numbers again.
                drawn = list(islice(batches, max(progress.asked, progress.yielded)))
                batches = chain(drawn[progress.yielded :], batches)
                progress.drawn = deque(islice(progress.drawn, progress.yielded, None))
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
        deque(islice(iterator, progress.yielded if goes_on and not here else 0), maxlen=0)
        if after is not None:
            rng.set(after)
        progress.now = None
        self._drawn_from = iterator if self.num_workers == 0 else None
        return resume.CountingIterator(iterator, progress)

    @property
    def _stateful(self) -> Any:
        """The sampler that keeps its own place, in torchdata's protocol; None if there is none."""
        batch_sampler = self._index_sampler
        for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
            if resume.is_stateful(one):
                return one
        return None

    @property
    def _sampler_rng(self) -> resume.SamplerRng:
        return resume.SamplerRng(self.generator, self._index_sampler)

    def _why_uncached(self) -> str | None:
        """Why its batches are passed through as DataLoader's; None if they can be served."""
        reason = None
        if isinstance(self.dataset, IterableDataset):
            reason = (
                "an IterableDataset has no sample IDs that a later epoch could ask for; give a "
                "map-style data set, with __getitem__ and __len__"
            )
        elif self.batch_size is None and self.batch_sampler is None:
            reason = "batch_size=None turns batching off; give a batch_size or a batch_sampler"
        if reason is not None and self.cache is not None:
            self.cache.api.leave_uncached(self.source.key, reason)
        elif reason is not None and self.seed is not None:
            log.warning("loader %r passes its batches through uncached: %s", self.name, reason)
        return reason

    def _ask_data_again(self, *, at_end: bool) -> None:
        """Void what was stored if the data set is not what it was: at each end of a pass.

        What a pass stored under the old name is removed if the change came while it ran.
        """
        if self.cache is None:
            return
        began = time.perf_counter()
        what = self.source.fingerprint.changed()
        self.cache.api.took_beside(time.perf_counter() - began)
        if what is not None:
            stuck = self._persistent is not None and not self.source.fingerprint.is_shared
            unseen = "its persistent workers do not see that its data set has changed"
            last = self._progress
            midway = at_end or (last.start is not None and not last.finished)
            self._note_change(what, midway=midway, give_up=unseen if stuck else "")
        elif not at_end and self._changed and self._progress.epoch not in self._changed:
            counts = self.cache.api.counters.counts
            counts.why_not = self.cache.api.left_out.get(self.source.key)
            self._changed.clear()

    def _note_change(self, what: str, *, midway: bool = True, give_up: str = "") -> None:
        """Void what was stored; in mid-pass, what changes is loaded differently at once."""
        assert self.cache is not None
        self.source.forget()  # it may pad otherwise
        if not self.source.fingerprint.is_new:  # it goes back and forth
            self._changed.clear()
        self._changed.add(self._progress.epoch)
        is_often = len(self._changed) > MAX_CHANGES
        is_idle = not is_often and self.source.fingerprint.is_idle_number(what)
        if not is_idle and (give_up or not is_often):
            self.cache.api.data_changed(self.source.key, what, unlink=midway, give_up=give_up)
            return
        self.source.be_restless(MAX_CHANGES if is_idle else 0)
        log.info(
            "loader %r: its data set changes (%s): its samples are loaded in every epoch, and what "
            "is stored is served where the frozen front would read the same", self.name, what,
        )  # fmt: skip
        self.cache.api.void(self.source.key, unlink=midway, is_outdated=True)

    def _worker_options(self) -> dict[str, Any]:
        names = "timeout", "worker_init_fn", "multiprocessing_context"
        return {name: getattr(self, name) for name in names}

    def _enter(self, epoch: int, last: resume.Progress) -> tuple[int, int]:
        """Return how far the random draws of a pass are ahead of its epoch, and `Clock.since`.

        The first pass of a run that begins frozen goes on with the draws of the runs before it.
        """
        api = None if self.cache is None else self.cache.api
        if api is None or not api.is_asked or self.source.key in api.left_out:
            return last.ahead or 0, epoch + (last.ahead or 0)
        known, ahead = None, last.ahead or 0
        with api.beside(self.source.key):
            known = api.next_pass_of(self.source) if last.ahead is None else None
        if known is None:
            return ahead, min(last.since, epoch + ahead)
        self.source.is_known_random = True
        return known.tick - epoch, known.since


_PARAMETERS = inspect.signature(EgeriaLoader).parameters
_ARGUMENTS = [name for name in _PARAMETERS if name != "shuffle"]
"""They are attributes, too."""
OWN_OPTIONS = {
    name: _PARAMETERS[name].default for name in _ARGUMENTS[_ARGUMENTS.index("cache") + 1 :]
}
"""Those that `DataLoader` does not have, except for the cache, and their defaults."""


def _check_sized(dataset: Any) -> None:
    with suppress(TypeError):
        if not isinstance(dataset, DataLoader) and len(dataset) >= 0:
            return
    raise TypeError(
        "EgeriaLoader with a cache takes what a DataLoader takes, and a dataset with a length, to "
        "know which samples will come: EgeriaLoader(dataset, batch_size=..., cache=cache); "
        f"{type(dataset).__name__} is no such dataset"
    )


def original_of(batch_sampler: Any, dataset: Any, collate_fn: Any) -> Any:
    """Return the `EgeriaLoader` that another is made from, told by its parts; None if none.

    A library that shards or skips batches makes a new `DataLoader` of a loader's data set, its
    options and a batch sampler that wraps the loader's own.
    """
    while batch_sampler is not None:
        for loader in reversed([*_LOADERS.values()]):
            own = loader.batch_sampler, loader.dataset, loader.collate_fn
            if all(map(operator.is_, own, (batch_sampler, dataset, collate_fn))):
                return loader
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)
    return None
