"""One pass over a loader: ask the planner, let the workers load, hand out."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.autograd import _profiler_enabled as _profiles

from egeria_cache.attempt import Attempt, is_beside, outside_inference_mode
from egeria_cache.batch import Missing, forget_lost
from egeria_cache.loader.plan import Plan, Planner, num_foreseeable
from egeria_cache.loader.resume import Progress
from egeria_cache.prefetch import PlannedEntry, Prefetcher
from egeria_cache.samples import Loaded, LoaderSource, task_loader

_TOGETHER = 4
"""Batches whose missing rows are computed together: up to a number that it divides, so that ranks,
which wait for each other, do so in the same steps."""


class Pass:
    """One pass over an `EgeriaLoader`: what `iter(loader)` returns.

    Nothing that it makes may refer back to it or to the loader. A cycle would leave its end to the
    garbage collector, which clears the queues' weak references first: DataLoader's workers are then
    not told to stop, and each costs its time-out of five seconds.
    """

    def __init__(
        self,
        loader: Any,  # an `EgeriaLoader`, which makes us
        progress: Progress,
        batches: Iterator[Any],
        base: torch.Generator,
    ) -> None:
        self._loader = loader
        loader._passes.add(self)
        # Not the loader's: one that is given back has none.
        self._source: LoaderSource = loader.source
        self._cache = cache = None if loader.cache is None else loader.cache.api
        self._beside: AbstractContextManager[Any] = nullcontext()
        outlook = (lambda: ((), True)) if cache is None else partial(cache.outlook, self._source)
        if cache is not None:
            self._beside = cache.beside(self._source.key)  # made once: a batch has two or three
            with self._beside:
                num_batches = None
                with suppress(TypeError, NotImplementedError):  # nobody knows
                    num_batches = len(loader)
                cache.begins(self._source.key, progress.epoch, num_batches)
        readers, ahead = (None, 0) if cache is None else (cache.readers, cache.ring_batches)
        prefetcher = Prefetcher(readers, ring_batches=ahead, pin_memory=loader.pin_memory)
        self._planner = planner = Planner(
            batches, loader.source, progress.clock, cache, outlook, prefetcher, self._beside,
            progress, progress.yielded, num_foreseeable(loader.batch_sampler),
        )  # fmt: skip
        if loader._persistent is not None:
            # Persistent workers serve the pass that began last; older ones go on with it, as they
            # do under DataLoader.
            self._planner = loader._persistent[0]
            vars(self._planner).update(vars(planner))
        # The workers may start later, when the training loop has drawn numbers of its own.
        self._inner_generator = base
        self._steps: deque[Plan] = deque(maxlen=2)
        """Batches that were given out, and their steps not noted: a trainer may ask for the next
        one before it computes (Accelerate does)."""
        self._together: list[tuple[Plan, float]] = []
        """Steps whose misses are computed together, and their seconds; infinite where somebody has
        validated."""
        self._since, self._num_calls, self._fewest = 0.0, 0, sys.maxsize
        self._times_loading = cache is not None and cache.policy.wants_timing(loader.source.key)
        self._assembly = loader._assembly
        if cache is not None:
            self._assembly.cache, self._assembly.beside = cache, self._beside
        # Workers have data of their own, as they have under DataLoader.
        self._asks_midway = cache is not None and loader.num_workers == 0
        self._loads_here = loader.num_workers == 0 and not loader.pin_memory
        self._inner: Iterator[Loaded] | None = None if self._loads_here else self._start_workers()

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._cache is not None:
            self._cache.store.writer.gather(False)
        self._source.end_pass()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._workers, name)  # what people look up on DataLoader's own iterators

    @property
    def _workers(self) -> Iterator[Loaded]:
        """The inner DataLoader's iterator; without workers it is made where it is needed."""
        if self._inner is None:
            self._inner = self._start_workers()
        return self._inner

    def __next__(self) -> Any:
        """Plan, load the misses, yield: A to E of `docs/architecture.md`."""
        try:
            if self._loads_here and not self._planner.planned:
                is_plain = self._cache is None or self._cache.is_plain(self._source.key)
                # A profile is to show DataLoader's own events.
                if is_plain and not _profiles():
                    return self._load_at_once()
            with outside_inference_mode():
                return self._next()
        except StopIteration:
            progress = self._planner.progress
            progress.finished = True
            forget_lost()  # what comes now, say a validation by another loader, is not of this pass
            self._planner.prefetcher.close()
            if (cache := self._cache) is not None:
                with self._beside:
                    self._source.end_pass()  # its worker has the data as they were
                    if not cache.is_beside(self._source):
                        self._loader._ask_data_again(at_end=True)
                    if cache.is_asked:
                        cache.note_pass(self._source, progress.clock)
                        cache.log_epoch(self._loader.name, progress.epoch)
                    else:  # one that is set from now on begins with the next draws
                        progress.since = progress.clock.tick + 1
            self._end()
            raise

    def _next(self) -> Any:
        asked = self._note_step()
        planner, progress, source = self._planner, self._planner.progress, self._source
        planner.top_up()
        state = progress.drawn.popleft() if progress.drawn else progress.sampler
        loads = time.perf_counter()
        try:
            loaded = planner.loaded.popleft() if planner.loaded else self._load()
            if isinstance(loaded, Exception):
                raise loaded
        except Exception as error:
            if planner.planned and is_beside(error) and not isinstance(error, StopIteration):
                planner.planned.popleft()
            raise
        loads -= time.perf_counter()
        source.samples.drawn |= loaded.drawn  # what workers saw
        source.samples.company = loaded.company or source.samples.company
        plan = planner.take(loaded.number)
        is_first = plan.missing is None and not planner.loaded
        if is_first and plan.entry is not None and plan.entry.num_misses:
            loaded = self._load_behind(plan, plan.entry, loaded)
        if (cache := self._cache) is None:
            progress.sampler, progress.yielded = state, progress.yielded + 1
            return loaded.data
        # Whether the next look-ups are far.
        if cache.store.writer.gathers != planner.is_midway:
            cache.store.writer.gather(planner.is_midway)
        is_due = self._asks_midway and source.fingerprint.is_due(asked)
        if is_due and not cache.is_beside(source):
            with self._beside:
                if (what := source.fingerprint.changed(midway=True)) is not None:
                    self._loader._note_change(what)
        batch = self._assembly.assemble(plan, loaded)
        progress.sampler, progress.yielded = state, progress.yielded + 1
        if not self._steps:
            starts = not self._since and not self._loads_here  # workers, as without a cache
            self._since = asked - (loads if starts else 0.0)
            self._num_calls = cache.counters.num_calls
        self._steps.append(plan)
        if plan.entry is None:
            cache.policy.unnoted_s += time.perf_counter() - asked + loads
        if self._times_loading:
            # What a batch cost without it, as far as it wants to know.
            cache.policy.schedules[source.key].loads.append(loaded.load_s)
            self._times_loading = cache.policy.wants_timing(source.key)
        return batch

    def _load(self) -> Loaded:
        """Load what the next plan leaves to be loaded."""
        undispatched = self._planner.undispatched
        if not self._loads_here or not undispatched or _profiles():
            return next(self._workers)
        if (task := undispatched.popleft()).indices is None:
            return Loaded(task.number, None, frozenset())
        try:  # past the inner DataLoader, which takes 50 us
            return self._source.samples.load_task(task)
        except BaseException as error:
            if not is_beside(error):  # Ctrl-C: who goes on with this pass gets the batch
                undispatched.appendleft(task)
            raise

    def _load_behind(self, plan: Plan, entry: PlannedEntry, loaded: Loaded) -> Loaded:
        """Load the next batches as well, as long as what hits leave out of them fills one batch:
        the model computes it together. Return what was `loaded` of the first.
        """
        planner, found = self._planner, [loaded]
        behind = [*planner.planned][: -(plan.task.number + 1) % _TOGETHER]
        if workers := self._loader.num_workers:  # half of what they have ready: they are to go on
            behind = behind[: (self._loader.prefetch_factor or 2) * workers // 2]
        left = len(plan.task.ids) - entry.num_misses
        try:
            for one in behind if entry.view.padding is None and not plan.loads_hits else ():
                if one.entry is None or one.loads_hits or one.entry.view is not entry.view:
                    break
                left -= one.entry.num_misses
                if left < 0 or (kept := self._lasting(found[-1])) is None:
                    break
                found[-1] = kept
                with Attempt() as tried:
                    found.append(self._load())
                if tried.error is not None:
                    planner.loaded.append(tried.error)  # it is raised in its turn
                    break
        except BaseException:  # who goes on with this pass gets all of them
            planner.planned.appendleft(plan)
            planner.loaded.extend(found)
            raise
        missing: Missing | None = None
        for one, kept in reversed([*zip((plan, *behind), found, strict=False)]):
            one.until = plan.task.number + len(found) - 1
            if one.entry is not None and one.entry.num_misses:
                missing = one.missing = Missing(kept.data, one.entry.num_misses, missing)
        planner.loaded.extendleft(reversed(found[1:]))
        return found[0]

    def _lasting(self, loaded: Loaded) -> Loaded | None:
        """Return it so that the collate function may use its memory again; None if that fails."""
        if self._loader.num_workers or not self._source.has_own_collate:
            return loaded
        with Attempt():
            return loaded._replace(data=copy.deepcopy(loaded.data))
        return None

    def _load_at_once(self) -> Any:
        """Load the next batch in this process, as DataLoader would, and no more.

        There is nothing to plan while nothing is frozen, or proved as yet: the way through the
        inner DataLoader would cost 10 us a batch, a tenth of a cheap one.
        """
        if self._steps:
            self._note_step()
        planner, progress, source = self._planner, self._planner.progress, self._source
        number, batches = planner.next_number, planner.drawn()
        if not batches:
            raise StopIteration
        state = progress.drawn.popleft() if progress.drawn else progress.sampler
        samples = None
        # In a thread beside the training, what that draws must not be put back.
        if self._cache is not None and not self._cache.is_beside(source):
            samples = source.samples.undrawn(batches[0])
        if samples is None:
            [plan] = planner.plans(batches, *planner.outlook(), number)
            samples = source.samples.load(plan.task)
        batch = source.collate(samples)
        if self._cache is not None and self._cache.boundary is not None:
            counts = self._cache.counters.counts
            counts.misses += len(batches[0])
            counts.miss_batches += 1
        progress.sampler, progress.yielded = state, progress.yielded + 1
        return batch

    def _note_step(self) -> float:
        """Tell the cache what the step cost that ends with this call, if the model was called; not
        if it was called more often than in others: somebody has validated it.
        """
        now, cache = time.perf_counter(), self._cache
        if not self._steps or cache is None or cache.counters.num_calls == self._num_calls:
            return now
        plan, seconds = self._steps.popleft(), now - self._since
        if plan.entry is not None and plan.entry.on_load is not None:  # no call has used it
            is_random, plan.entry.on_load = self._source.is_random, None
            cache.counters.batch(len(plan.task.ids), None, is_random=is_random)
        num_calls = cache.counters.num_calls - self._num_calls
        self._since, self._num_calls = now, cache.counters.num_calls
        self._fewest = min(self._fewest, num_calls)
        if num_calls > self._fewest:
            cache.policy.unnoted_s, seconds = 0.0, math.inf
        if self._together and self._together[-1][0].until != plan.until:
            self._note_row(cache)
        self._together.append((plan, seconds))
        if plan.task.number >= plan.until:
            self._note_row(cache)
        return now

    def _note_row(self, cache: Any) -> None:
        """Share out what steps took of which the first has computed misses of all."""
        row, self._together = self._together, []
        seconds = sum(spent for _, spent in row) / len(row)
        with self._beside:
            for plan, _ in row if seconds < math.inf else ():
                cache.note_step(
                    self._source.key, seconds, plan.size or len(plan.task.ids), plan.entry,
                    is_control=plan.control is not None,
                )  # fmt: skip

    def _start_workers(self) -> Iterator[Loaded]:
        loader = self._loader
        if loader._persistent is not None:
            return iter(loader._persistent[1])
        inner = task_loader(
            self._source.samples, self._planner, num_workers=loader.num_workers,
            pin_memory=loader.pin_memory, generator=self._inner_generator,
            prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device, **loader._worker_options(),
        )  # fmt: skip
        if loader.persistent_workers:
            loader._persistent = self._planner, inner
            loader._iterator = None  # of a DataLoader that was taken over: its workers end
        return iter(inner)
