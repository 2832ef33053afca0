"""`EgeriaLoader`: a `torch.utils.data.DataLoader` that knows which samples come next.

The way of a batch through a pass (`one_pass.py`): the batch sampler's index batches are drawn ahead
and planned (`plan.py`); the misses go to DataLoader's own workers, each sample under its own seed
(`samples/loading.py`); the hits are read ahead (`prefetch/prefetcher.py`); the batch is put
together as DataLoader would have given it (`assembly.py`), its tensors knowing their samples
(`batch/tensor.py`).
"""

from __future__ import annotations

import inspect
import io
import logging
import time
from collections.abc import Callable, Sized
from contextlib import suppress
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from egeria_cache.arguments import check_whole_number, names_known
from egeria_cache.attempt import in_turns
from egeria_cache.cache import ActivationCache
from egeria_cache.loader.assembly import Assembly
from egeria_cache.loader.one_pass import Pass, TaskSource
from egeria_cache.loader.resume import Progress, ResumableLoader
from egeria_cache.samples import DEFAULT_REUSE, RESTLESS, Draws, Loaded, LoaderSource

T_co = TypeVar("T_co", covariant=True)
log = logging.getLogger("egeria")
_OF_BATCHES = frozenset({"batch_size", "sampler", "batch_sampler", "drop_last"})
"""Arguments that a batch sampler replaces."""
_LOADERS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Those that are served, or seed their samples, by key: the latest last."""
MAX_CHANGES = 3
"""Passes in a row that find another data set; then samples are loaded in each, and compared."""


class EgeriaLoader(ResumableLoader[T_co]):
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
        _check_cache(cache)
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
        self._progress, self._resumes = Progress(), False
        self._persistent: tuple[TaskSource, DataLoader[Loaded]] | None = None
        self._passes = WeakSet[Pass]()
        self._is_uncached = self._why_uncached() is not None
        self._num_changes, self._changed_midway, self._ended_unchanged = 0, False, True
        self._assembly = Assembly(self.source)
        self._is_prepared = False
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

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate asks this of every loader before it rebuilds it: it is told how."""
        asked = type(self)._asked_by_accelerate
        if not self._is_prepared and not self._is_uncached and asked is not None:
            asked()
        return self._is_prepared

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._is_prepared = value

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
        goes_on = self._begin(self._enter)
        if self._is_uncached:
            return self._iterate(goes_on=goes_on)
        return Pass(self, self._progress, *self._index_batches(goes_on=goes_on))

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: see `ResumableLoader`."""
        return super().state_dict() | {
            "is_random": self._progress.is_random or self.source.is_random,
            "is_steady": self.source.is_steady,
        }

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
        if not at_end:
            if what is None and not self._changed_midway and self._num_changes:
                counts = self.cache.api.counters.counts
                counts.why_not = self.cache.api.left_out.get(self.source.key)
                self._num_changes = 0
            self._changed_midway = False
        if what is not None:
            midway = at_end or not self._ended_unchanged
            stuck = self._persistent is not None and not at_end
            unseen = "its persistent workers do not see that its data set has changed"
            self._note_change(what, midway=midway, give_up=unseen if stuck else "")
        self._ended_unchanged = at_end

    def _note_change(self, what: str, *, midway: bool = True, give_up: str = "") -> None:
        """Void what was stored; in mid-pass, what changes is loaded differently at once."""
        assert self.cache is not None
        self.source.forget()  # it may pad otherwise
        if not self.source.fingerprint.is_new:  # it goes back and forth
            self._num_changes = 0
        self._num_changes += not (midway and self._changed_midway)  # passes are counted
        self._changed_midway |= midway
        if self._num_changes > MAX_CHANGES:
            self.source.is_restless = True
            log.info(
                "loader %r: %s (%s): its samples are loaded in every epoch, and what is stored is "
                "served where the frozen front would read the same", self.name, RESTLESS, what,
            )  # fmt: skip
        self.cache.api.data_changed(self.source.key, what, unlink=midway, give_up=give_up)

    @property
    def _keeps_workers(self) -> bool:
        return self._persistent is not None or super()._keeps_workers

    def _worker_options(self) -> dict[str, Any]:
        return {
            "timeout": self.timeout,
            "worker_init_fn": self.worker_init_fn,
            "multiprocessing_context": self.multiprocessing_context,
        }

    def _enter(self, epoch: int, last: Progress) -> tuple[int, int]:
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


def _check_cache(cache: Any) -> None:
    if cache is not None and not isinstance(cache, ActivationCache):
        raise TypeError(
            'cache is an ActivationCache: cache = ActivationCache(model, "runs/cache"), then '
            f"EgeriaLoader(dataset, cache=cache); got {type(cache).__name__}"
        )


def _check_sized(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "EgeriaLoader stands in the place of a DataLoader and takes what that takes: "
            "EgeriaLoader(dataset, batch_size=..., cache=cache), not a DataLoader"
        )
    try:
        len(dataset)
    except TypeError:
        raise TypeError(
            f"EgeriaLoader with a cache needs a dataset with a length, to know which samples will "
            f"come; {type(dataset).__name__} has no __len__. Give it one, or leave cache=None"
        ) from None


def original_of(batch_sampler: Any, dataset: Any, collate_fn: Any) -> Any:
    """Return the `EgeriaLoader` that another is made from, told by its parts; None if none.

    A library that shards or skips batches makes a new `DataLoader` of a loader's data set, its
    options and a batch sampler that wraps the loader's own.
    """
    while batch_sampler is not None:
        for loader in reversed([*_LOADERS.values()]):
            if loader.batch_sampler is not batch_sampler or loader.dataset is not dataset:
                continue
            if loader.collate_fn is collate_fn:
                return loader
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)
    return None
