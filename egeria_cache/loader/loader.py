"""`EgeriaLoader`: a `torch.utils.data.DataLoader` that knows which samples come next.

The way of a batch: the batch sampler's index batches are drawn ahead and planned (`plan.py`); the
misses go to DataLoader's own workers, each sample under its own seed (`samples/loading.py`); the
hits are read ahead (`prefetch/prefetcher.py`); the batch comes out with the structure that
DataLoader would have given it, its tensors knowing their samples (`batch/tensor.py`).
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from egeria_cache.batch import (
    Batch,
    BatchTensor,
    Rows,
    Structure,
    flatten,
    forget_lost,
    is_dense,
    is_faithful,
    is_rows,
    merge_rows,
    outside_inference_mode,
    own_containers,
    row_meta,
    without_data,
)
from egeria_cache.loader.ahead import num_foreseeable
from egeria_cache.loader.plan import Plan, Planner
from egeria_cache.loader.resume import Progress, ResumableLoader, draw_base_seed
from egeria_cache.loader.samplers import LeanRandomSampler
from egeria_cache.prefetch import PlannedEntry, Prefetcher
from egeria_cache.samples import (
    BatchContext,
    CollateLoaded,
    Loaded,
    LoaderSource,
    SeededDataset,
    SeededWorkerInit,
    Task,
)

if TYPE_CHECKING:
    from egeria_cache.cache import ActivationCache, LoaderPort
    from egeria_cache.prefetch import View

__all__ = ["EgeriaLoader"]

T_co = TypeVar("T_co", covariant=True)
log = logging.getLogger("egeria")
MAX_CHANGES = 3
"""Passes in a row that find another data set; then nothing is stored for it any more."""


class EgeriaLoader(ResumableLoader[T_co]):
    """DataLoader that skips the loading of cached samples, and reads their activations ahead.

    Takes all of DataLoader's arguments; without `cache` and `seed` it *is* DataLoader.

    Args:
        cache: The `ActivationCache` of the model that is trained on these batches.
        seed: Seed of the samples' random augmentation. Each sample is loaded with `random`, NumPy's
            global state and torch's default generator seeded from (seed, sample ID, variant), and
            they are restored afterwards. Defaults to 0 with a cache.
        augmentation_variants: How many augmented versions of each sample are cached. While nothing
            is frozen every epoch is a version of its own; with a boundary, epochs cycle through so
            many.
        name: Distinguishes the loaders of one cache ("train", "val").
        sample_id: Maps an index drawn by the sampler to the sample's stable identity: an int, a
            string, or a tuple of them. Defaults to the data set's `sample_id` method if it has
            one, else to the index itself.
        sample_version: Maps an index to the version of the sample's content (a file's time of
            change, say): another version is another sample. Defaults to the data set's
            `sample_version` method if it has one.

    Raises:
        TypeError: A cache was given, and the dataset has no length.
        ValueError: `augmentation_variants` is below 1.
    """

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
        augmentation_variants: int = 1,
        name: str = "train",
        sample_id: Callable[[Any], Any] | None = None,
        sample_version: Callable[[Any], Any] | None = None,
    ) -> None:
        if augmentation_variants < 1:
            raise ValueError(f"augmentation_variants must be >= 1, got {augmentation_variants}")
        if cache is not None and not isinstance(dataset, IterableDataset):
            _check_sized(dataset)
        sized: Any = dataset
        if shuffle and sampler is None and batch_sampler is None and _has_length(dataset):
            sampler, shuffle = LeanRandomSampler(sized, generator=generator), None
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self.cache = cache
        self.name = name
        self.seed = 0 if seed is None and cache is not None else seed
        self.augmentation_variants = augmentation_variants
        self.source = LoaderSource(
            dataset, self.collate_fn, sample_id=sample_id, sample_version=sample_version,
            name=name, seed=self.seed, variants=augmentation_variants,
            workers=self._worker_options() if num_workers else None,
        )  # fmt: skip
        self._progress, self._resumes, self._rest = Progress(), False, None
        self._persistent: tuple[_TaskSource, DataLoader[Loaded]] | None = None
        self._is_plain = self._why_plain() is not None
        self._num_changes, self._ended_unchanged = 0, True
        self._rebuilds: bool | None = None

    def __iter__(self) -> Any:
        self.source.use_collate(self.collate_fn)
        self._ask_data_again(at_end=False)
        starts_workers = self._persistent is None and self._iterator is None
        base = self._begin(self._variant, starts_workers)
        return self._plain_iter() if self._is_plain else _Pass(self, self._progress, base)

    def _why_plain(self) -> str | None:
        """Why this loader is DataLoader and nothing else; None if it plans its batches."""
        if self.cache is None and self.seed is None:
            return "there is neither a cache nor a seed"
        reason = None
        if isinstance(self.dataset, IterableDataset):
            reason = "an IterableDataset has no sample IDs"
        elif self.batch_size is None and self.batch_sampler is None:
            reason = "batch_size=None turns batching off"
        if reason is not None:
            log.warning("loader %r passes its batches through uncached: %s", self.name, reason)
        return reason

    def _ask_data_again(self, *, at_end: bool) -> None:
        """Void what was stored if the data set is not what it was: at each end of a pass.

        What a pass stored under the old name is removed if the change came while it ran.
        """
        if self.cache is None or self._is_plain:
            return
        what = self.source.fingerprint.changed()
        if what is None and not at_end:
            if self._num_changes:
                self.cache.port.data_settled(self.source.key)
            self._num_changes = 0
        elif what is not None:
            self._num_changes += 1
            in_mid_pass = at_end or not self._ended_unchanged
            stuck = self._persistent is not None and not at_end
            self.cache.port.data_changed(
                self.source.key, what, unlink=in_mid_pass,
                give_up=stuck or self._num_changes > MAX_CHANGES,
            )  # fmt: skip
        self._ended_unchanged = at_end

    def _worker_options(self) -> dict[str, Any]:
        return {
            "timeout": self.timeout,
            "worker_init_fn": self.worker_init_fn,
            "multiprocessing_context": self.multiprocessing_context,
        }

    def _variant(self, epoch: int, first_frozen: int) -> tuple[int, int]:
        """Return an epoch's augmented version, constant within it, and where the cycle began.

        Epochs that begin unfrozen have a version of their own. The first frozen epoch keeps that of
        the epoch in which the boundary was set, so what was stored since then is found again.
        """
        if self.cache is None or self.cache.boundary is None:
            return epoch, epoch
        since = min(first_frozen, epoch)
        return since + (epoch - since) % self.augmentation_variants, since

    def _inner_loader(
        self, tasks: _TaskSource, generator: torch.Generator | None
    ) -> DataLoader[Loaded]:
        """Return a DataLoader whose workers load tasks."""
        with warnings.catch_warnings():
            # Its advice on the arguments was given when this loader was made.
            warnings.simplefilter("ignore")
            return DataLoader(
                SeededDataset(self.source.samples),  # type: ignore[arg-type]
                batch_sampler=tasks,
                num_workers=self.num_workers,
                collate_fn=CollateLoaded(self.collate_fn),  # type: ignore[arg-type]
                pin_memory=self.pin_memory,
                timeout=self.timeout,
                worker_init_fn=SeededWorkerInit(self.worker_init_fn),
                multiprocessing_context=self.multiprocessing_context,
                generator=generator,
                prefetch_factor=self.prefetch_factor,
                persistent_workers=self.persistent_workers,
                pin_memory_device=self.pin_memory_device,
                in_order=self.in_order,
            )


class _TaskSource:
    """Batch sampler of the inner DataLoader: the tasks of the pass that began last."""

    def __init__(self) -> None:
        self.serves: tuple[Planner, Prefetcher, Progress] | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.serves is not None
        return iter(self.serves[0])


class _Pass:
    """One pass over an `EgeriaLoader`: what `iter(loader)` returns.

    Nothing that it makes may refer back to it or to the loader. A cycle would leave its end to the
    garbage collector, which clears the queues' weak references first: DataLoader's workers are then
    not told to stop, and each costs its time-out of five seconds.
    """

    def __init__(
        self, loader: EgeriaLoader[Any], progress: Progress, base: torch.Generator
    ) -> None:
        self._loader = loader
        self._progress = progress
        self._cache = cache = None if loader.cache is None else loader.cache.port
        executor = None if cache is None else cache.readers
        self._prefetcher = Prefetcher(
            executor,
            ring_batches=0 if cache is None else cache.ring_batches,
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
        )
        self._planner = Planner(
            iter(loader._index_sampler),
            loader.source.identify,
            partial(_outlook, cache, loader.source.key),
            self._prefetcher,
            wants_control=partial(_wants_control, cache),
            variant=progress.variant,
            seed=loader.seed,
            first_number=progress.yielded,
            num_foreseeable=num_foreseeable(loader.batch_sampler),
        )
        if progress.drew_base_seed and loader._rest is None:
            draw_base_seed(loader.generator)
        loader._rest = None
        # The workers may start later, when the training loop has drawn numbers of its own.
        self._inner_generator = base
        self._step: tuple[Plan, float] | None = None
        self._loads_here = loader.num_workers == 0 and not loader.pin_memory
        self._inner = self._start_workers()

    def __iter__(self) -> _Pass:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._loader.source.end_pass()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("_inner") is None:
            raise AttributeError(name)
        return getattr(self._inner, name)  # what people look up on DataLoader's own iterators

    def __next__(self) -> Any:
        """Plan, load the misses, yield: A to E of `docs/architecture.md`."""
        try:
            if torch.is_inference_mode_enabled():
                with outside_inference_mode():
                    batch = self._next()
            else:
                batch = self._next()
        except StopIteration:
            self._progress.finished = True
            self._prefetcher.close()
            self._loader._ask_data_again(at_end=True)
            self._end()
            if self._cache is not None:
                self._cache.log_epoch(self._loader.name, self._progress.epoch)
            raise
        self._progress.count()
        return batch

    def _next(self) -> Any:
        asked = self._note_step()
        if self._loads_here and self._planner.is_idle and self._is_unfrozen():
            return self._load_at_once()
        if self._loader._persistent is not None and self._loader._persistent[0].serves is not None:
            # Persistent workers serve the pass that began last; older ones go on with it, as they
            # do under DataLoader.
            self._planner, self._prefetcher, self._progress = self._loader._persistent[0].serves
        self._planner.top_up()
        try:
            loaded = next(self._inner)
        except Exception as error:
            if not isinstance(error, StopIteration) and self._loader.in_order:
                self._planner.skip()
            raise
        self._loader.source.samples.drawn |= loaded.drawn  # what workers saw
        plan = self._planner.take(loaded.number)
        batch = self._assemble(plan, loaded.data)
        self._step = plan, asked
        return batch

    def _is_unfrozen(self) -> bool:
        if torch.autograd._profiler_enabled():
            return False  # a profile is to show DataLoader's own events
        return self._cache is None or self._cache.boundary is None

    def _load_at_once(self) -> Any:
        """Load the next batch in this process, as DataLoader would, and no more.

        There is nothing to plan while nothing is frozen: the way through the inner DataLoader would
        cost 10 us a batch, a tenth of a cheap one.
        """
        task = self._planner.take_task()
        if task is None:
            raise StopIteration
        source = self._loader.source
        return source.collate(source.samples.load(task))

    def _note_step(self) -> float:
        """Tell the cache what the step cost that ends with this call."""
        now = time.perf_counter()
        if self._step is not None and self._cache is not None:
            plan, start = self._step
            self._cache.note_step(
                self._loader.source.key, now - start, len(plan.ids), plan.entry,
                is_control=plan.is_control,
            )  # fmt: skip
        self._step = None
        return now

    def _assemble(self, plan: Plan, missing: Any) -> Any:
        """Return the batch: `missing` holds the collated misses (None if there are none)."""
        entry = plan.entry
        if self._cache is None or (entry is None and self._cache.boundary is None):
            return missing
        if entry is None:
            return self._tag(plan, missing)
        view, num_misses = entry.view, int((~entry.hit).sum())
        _, misses = flatten(missing, num_misses) if num_misses else (None, {})
        if not entry.ready() or (num_misses and not view.admits(misses)):
            self._cache.count_refetched(int(entry.hit.sum()))
            return self._tag(plan, self._load_here(plan))
        constants = view.constants_for(len(plan.ids))
        leaves: dict[str, Rows] = misses | constants
        for path in view.kept:
            hits = entry.kept[path]
            leaves[path] = merge_rows(entry.hit, hits, misses[path]) if num_misses else hits
        batch = self._batch(plan, leaves, view.structure, view.rows)
        tagged = {
            path: _wrap(leaves[path], batch, path) if path in view.cut.tagged else leaves[path]
            for path in view.kept
        } | constants
        for path in view.dropped:
            whole = view.rows[path].expand(batch.size, *view.rows[path].shape[1:]).contiguous()
            tagged[path] = without_data(whole, batch, path, misses.get(path))
        entry.on_load = partial(self._cache.count_batch, len(plan.ids), entry.hit)
        self._cache.count_yielded()
        return view.structure.rebuild(tagged)

    def _tag(self, plan: Plan, data: Any) -> Any:
        """Return a fully loaded batch whose tensors know their samples."""
        assert self._cache is not None
        if self._cache.boundary is None:
            return data
        plan.entry = None
        structure, leaves = flatten(data, len(plan.ids))
        if not self._is_understood(structure, data, leaves, len(plan.ids)):
            return data
        batch = self._batch(plan, leaves, structure, {})
        only = self._cache.tagged_leaves(self._loader.source.key)
        tagged = {
            path: _wrap(rows, batch, path) if only is None or path in only else rows
            for path, rows in leaves.items()
        }
        self._cache.count_batch(len(plan.ids), None)
        self._cache.count_yielded()
        self._loader.source.yields(tagged.values())
        return own_containers(data, structure.rebuild(tagged))

    def _is_understood(
        self, structure: Structure, data: Any, leaves: Mapping[str, Any], size: int
    ) -> bool:
        """Whether batches like this can be taken apart and built again, found with the first."""
        loader = self._loader
        if loader._rebuilds is None:
            try:
                loader._rebuilds = is_faithful(structure, data, leaves, size)
            except Exception:
                loader._rebuilds = False
            if not loader._rebuilds:
                assert self._cache is not None
                self._cache.leave_uncached(
                    loader.source.key,
                    f"its batches, of class {type(data).__qualname__}, cannot be built from parts",
                )
        return loader._rebuilds

    def _batch(
        self,
        plan: Plan,
        leaves: Mapping[str, Rows],
        structure: Structure,
        rows: Mapping[str, Tensor],
    ) -> Batch:
        forget_lost()
        source, task = self._loader.source, plan.whole(self._loader.seed)
        size, view = len(plan.ids), None if plan.entry is None else plan.entry.view
        constants = {
            path: leaf.clone() if isinstance(leaf, Tensor) and is_dense(leaf) else leaf
            for path, leaf in leaves.items()
            if (path in view.constants if view is not None else not is_rows(leaf, size))
        }
        own = {
            path: row_meta(leaf)
            for path, leaf in leaves.items()
            if isinstance(leaf, Tensor) and path not in constants
        }
        kinds = dict.fromkeys(rows, Tensor) | {
            path: type(leaf) for path, leaf in leaves.items() if path not in constants
        }
        context = BatchContext(source, structure, task, {**rows, **own}, kinds, constants)
        return Batch(
            ids=plan.ids,
            variant=plan.variant,
            loader_name=source.key,
            leaves=leaves,
            load_rows=partial(_load_rows, self._cache, source, task),
            entry=plan.entry,
            context=context,
            may_be_stored=self._cache is not None and self._cache.may_store(source.key),
        )

    def _load_here(self, plan: Plan) -> Any:
        """Load and collate a whole batch in this process."""
        every = np.ones(len(plan.ids), bool)
        return self._loader.source.load(plan.whole(self._loader.seed).take(every))

    def _start_workers(self) -> Iterator[Loaded]:
        loader = self._loader
        if not loader.persistent_workers:
            tasks = _TaskSource()
            tasks.serves = self._planner, self._prefetcher, self._progress
            return iter(loader._inner_loader(tasks, self._inner_generator))
        if loader._persistent is None:
            tasks = _TaskSource()
            loader._persistent = tasks, loader._inner_loader(tasks, self._inner_generator)
        tasks, inner = loader._persistent
        tasks.serves = self._planner, self._prefetcher, self._progress
        return iter(inner)


def _outlook(cache: LoaderPort | None, name: str) -> tuple[Sequence[View], bool]:
    """Return what can be read at the moment, and whether samples that draw nothing are seeded."""
    if cache is None:
        return (), True
    return ((), False) if cache.boundary is None else (cache.readable(name), True)


def _wants_control(cache: LoaderPort | None, entry: PlannedEntry) -> bool:
    return cache is not None and cache.wants_control(entry)


def _load_rows(
    cache: LoaderPort | None, source: LoaderSource, task: Task, rows: np.ndarray
) -> Mapping[str, Rows]:
    """Load some rows of a batch that was yielded without them."""
    if cache is not None:
        cache.count_refetched(int(rows.sum()))
    return flatten(source.load(task.take(rows)), int(rows.sum()))[1]


def _wrap(rows: Any, batch: Batch, path: str) -> Any:
    if isinstance(rows, Tensor) and is_rows(rows, batch.size):
        return BatchTensor.wrap(rows, batch, path)
    return rows


def _check_sized(dataset: Any) -> None:
    try:
        len(dataset)
    except TypeError:
        raise TypeError(
            f"EgeriaLoader with a cache needs a dataset with a length, to know which samples will "
            f"come; {type(dataset).__name__} has no __len__. Give it one, or leave cache=None"
        ) from None


def _has_length(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
