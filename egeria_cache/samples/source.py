"""A loader as the cache sees it: how its samples are named, loaded, collated and fingerprinted."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from egeria_cache import batch as batches
from egeria_cache.batch import Batch, SampleId, Structure, flatten, is_rows
from egeria_cache.pystate import Portrait, Snapshot
from egeria_cache.samples.collation import Study, same_values
from egeria_cache.samples.draws import Clock, Draws
from egeria_cache.samples.fingerprint import Fingerprint, Look
from egeria_cache.samples.loading import SampleLoader, SideWorker
from egeria_cache.samples.task import Loaded, Task

_NUMBERS = itertools.count()
_LASTING = (str, bytes, int, float, bool, np.generic, type(None))
RESTLESS = "its data set changes again and again"
_TRIED_SAMPLES, _TRIED_DRAWS = 4, 2
"""So many samples of a batch are loaded under so many other draws, to see what these change."""


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Where a batch came from; rides on `Batch.context`."""

    source: LoaderSource
    structure: Structure
    task: Task
    """How its samples were loaded, or would be."""
    metas: Mapping[str, Tensor]
    """Meta tensor of one row of each tensor leaf, of size 1 where samples are padded."""
    constants: Mapping[str, Any]
    """The other leaves."""
    age: int
    """Of the data (`Fingerprint.age`) when the batch was given out."""

    @property
    def is_outdated(self) -> bool:
        """Whether the data are others by now."""
        return self.age != self.source.fingerprint.age

    def select(self, rows: np.ndarray) -> BatchContext:
        """Return the context of some of the samples, given by their positions."""
        counts, own = self.source.counts, self.constants.items()
        constants = {k: batches.counting(one, len(rows)) if k in counts else one for k, one in own}
        return replace(self, task=self.task.at(rows.tolist()), constants=constants)


@dataclass(eq=False)
class LoaderSource:
    """The dataset side of one loader; see `EgeriaLoader` for the arguments."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    sample_id: Callable[[Any], Any] | None
    sample_version: Callable[[Any], Any] | None
    name: str
    seed: int | None
    draws: Draws
    workers: Mapping[str, Any] | None = None
    """The options of its workers: then nothing is loaded in this process."""
    is_steady: bool = False
    """Whether random draws change nothing that the frozen front reads: its output is stored once,
    and each sample is loaded in every epoch, drawn anew."""
    is_restless: bool = False
    """Whether its data are others again and again: each sample is loaded in every epoch, and what
    is stored is served where the front would read what it read for it."""
    patience: int = 0
    """How often what the front reads may be another then: more than never where a number alone has
    changed, of which nothing shows that it decides any sample."""
    is_known_random: bool = False
    """Whether each draw of a sample is another, even if samples were not seen to draw."""
    counts: set[str] = field(default_factory=set)
    """Leaves that say how many samples a batch has."""

    def __post_init__(self) -> None:
        self.samples = SampleLoader(self.dataset, self.collate)
        own = self.workers
        self.side_worker = None if own is None else SideWorker(self.samples, own)
        self.key = f"{self.name}#{next(_NUMBERS)}"
        """Tells this loader from all others, also from those of the same name."""
        self._steady: dict[frozenset[str], bool] = {}
        """What was found out of leaves that fronts read."""
        self._unnamed: str | None = None
        self._roots = {
            "data set": self.dataset,
            "collate_fn": self.collate,
            "sample_id": self.sample_id or _method(self.dataset, "sample_id"),
            "sample_version": self.sample_version or _method(self.dataset, "sample_version"),
            "worker_init_fn": (own or {}).get("worker_init_fn"),
        }
        self.fingerprint = Fingerprint(self._roots, weakref.proxy(self))  # no cycle
        self._live: list[weakref.ref[Tensor]] = []
        self._recent: Sequence[Any] | None = None
        self._proven: set[tuple[Any, ...]] = set()
        self.study = Study(weakref.proxy(self))
        """Of a collate function of the user's."""

    def identify(self, indices: Sequence[Any]) -> list[SampleId]:
        """Return the samples' stable IDs.

        What a sampler draws may be anything: where it says nothing that lasts, nothing is cached.

        Raises:
            TypeError: An ID that was made for us is not an int, a string, or a tuple of them.
        """
        name_of, version_of = self._roots["sample_id"], self._roots["sample_version"]
        if name_of is None and version_of is None and set(map(type, indices)) == {int}:
            return list(indices) if type(indices) is not list else indices
        named = indices if name_of is None else [name_of(i) for i in indices]
        if version_of is not None:
            named = [(v, str(version_of(i))) for v, i in zip(named, indices, strict=True)]
        return [v if type(v) in (int, str) else self._named(v) for v in named]

    def _named(self, value: Any) -> SampleId:
        try:
            return _as_sample_id(value)
        except TypeError as error:
            if self._roots["sample_id"] is not None:
                raise
            self._unnamed = str(error)
            return ("", repr(value))

    @property
    def is_random(self) -> bool:
        """Whether each draw of a sample is another to the frozen front, as far as is known."""
        return not self.is_steady and (self.is_known_random or bool(self.samples.drawn))

    @property
    def served(self) -> float:
        """Part of the samples of an epoch that are hits in the long run."""
        return self.draws.served if self.is_random else 1.0

    @property
    def drawn_from(self) -> str:
        """What its samples draw random numbers from, for people."""
        return ", ".join(sorted(self.samples.drawn))

    @property
    def why_not_served(self) -> str | None:
        """Say so if none of its draws is ever used again."""
        if not self.is_random or self.draws.reuse != 1:
            return None
        return (
            f"its samples draw random numbers ({self.drawn_from}), and with reuse=1 every epoch "
            "draws anew"
        )

    def draws_at(self, ids: Sequence[SampleId], clock: Clock) -> npt.NDArray[np.int64]:
        """Return which draw of each sample a pass uses: the first of all where none is random."""
        if self.is_steady:
            return np.full(len(ids), clock.tick, np.int64)
        return self.draws.at(ids, clock) if self.is_random else np.zeros(len(ids), np.int64)

    def stored_as(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the draws under whose numbers the front's outputs are stored: int64, (B,)."""
        return np.zeros_like(draws) if self.is_steady else draws

    def look_at_draws(self, batch: Batch, read: frozenset[str]) -> bool:
        """Find out whether other draws of a batch's samples change what the front reads.

        A few samples are tried, and what they draw must change something else. What they do not
        show is found when what is loaded is compared with what is served (`unsettle`).

        Args:
            batch: As it was loaded.
            read: The leaves that the front reads.

        Returns:
            Whether that is new.
        """
        was = self.is_steady
        if read not in self._steady:
            self._steady[read] = self._is_unmoved(batch, read)
        self.is_steady = self._steady[read]
        return self.is_steady != was

    def _is_unmoved(self, batch: Batch, read: frozenset[str]) -> bool:
        task = batch.context.task
        if not self.samples.drawn or task.seed is None or self.is_known_random:
            return False
        if batch.absent is not None or not self._has_prints(batch, read):
            return False
        task = task.at(range(min(batch.size, _TRIED_SAMPLES)))
        tries = ([n + ahead for n in task.draws] for ahead in range(_TRIED_DRAWS + 1))
        loaded = (self.load(task._replace(draws=draws)) for draws in tries)
        once, *others = (flatten(data, len(task.ids))[1] for data in loaded)
        pairs = ((path, leaf, one.get(path)) for one in others for path, leaf in once.items())
        moved = {path for path, leaf, again in pairs if not same_values(leaf, again)}
        return bool(moved) and moved.isdisjoint(read)

    def _has_prints(self, batch: Batch, read: frozenset[str]) -> bool:
        leaves = [batch.leaves.get(path) for path in read]
        return self.study.company is None and all(
            isinstance(one, Tensor) and is_rows(one, batch.size) and one.is_cpu for one in leaves
        )

    def why_not_compared(self, batch: Batch, read: frozenset[str]) -> str | None:
        """Say so if its data change again and again, and nothing tells what the front reads."""
        is_known = not self.is_restless or self._has_prints(batch, read)
        self.is_restless &= is_known or not self.patience
        why = f"{RESTLESS}, and the front reads what company makes, or no rows"
        return None if is_known or not self.is_restless else why

    def be_restless(self, patience: int) -> None:
        """Load each sample in every epoch from now on, and compare what the front reads."""
        self._restless_as = f"{RESTLESS}: {os.urandom(8).hex()}"
        self.is_restless, self.patience = True, patience

    def unsettle(self) -> None:
        """A draw, or a number, has changed what the front reads after all. Prints stay: workers
        have the data as they were when their pass began, which may be others here.
        """
        self.is_steady, self._steady = False, dict.fromkeys(self._steady, False)
        if self.is_restless:
            self.be_restless(self.patience - 1)

    def superseded(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the draws that are used no more once these are made; None if all are kept."""
        return self.draws.superseded(draws) if self.is_random else None

    def load(self, task: Task, kept: Snapshot | None = None) -> Any:
        """Load and collate samples, each under its own seed, wherever samples are loaded."""
        return self._answer(task._replace(axes=(), places=False), kept).data

    def load_each(self, tasks: Iterable[Task]) -> list[Any]:
        """Load several tasks, each as if it were the only one."""
        with nullcontext() if self.side_worker is not None else self.samples.out_of_turn() as kept:
            return [self.load(task, kept) for task in tasks]

    def use_collate(self, collate: Callable[[list[Any]], Any]) -> None:
        """Collate by another function from the next pass on."""
        if collate is not self.collate:
            self.collate = self.samples.collate = self._roots["collate_fn"] = collate
            self._proven.clear()
            self.study = Study(weakref.proxy(self))
            self.end_pass()

    def forget(self) -> None:
        """Find out anew what the collate function does; what is loaded whole is studied anyway."""
        self._proven.clear()
        if self.study.company is None:
            self.study = Study(weakref.proxy(self))

    def end_pass(self) -> None:
        """Stop the worker for samples out of turn; the next need starts another."""
        if self.side_worker is not None:
            self.side_worker.close()

    def _answer(self, task: Task, kept: Snapshot | None = None) -> Loaded:
        task = task._replace(compares=False)
        if self.side_worker is not None:
            loaded = self.side_worker.ask(task)
            self.samples.drawn |= loaded.drawn
            return loaded
        live = [tensor for ref in self._live if (tensor := ref()) is not None and tensor.is_cpu]
        live = [batches.unwrap(tensor).detach() for tensor in live]
        before = [tensor.clone() for tensor in live]
        with self.samples.out_of_turn(kept) as kept:
            loaded = self.samples.load_task(task)
            is_same = all(map(torch.equal, live, before))
            if not is_same or kept.has_moved(names=False):
                # It lies in what is put back, or in memory of the collate function's that the batch
                # under way lies in.
                loaded = loaded._replace(data=copy.deepcopy(loaded.data))
        for tensor, held in () if is_same else zip(live, before, strict=True):
            tensor.copy_(held)
        return loaded

    def yields(self, tensors: Iterable[Any]) -> None:
        """Note the tensors of the batch that was collated last, as the loop gets them: a collate
        function of the user's may use its memory again.
        """
        if self.side_worker is not None or self.collate is default_collate:
            return
        self._live = [weakref.ref(one) for one in tensors if isinstance(one, Tensor)]

    @property
    def has_own_collate(self) -> bool:
        """Whether its samples are collated otherwise than torch does it by itself."""
        return self.collate is not default_collate

    def measure(self, task: Task) -> Loaded:
        """Load samples once more, measured along the axes."""
        study = self.study
        return self._answer(task._replace(axes=study.axes, places=study.company is not None))

    def look_at(self, indices: list[int] | None, before: Portrait | None) -> Look:
        """Describe samples by index (None: any), in whichever process, and what loading them moves
        of the data as they are `before`.
        """
        if indices is None:  # any that the data set surely takes
            indices = list(self._recent or ())[:2]
        task = Task(-1, indices, self.identify(indices), [0] * len(indices), self.seed, looks=True)
        if before is not None:
            task = task._replace(before=before if self.side_worker is None else True)
        found: Look = self._answer(task).data
        return found

    def why_not_cacheable(self, batch: Batch) -> str | None:
        """Say why this loader's samples cannot be cached one by one; None if they can.

        Samples of the batch are loaded again: they must come out as they did in the batch. Two of
        them together suffice to see that a sample is the same each time; under a collate function
        other than torch's own, every sample is collated alone, which shows whether it depends on
        the rest of the batch. Repeated for batches whose rows have another shape.
        """
        if self._unnamed is not None:
            return self._unnamed
        self._recent = batch.context.task.indices
        if self.study.company is not None:
            return None  # each batch that is loaded is looked at
        if batch.absent is not None:
            return None  # it has hits, so batches like it were proved before
        alone = self.collate is not default_collate
        for path, leaf in batch.leaves.items():
            is_lasting = isinstance(leaf, _LASTING) or batches.is_dense(leaf)
            if not is_rows(leaf, batch.size) and not (alone and is_lasting):
                why = "is no ordinary tensor with rows of samples; stack them in the collate_fn"
                return f"leaf {path or 'of the batch'!r} {why}"
        shapes = tuple(row.shape for row in batch.context.metas.values())
        # What was loaded before the boundary was set has a proof of its own: it was not seeded for
        # a sample that reads torch's seed without drawing.
        kind = (batch.context.task.seeds_all, shapes)
        if kind in self._proven:
            return None
        with self.samples.out_of_turn() as kept:
            if kept.used_up:
                return (
                    f"{kept.used_up!r} is an iterator, which loading once more would use up; hold "
                    "what it gives in a list"
                )
        ends = sorted({0, batch.size - 1})
        for rows in [[i] for i in range(batch.size)] if alone else [ends]:
            differs = self._first_difference(batch, rows)
            if differs is not None:
                return self._why(batch, *differs, alone)
        if alone and not self._collates_rows(batch):
            return "the collate_fn does not give one row per sample"
        self._proven.add(kind)
        self.study.last_alone = None
        return None

    def _collates_rows(self, batch: Batch) -> bool:
        """Collate the first sample twice: every leaf must have two rows then, or stay as it is."""
        twice = batch.context.task.at([0, 0])
        leaves = flatten(self.load(twice), 2)[1]
        fixed, pairs = batch.context.constants, leaves.items()
        alike = (self._agrees(batch, p, x, 2) if p in fixed else is_rows(x, 2) for p, x in pairs)
        return leaves.keys() == batch.leaves.keys() and all(alike)

    def _agrees(self, batch: Batch, path: str, other: Any, size: int) -> bool:
        """Whether a leaf without rows is the same in another batch, or counts its samples."""
        own = batch.context.constants[path]
        if path not in self.counts and same_values(own, other):
            return True
        if (_count(own), _count(other)) != (batch.size, size):
            return False
        self.counts.add(path)
        return True

    def first_difference(
        self, batch: Batch, mask: np.ndarray, loaded: Mapping[str, Any]
    ) -> str | None:
        """Compare rows that were loaded again with what the batch holds of them; name a leaf."""
        for path, again in loaded.items():
            if path in batch.context.constants:
                if not self._agrees(batch, path, again, int(mask.sum())):
                    return path
                continue
            held = batch.rows_of(path, mask)
            if held is not None and not same_values(held, again):
                return path
        return None

    def _why(self, batch: Batch, path: str, once: Any, again: Any, alone: bool) -> str:
        """Say what makes a leaf come out differently, and what to do."""
        leaf = f"leaf {path or 'of the batch'!r}"
        if again is None:
            return (
                f"its batches hold an item per sample in a list, at {path!r}; stack samples in the "
                "collate_fn"
            )
        if not alone or self._first_difference(batch, list(range(batch.size))) is not None:
            return (
                f"{leaf} of a sample is not the same when it is loaded again under the same seed; "
                "draw random numbers in the data set, from the global state of torch, numpy or "
                "random, give samples memory of their own, and change data before a pass, not "
                "while it is under way"
            )
        if isinstance(once, Tensor) and once.dim() and len(once) != batch.size:
            return (
                f"{leaf} has {len(once)} rows for {batch.size} samples; collate several of a "
                "sample to the shape (samples, several, ...), and leave samples out by the "
                "sampler, not in the collate_fn"
            )
        return (
            f"{leaf} of a sample depends on the rest of its batch: the collate_fn mixes, "
            "packs or cuts samples, or pads them otherwise than to the longest of the batch, with "
            "one value, at one end; do such things in the data set, or after the boundary"
        )

    def _first_difference(self, batch: Batch, rows: list[int]) -> tuple[str, Any, Any] | None:
        """Load rows again; return the first leaf that differs: its path, as it was, as it is."""
        mask = np.zeros(batch.size, bool)
        mask[rows] = True
        task, study = batch.context.task, self.study
        again = study.alone(task, rows[0]) if len(rows) == 1 else study.leaves(task, mask)
        if batch.lengths is not None:
            again = batch.lengths.widened(again)
        lost = next((path for path in batch.leaves if path not in again), None)
        path = self.first_difference(batch, mask, again) if lost is None else lost
        return None if path is None else (path, batch.leaves.get(path), again.get(path))

    @property
    def fields(self) -> dict[str, Any]:
        """This loader's part of a generation's content address."""
        some = {
            "padding": None if self.study.padding is None else self.study.padding.fields,
            "leaves": None if self.study.company is None else "loaded with each batch",
            "draws": "of what the front does not read" if self.is_steady else None,
        }
        # What is stored of data that change is of this run alone.
        text = self._restless_as if self.is_restless else str(self.fingerprint)
        own = {"loader": self.name, "dataset": text, "augmentation_seed": self.seed}
        return own | {key: value for key, value in some.items() if value is not None}


def _method(dataset: Any, name: str) -> Callable[[Any], Any] | None:
    # What a `__getattr__` makes up, or has of a data set within that counts otherwise, is no name.
    is_own = inspect.getattr_static(dataset, name, None) is not None
    found = getattr(dataset, name, None) if is_own else None
    return found if callable(found) else None


def _as_sample_id(value: Any) -> SampleId:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        parts = tuple(_as_sample_id(part) for part in value)
        # The store knows flat tuples. A nested one (a tuple with a version, say) goes as its text;
        # so does any tuple that begins like such a text, so that no two IDs become one.
        nested = any(isinstance(part, tuple) for part in parts) or parts[:1] == ("",)
        return ("", repr(parts)) if nested else parts
    if isinstance(value, float | bytes | PurePath | slice):
        return ("", repr(value))
    if isinstance(value, int | np.integer) or (isinstance(value, Tensor) and value.dim() == 0):
        return int(value)
    raise TypeError(
        f"a sample ID must be an int, a string, or a tuple of them, got {type(value).__name__}; "
        "give EgeriaLoader a sample_id= that makes one from what the sampler draws"
    )


def _count(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor) and not leaf.dim() and not leaf.is_floating_point():
        return int(leaf)
    return leaf if type(leaf) is int else None
