"""Loading raw samples, each under its own seed: what runs inside DataLoader's workers.

The inner DataLoader gets one `Task` per batch: the samples to load, which may be none. The dataset
and the collate function are wrapped so that the user's own see exactly what they would see under a
plain DataLoader; only the global random generators that are drawn from are seeded for each sample.
"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from egeria_cache.attempt import Attempt, in_turns
from egeria_cache.batch import Leaves, flatten
from egeria_cache.pystate import GENERATORS, Portrait, Snapshot
from egeria_cache.samples.collation import differing_leaf, find_places, own_lengths
from egeria_cache.samples.company import Company, Told
from egeria_cache.samples.draws import sample_seed
from egeria_cache.samples.fingerprint import Look, describe, look
from egeria_cache.samples.side_effects import deciding, kept_of, preserved, unmoved
from egeria_cache.samples.task import Loaded, Task

Alone = dict[int, Leaves]
"""Samples of a batch by row, each collated alone."""


class SampleLoader:
    """Loads a dataset's samples, each under its own stateless seed.

    Seeding takes longer than a cheap sample. So only the generators are seeded that a sample was
    seen to draw from; the others are watched, batch by batch, or seldom while nothing is stored
    (`undrawn`). When one has moved, what was loaded is dropped and loaded again, seeded: what is
    stored does not depend on when drawing is noticed.

    The global generators are restored afterwards only in the main process: a worker's are its own.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        """Load from `dataset`, in this process."""
        self.dataset = dataset
        self.collate = collate
        self.drawn: frozenset[str] = frozenset()
        """Which of `GENERATORS` samples were seen to draw from; "transforms" where some have
        generators of their own, which they let be seeded."""
        self._num_undrawn = 0
        self.company = Company()

    @property
    def _roots(self) -> dict[str, Any]:
        return {"data set": self.dataset, "collate_fn": self.collate}

    @contextmanager
    def out_of_turn(self, kept: Snapshot | None = None) -> Iterator[Snapshot]:
        """Load what training does not ask for now: what loading moves is put back, as `kept`, and
        the random generators, for the collate function may draw.
        """
        with preserved() if kept is None else nullcontext(), unmoved(self._roots, kept) as now:
            yield now

    def answer(self, task: Task) -> Any:
        """Return the task's samples in order, described if the task says so; None for no task."""
        if task.looks:
            return self._moving(task) if task.before else self._described(task)
        with in_turns():
            return None if task.indices is None else self.load(task)

    def _described(self, task: Task) -> Look:
        with preserved():  # the collate function may draw
            return describe(self.load(task), self.collate)

    def _moving(self, task: Task) -> Look:
        """Describe samples, what loading them moves, and whether that decides what they are."""
        roots = self._roots
        kept, before = kept_of(roots), task.before
        if not isinstance(before, Portrait) or before.has_moved():
            before = Portrait(roots, thorough=False)
        seen = look(before, lambda: self.load(task), self.collate)
        if kept.has_moved():
            some = task.at(range(0, len(task.ids), 4))
            kept.put_back(copies=True)
            seen = seen._replace(decides=deciding(roots, lambda: self._described(some)))
        return seen

    def undrawn(self, indices: Sequence[Any]) -> Any:
        """Return samples as `get` does; None if some draw: asked after 1, 2, 4, ..."""
        self._num_undrawn = num = self._num_undrawn + 1
        if self.drawn:
            return None
        if num & (num - 1):
            return self.get(indices)
        before = {name: one.look() for name, one in GENERATORS.items()}
        try:
            has_own = next(_seedable(self.dataset), None) is not None
            samples = None if has_own else self.get(indices)
        except Exception:
            if not self._have_drawn(before):
                raise
            return None
        return None if self._have_drawn(before) else samples

    def _have_drawn(self, before: Mapping[str, Any]) -> bool:
        """Whether a generator was drawn from since; it is put back, and seeded from now on."""
        moved = [name for name, look in before.items() if GENERATORS[name].look() != look]
        for name in moved:
            GENERATORS[name].put_back(before[name])
        self.drawn |= {*moved}
        return bool(moved)

    def load(self, task: Task) -> Any:
        """Return the task's samples in order: a list, or what `__getitems__` gives instead."""
        if task.seed is None or not task.indices:
            return self.get(task.indices)
        transforms = list(_seedable(self.dataset))
        if transforms:
            self.drawn |= {"transforms"}
        if getattr(self.dataset, "__getitems__", None):
            # What it gives may depend on the whole batch: it is asked for that, unless it draws.
            task = task._replace(seeds_all=False)
        while True:  # again as long as samples draw from a generator that was not seeded
            seeds = self.drawn | {"torch"} if task.seeds_all else self.drawn
            before = {name: one.look() for name, one in GENERATORS.items() if name not in seeds}
            try:
                samples = self._load_seeded(task, before, transforms)
            except Exception:
                if not self._have_drawn(before):
                    raise
            else:
                if not self._have_drawn(before):
                    return samples

    def get(self, indices: Sequence[Any]) -> Any:
        """Return samples as the data set gives them."""
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(list(indices))
        return [self.dataset[index] for index in indices]

    def _load_seeded(self, task: Task, watched: Mapping[str, Any], transforms: list[Any]) -> Any:
        seeded = {name: g for name, g in GENERATORS.items() if name not in watched}
        generators, unseen = seeded.values(), seeded.keys() - self.drawn
        if not generators and not transforms:
            return self.get(task.indices)
        saved = [g.whole() for g in generators] if get_worker_info() is None else []
        samples: list[Any] = []
        try:
            for index, sample_id, draw in zip(task.indices, task.ids, task.draws, strict=True):
                assert task.seed is not None
                seed = sample_seed(task.seed, sample_id, draw)
                for generator in generators:
                    generator.seed(seed)
                for transform in transforms:
                    transform.set_random_seed(seed & 0xFFFFFFFF)
                before = {name: seeded[name].look() for name in unseen}
                found = self.get([index])
                for name, look in before.items():
                    if seeded[name].look() != look:
                        self.drawn, unseen = self.drawn | {name}, unseen - {name}
                if not isinstance(found, list):  # a batch of its own kind, not to be put together
                    return self.get(task.indices)
                samples += found
        finally:
            for generator, state in zip(generators, saved, strict=False):
                generator.put_back(state)
            for transform in transforms:  # whatever was drawn: it is the same data set as before
                transform.set_random_seed(task.seed & 0xFFFFFFFF)  # type: ignore[operator]
        return samples

    def __getitems__(self, task: Task) -> tuple[Task, Any, float]:
        """Return what the inner DataLoader hands to `collated`, and the processor time it took."""
        began = time.thread_time()
        return task, self.answer(task), time.thread_time() - began

    def load_task(self, task: Task) -> Loaded:
        """Load and collate in this process, past the inner DataLoader."""
        return self.collated(self.__getitems__(task))

    def collated(self, given: tuple[Task, Any, float]) -> Loaded:
        """Return a task's samples, collated if there are any, and what is asked of them besides."""
        task, samples, load_s = given
        if samples is None or task.looks:
            return Loaded(task.number, samples, self.drawn)
        if not isinstance(samples, list) or not (task.axes or task.places or task.compares):
            began, data = time.thread_time(), self.collate(samples)
            load_s += time.thread_time() - began
            return Loaded(task.number, data, self.drawn, load_s=load_s)
        company = self.company if task.compares else Company()
        company.loaded_s += load_s
        began, told = time.thread_time(), None
        # Before the batch is collated, perhaps to the same memory; of copies, for collate functions
        # pad the very lists that they are given.
        with Attempt():
            told = company.ask_samples(task.axes, samples)
        is_known = not task.places and told is not None
        rows = company.choose(len(samples), task.axes) if is_known else list(range(len(samples)))
        alone: Alone = dict(zip(rows, self._again(samples, [[row] for row in rows]), strict=False))
        # In reverse, so that others are the first.
        turned = self._again(samples, [[*alone][::-1]] if alone and not task.places else [])
        compared = time.thread_time()
        data = self.collate(list(samples))
        collate_s = time.thread_time() - compared
        found = Loaded(
            task.number, data, self.drawn, task.axes, load_s=load_s + collate_s, company=company
        )  # fmt: skip
        if alone or task.axes:
            with Attempt():  # one that cannot be collated alone is not measured
                found = self._compared(task, found, alone, turned, told)
        company.loaded_s += collate_s
        if rows:
            company.compared(len(rows), time.thread_time() - collate_s - began)
        return found

    def _again(self, samples: list[Any], groups: Sequence[Sequence[int]]) -> list[Leaves]:
        """Return the leaves of groups of samples, each collated alone; none if one cannot be."""
        found: list[Leaves] = []
        if not groups:
            return found
        with Attempt() as tried, preserved(), unmoved({"collate_fn": self.collate}):
            for rows in groups:
                some = [copy.deepcopy(samples[row]) for row in rows]
                leaves = flatten(self.collate(some), len(some))[1].items()
                found.append({p: v.clone() if isinstance(v, Tensor) else v for p, v in leaves})
        return found if tried.error is None else []

    def _compared(
        self, task: Task, loaded: Loaded, alone: Alone, turned: list[Leaves], told: Told | None
    ) -> Loaded:
        """Say where samples stand, how long they are, and what differs from what they are alone."""
        company, axes, size = loaded.company, task.axes, len(task.ids)
        assert company is not None
        together = flatten(loaded.data, size)[1]
        places = differs = lengths = None
        if task.places:
            places = find_places(together, [alone[row] for row in range(size)])
            alone = {row: alone[i] for row, i in enumerate(places.order)}
        else:
            differs = differing_leaf(axes, together, alone, size)
            backwards = dict(enumerate(reversed(alone.values())))
            for again in turned if differs is None else ():
                differs = differing_leaf(axes, again, backwards, len(alone))
        own = {row: own_lengths(axes, one) for row, one in alone.items()}
        if axes and places is None and told is not None:
            told = told | company.ask_masks(axes, together)
            differs = company.learn(axes, told, own) or differs
        if len(own) == size:
            lengths = np.array([own[row] for row in range(size)], np.int64)
        elif axes:
            lengths = company.lengths(axes, told or {})
        return loaded._replace(lengths=lengths, differs=differs, places=places)


def _seedable(dataset: Any) -> Iterator[Any]:
    """Find transforms that ignore the global generators and are seeded by `set_random_seed`.

    That is albumentations' way (2.x). They are looked for among the attributes of the data set, and
    of the data sets that it wraps.
    """
    while dataset is not None:
        attributes = getattr(dataset, "__dict__", {})
        for value in attributes.values():
            if hasattr(type(value), "set_random_seed"):  # of the type: a tensor would search long
                yield value
        dataset = attributes.get("dataset")


def _init_worker(worker_init: Callable[[int], None] | None, worker_id: int) -> None:
    """Show the user's `worker_init_fn` the user's own data set in `get_worker_info()`."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SampleLoader):
        # WorkerInfo refuses plain assignment.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if worker_init is not None:
        worker_init(worker_id)


def task_loader(samples: SampleLoader, tasks: Any, **options: Any) -> DataLoader[Loaded]:
    """Return a DataLoader whose workers load tasks.

    Args:
        samples: The data set and the collate function.
        tasks: An iterable of tasks.
        options: DataLoader's others.
    """
    init = partial(_init_worker, options.pop("worker_init_fn", None))
    with warnings.catch_warnings():
        # Its advice on the arguments was given when the user's own loader was made.
        warnings.simplefilter("ignore")
        return DataLoader(
            samples, batch_sampler=tasks,  # type: ignore[arg-type]
            collate_fn=samples.collated,  # type: ignore[arg-type]
            worker_init_fn=init, **options,
        )  # fmt: skip


class SideWorker:
    """Answers tasks one by one in one DataLoader worker, started with the first: samples that are
    asked for out of turn, for checks, audits and repairs.

    Where a loader has workers, no sample is ever loaded in the training process: a file or a
    database that the data set opens lazily would then be shared by the workers that are forked
    later, offset and all, and some data sets work in a worker alone.
    """

    def __init__(self, samples: SampleLoader, options: Mapping[str, Any]) -> None:
        """Load by `samples`.

        Args:
            samples: The data set and the collate function.
            options: DataLoader's `timeout`, `worker_init_fn` and `multiprocessing_context`.
        """
        self._samples = samples
        self._options = dict(options)
        self._tasks: list[Task] = []
        self._loader: DataLoader[Loaded] | None = None
        self._lock = threading.Lock()

    def ask(self, task: Task) -> Loaded:
        """Return what a worker gives for the task.

        Raises:
            Exception: What the data set or the collate function raised.
        """
        with self._lock:
            # Its own generator: DataLoader draws a base seed whenever it begins to iterate.
            loader = self._loader = self._loader or task_loader(
                self._samples, self._tasks, num_workers=1, prefetch_factor=1,
                persistent_workers=True, generator=torch.Generator(), **self._options,
            )  # fmt: skip
            self._tasks[:] = [task]
            loaded: Loaded = next(iter(loader))
            return loaded

    def close(self) -> None:
        """Stop the worker; the next task starts another.

        Takes no lock: the garbage collector may end a pass in the middle of `ask`.
        """
        self._loader = None
