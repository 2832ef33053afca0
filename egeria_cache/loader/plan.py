"""The look-ahead: index batches are drawn early, so what comes is known before it is needed.

How far they may be drawn ahead without anybody noticing is `num_foreseeable`: what a sampler draws
may depend on when it is asked: on losses, on a generator that training draws from too, on a list
that the loop edits. Only of torch's own samplers and ours is it known what they do, and when; all
others are asked when DataLoader would ask them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from torch.utils import data

from egeria_cache.batch import Missing
from egeria_cache.loader.resume import Progress
from egeria_cache.loader.samplers import ShardAffineSampler
from egeria_cache.prefetch import PlannedEntry, Prefetcher, View
from egeria_cache.samples import Clock, Loaded, LoaderSource, Task

if TYPE_CHECKING:
    from egeria_cache.cache import LoaderApi

_DRAW_AT_ONCE = (
    data.SequentialSampler, data.SubsetRandomSampler, data.WeightedRandomSampler,
    data.DistributedSampler, ShardAffineSampler, range, tuple,
)  # fmt: skip
"""Whatever they draw, they draw with their first sample."""

_ACCELERATE = "accelerate.data_loader"
_WRAPPERS = {(_ACCELERATE, "BatchSamplerShard"), (_ACCELERATE, "SkipBatchSampler")}
"""They hand on, or leave out, what the batch sampler inside draws."""
_PERMUTES = {(_ACCELERATE, "SeedableRandomSampler")}
"""They draw as `RandomSampler` does. All of these by name: nothing of theirs is imported here."""
_LAST = 2
"""Batches of an epoch that it takes to commit what waits: the next one looks for it."""
_GENERATION, _IS_IDLE = attrgetter("generation"), attrgetter("generation.is_idle")
_MOST_AT_ONCE = 8
"""Batches that are planned with one look-up."""


def num_foreseeable(batch_sampler: Any) -> int:
    """Return how many of an epoch's first index batches may be drawn at any time after its start.

    Not the last one: with it, or after it, `RandomSampler` draws from its generator again.
    """
    inner = batch_sampler
    while _name(inner) in _WRAPPERS:
        inner = inner.batch_sampler
    if type(inner) is not data.BatchSampler:
        return 0
    sampler: Any = inner.sampler
    at_once = type(sampler) in _DRAW_AT_ONCE
    if type(sampler) is data.RandomSampler or _name(sampler) in _PERMUTES:
        # Without a generator it makes one of its own; else it may be anybody's.
        is_whole = sampler.num_samples == len(sampler.data_source) and not sampler.replacement
        at_once = sampler.generator is None or is_whole
    return len(batch_sampler) - 1 if at_once else 0


def _name(thing: Any) -> tuple[str, str]:
    return type(thing).__module__, type(thing).__qualname__


@dataclass(slots=True, eq=False)
class Plan:
    """One future batch: its samples, and which of them come from the cache."""

    task: Task
    """All of its samples."""
    misses: Task
    """Those that DataLoader's workers have to load."""
    entry: PlannedEntry | None = None
    """Where the hits enter the model; None if every sample is to be loaded."""
    control: PlannedEntry | None = None
    """It could be served from this, and is computed to know what that costs."""
    loads_hits: bool = False
    """Whether hits are loaded as well, for what stands beside what is stored."""
    missing: Missing | None = None
    """The rows that hits leave out, where they can be computed with those of the next batches."""
    until: int = -1
    """Number of the last batch that it is computed with; its own or none: it is computed alone."""
    size: float = 0.0
    """Number of samples, those of a padded batch counted by its length: what a step costs by."""


@dataclass(eq=False)
class Planner:
    """Draws index batches ahead of the training loop and plans each of them once.

    Two consumers walk the same plans: the inner DataLoader iterates over their tasks (as early as
    its workers want them), the training loop takes the plans. Single-threaded.
    """

    index_batches: Iterator[Sequence[Any]]
    """What the batch sampler draws."""
    source: LoaderSource
    clock: Clock
    """Which random draws of the samples this pass uses."""
    cache: LoaderApi | None
    outlook: Callable[[], tuple[Sequence[View], bool | None]]
    """Says what can be read at the moment: see `LoaderApi.outlook`."""
    prefetcher: Prefetcher
    """Reads the hits of plans that come near."""
    beside: AbstractContextManager[Any]
    """What goes wrong inside of it is none of the loop's errors."""
    progress: Progress
    next_number: int
    num_foreseeable: int
    """Batches below this number may be drawn ahead."""
    is_read: bool = False
    """Whether all of the batch that was planned last is to be read."""
    planned: deque[Plan] = field(default_factory=deque)
    """Beyond what was taken."""
    undispatched: deque[Task] = field(default_factory=deque)
    """What of them is still to be loaded."""
    loaded: deque[Loaded | Exception] = field(default_factory=deque)
    """What of them was loaded ahead of its turn."""
    is_midway: bool = False
    """Whether more batches are to come than the last few, ahead of need."""
    unread: deque[PlannedEntry] = field(default_factory=deque)
    """What nobody has begun to read."""
    window: int = 0
    """Batches beyond the next one that are planned; none while nothing can be read."""

    def __iter__(self) -> Iterator[Task]:
        """Yield tasks in order, planning as far ahead as the consumer asks."""
        while self.undispatched or self._draw(*self.outlook()):
            yield self.undispatched.popleft()

    def top_up(self) -> None:
        """Plan ahead, and begin to read the hits of the plans that come next.

        While nothing can be read, nothing is drawn that DataLoader would not draw.
        """
        ahead = self.window if self.next_number < self.num_foreseeable else 0
        if not self.window or len(self.planned) <= ahead:
            views, seeds_all = self.outlook()
            self.window = ahead = self.prefetcher.window if views else 0
            while len(self.planned) <= (ahead if self.next_number < self.num_foreseeable else 0):
                # Where all is read that can be, and nothing on its way to disk is waited for,
                # several are planned at a time: half of what one takes is the same for all.
                is_still = self.is_read and (self.source.is_random or all(map(_IS_IDLE, views)))
                most = min(_MOST_AT_ONCE, self.num_foreseeable - self.next_number)
                if not self._draw(views, seeds_all, max(1, most) if is_still else 1):
                    break
        num_near = min(len(self.planned), self.window + 1)
        last = self.planned[num_near - 1].task.number if num_near and self.window else -1
        while self.unread and self.unread[0].number <= last:
            with self.beside:
                self.prefetcher.start(self.unread.popleft())

    def take(self, number: int) -> Plan:
        """Return the next plan, which is of that number."""
        if self.prefetcher.rings:
            self.prefetcher.release_before(number)
        plan = self.planned.popleft()
        if plan.task.number != number:
            raise RuntimeError(f"batch {number} came without having been planned")
        left = self.num_foreseeable - self.next_number + len(self.planned)
        self.is_midway = bool(self.planned) and left > _LAST
        return plan

    def drawn(self, count: int = 1) -> list[list[Any]]:
        """Return the next batches that the sampler draws, so many as long as there are some."""
        batches, progress = list[list[Any]](), self.progress
        # By next() alone: to some, iter() is a new epoch.
        while len(batches) < count and (indices := next(self.index_batches, None)) is not None:
            batches.append(list(indices))
        self.next_number += len(batches)
        has_ended = len(batches) < count
        progress.asked = max(progress.asked, self.next_number + has_ended)
        if has_ended:
            self.index_batches = iter(())  # it is not asked again
        return batches

    def _draw(self, views: Sequence[View], seeds_all: bool | None, count: int = 1) -> bool:
        """Plan so many batches with one look-up; whether there was one.

        What other processes have stored by now is found: ranks that share a directory find in one
        epoch what any of them has stored in the one before.
        """
        first = self.next_number
        for plan in self.plans(self.drawn(count), views, seeds_all, first):
            self.planned.append(plan)
            self.undispatched.append(plan.misses)
            if plan.entry is not None:
                self.unread.append(plan.entry)
        return self.next_number > first

    def plans(
        self, batches: list[list[Any]], views: Sequence[View], seeds_all: bool | None, first: int
    ) -> list[Plan]:
        """Return plans of batches, of which the first has this number."""
        plans = list[Plan]()
        with self.beside:
            plans = self._plans(batches, views, seeds_all, first) if batches else []
        if not plans:  # no more can be told of samples than what the sampler drew
            seed = None if seeds_all is None else self.source.seed
            for number, indices in enumerate(batches, first):
                ids = [("", repr(index)) for index in indices]
                task = Task(number, indices, ids, [0] * len(ids), seed, bool(seeds_all))
                plans.append(Plan(task, task))
        return plans

    def _plans(
        self, batches: list[list[Any]], views: Sequence[View], seeds_all: bool | None, first: int
    ) -> list[Plan]:
        source, cache = self.source, self.cache
        ids = source.identify(list(chain.from_iterable(batches)))
        draws, start = source.draws_at(ids, self.clock), 0
        # Where something may be read, more may be stored.
        may_store = cache is not None and cache.is_asked and cache.may_store(source.key)
        studies = bool(views) or (seeds_all is not None and may_store)
        together = studies and source.study.company is not None
        loads_hits = together or (studies and (source.is_steady or source.is_restless))
        stored = source.stored_as(draws)
        located = map(methodcaller("locate", ids, variant=stored), map(_GENERATION, views))
        places = [*zip(views, located, strict=True)]
        seed = None if seeds_all is None else source.seed
        plans = []
        for number, indices in enumerate(batches, first):
            stop = start + len(indices)
            own = ids[start:stop]
            variants = stored[start:stop]
            entry: PlannedEntry | None = None
            for view, there in places:  # the deepest first: on a tie it serves
                found = PlannedEntry(view, number, own, variants, there[start:stop])
                if found.num_hits > (0 if entry is None else entry.num_hits):
                    entry = found
            has_all = entry is not None and not entry.num_misses
            # Of random samples some are drawn anew in each pass.
            self.is_read = has_all or (entry is not None and source.is_random)
            is_control = entry is not None and cache is not None and cache.wants_control(entry)
            task = Task(number, indices, own, draws[start:stop].tolist(), seed, bool(seeds_all))
            if studies and not is_control and (loads_hits or not has_all):
                compares = source.has_own_collate
                task = task._replace(axes=source.study.axes, places=together, compares=compares)
            misses, control = task, entry if is_control else None
            entry = None if is_control else entry
            if entry is not None and not loads_hits:
                nothing = Task(number, None, (), (), None)
                misses = task.take(~entry.hit) if entry.num_misses else nothing
            plans.append(Plan(task, misses, entry, control, loads_hits=loads_hits))
            start = stop
        return plans
