"""From the plan of a batch and its loaded misses to the batch that the training loop gets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache import batch as batches
from egeria_cache.attempt import Attempt
from egeria_cache.batch import (
    Batch,
    BatchTensor,
    Leaves,
    Lengths,
    Padding,
    Rows,
    Structure,
    flatten,
)
from egeria_cache.errors import EgeriaError
from egeria_cache.loader.plan import Plan
from egeria_cache.prefetch import PRINT
from egeria_cache.samples import BatchContext, Found, Loaded, LoaderSource, Task, row_prints

if TYPE_CHECKING:
    from egeria_cache.cache import LoaderApi
    from egeria_cache.prefetch import PlannedEntry

_MOVED = (
    "in leaf {!r} of a batch a sample does not stand in its place, or is not what it is alone: the "
    "collate_fn sorts or mixes samples, or draws random numbers (draw them in the data set)"
)
_SHARED = (
    "leaf {!r} of a batch lies in the memory of another (`x[:, :-1]` of padded rows cuts only the "
    "longest of them): cut in the loop or in the data set"
)


class Assembly:
    """Puts a loader's batches together.

    Args:
        source: The loader's samples.
    """

    cache: LoaderApi
    beside: AbstractContextManager[Any]
    """Of the pass that began last: what goes wrong inside of it is none of the loop's errors."""

    def __init__(self, source: LoaderSource) -> None:
        self._source = source
        self._length = 0
        """Of the first of its batches of padded samples."""
        self._rebuilds: bool | None = None
        """Whether its batches can be taken apart and built again; None until one was tried."""

    def assemble(self, plan: Plan, loaded: Loaded) -> Any:
        """Return the batch: `loaded` holds the collated misses, if there are any."""
        is_whole = plan.entry is None or plan.loads_hits
        if plan.entry is None and not self.cache.is_asked:
            return loaded.data
        with self.beside:
            return self._assembled(plan, loaded)
        plan.entry = None
        return loaded.data if is_whole else self._source.load(plan.task)

    def _assembled(self, plan: Plan, loaded: Loaded) -> Any:
        entry, missing = plan.entry, loaded.data
        if entry is None or plan.loads_hits:
            began = time.perf_counter()
            batch = self._tag(plan, loaded)
            self.cache.policy.proof_s += time.perf_counter() - began
            return batch
        view, num_misses, misses = entry.view, entry.num_misses, dict[str, Any]()
        if num_misses:
            misses = flatten(missing, num_misses)[1]
        if not entry.ready() or (num_misses and not view.admits(misses)):
            return self._load_instead(plan)
        lengths, kept = None, entry.kept
        if view.padding is not None:
            lengths = self._joint_lengths(plan, entry, loaded)
            if lengths is None:
                return self._load_instead(plan)
            misses, kept = lengths.widened(misses), lengths.widened(kept)
        leaves: dict[str, Rows] = {**misses, **view.constants_for(len(plan.task.ids)), **kept}
        for path in view.kept if num_misses else ():
            leaves[path] = batches.merge_rows(entry.hit, kept[path], misses[path])
        batch = self._batch(plan, leaves, view.structure, view.rows, lengths)
        tagged = self._tagged(batch, leaves, kept)
        if num_misses:
            self._source.yields(tagged.values())
        for path in view.cut.dropped:
            row = view.rows[path]
            own: tuple[int, ...] = row.shape[1:]
            if lengths is not None:
                own = lengths.padding.shape(path, row, lengths.whole)
            whole = _meta((batch.size, *own), row.dtype)
            tagged[path] = batches.without_data(whole, batch, path, misses.get(path))
        return view.structure.rebuild(tagged)

    def _load_instead(self, plan: Plan) -> Any:
        """Load a whole batch in this process: what was planned to be read cannot be."""
        assert plan.entry is not None
        plan.missing, plan.until = None, -1
        self.cache.counters.counts.refetched += plan.entry.num_hits
        task = plan.task.take(np.ones(len(plan.task.ids), bool))
        return self._tag(plan, self._source.measure(task))

    def _tag(self, plan: Plan, loaded: Loaded) -> Any:
        """Return a fully loaded batch whose tensors know their samples."""
        source, size = self._source, len(plan.task.ids)
        if self.cache.is_plain(source.key) or source.key in self.cache.left_out:
            self._count(plan)
            return loaded.data
        structure, leaves = flatten(loaded.data, size)
        if not self._is_understood(structure, loaded.data, leaves, size):
            plan.entry = None
            return loaded.data
        # What is loaded to look at may lie in the same memory.
        source.yields(leaves.values())
        studies, batch = source.has_own_collate and self._stores(plan), None
        if source.study.company is None or not studies:
            with Attempt() as tried:
                batch = self._apart(plan, loaded, structure, leaves, studies)
            if (error := tried.error) is not None:
                if not studies:
                    raise error
                why = f"its samples cannot be loaded again and collated alone: {error!r}"
                why = str(error) if isinstance(error, EgeriaError) else why
                self.cache.load_together(source, why)
        if batch is None:
            with Attempt() as tried:
                batch = self._together(plan, loaded, structure, leaves)
            if batch is None:
                is_ours = isinstance(tried.error, EgeriaError)
                why = str(tried.error) if is_ours else source.study.company or ""
                self.cache.leave_uncached(source.key, why)
                return structure.rebuild(leaves)
        if plan.entry is None:
            self._count(plan)
        tagged = self._tagged(batch, leaves, batch.leaves)
        source.yields(tagged.values())
        return batches.own_containers(loaded.data, structure.rebuild(tagged))

    def _apart(
        self,
        plan: Plan,
        loaded: Loaded,
        structure: Structure,
        leaves: dict[str, Any],
        studies: bool,
    ) -> Batch:
        """Return a batch whose samples are each what they are alone.

        Raises:
            Exception: They are not, or cannot be loaded again and collated alone.
        """
        source, study, lengths = self._source, self._source.study, None
        entry, plan.entry = plan.entry, None
        if studies:
            is_new, views = study.look_for_padding(plan.task, leaves), self.cache.views
            if is_new and any(v.padding != study.padding for v in views.of(source.key)):
                self.cache.void(source.key, unlink=True)
            if (shared := _shared(leaves)) is not None:
                raise EgeriaError(_SHARED.format(shared))
            # Before padding was found, a sample that is padded was not what it is alone.
            if loaded.differs is not None and study.padding is None:
                raise EgeriaError(_MOVED.format(loaded.differs))
            if study.padding is not None:
                measured = self._measured(plan, loaded)
                lengths = Lengths(study.padding, measured, study.padding.sizes(leaves))
        if lengths is not None and not lengths.are_tight:
            raise EgeriaError(
                f"a batch is {lengths.whole} long, and its longest samples {lengths.own.max(0)}: "
                "the collate_fn cuts samples, packs them, or pads them to another length",
            )
        plan.entry = self._still_true(entry, leaves, lengths)
        batch = self._batch(plan, leaves, structure, {}, lengths)
        if plan.control is not None and study.padding is not None:
            with Attempt():
                plan.size = self._size(batch.size, study.padding.sizes(leaves))
        if studies and (why_not := source.why_not_cacheable(batch)) is not None:
            # Asked before the model is, which might fail at such a batch otherwise.
            raise EgeriaError(why_not)
        return batch

    def _together(
        self, plan: Plan, loaded: Loaded, structure: Structure, leaves: dict[str, Any]
    ) -> Batch:
        """Return a batch that was loaded whole, as it is: its hits enter the model all the same.

        What the samples have as their own is tagged; of the rest nothing is known, and nothing that
        is stored may depend on it.

        Raises:
            Exception: No leaf is the samples' own.
        """
        study, entry = self._source.study, plan.entry
        found = study.find(plan.task, loaded, leaves)
        if found.is_new:
            self.cache.void(self._source.key, unlink=True)
        if entry is not None and not (entry.view.padding == study.padding and entry.ready()):
            plan.entry = None
        return self._batch(plan, found.own, structure, {}, found.lengths, found)

    def _count(self, plan: Plan) -> None:
        """Count a batch that was loaded; its hits are counted once they are used."""
        is_random = self._source.is_random
        self.cache.counters.batch(len(plan.task.ids), None, is_random=is_random)

    def _tagged(self, batch: Batch, leaves: Leaves, own: Leaves) -> dict[str, Any]:
        """Return the leaves of a batch, of which those that the samples own know these."""
        only = self.cache.yields(self._source.key)
        chosen = own.keys() if only is None else own.keys() & only
        tagged = dict(leaves)
        for path in chosen:
            rows = leaves[path]
            if isinstance(rows, Tensor) and batches.is_rows(rows, batch.size):
                tagged[path] = BatchTensor.wrap(rows, batch, path)
        return tagged

    def _still_true(
        self, entry: PlannedEntry | None, leaves: Leaves, lengths: Lengths | None
    ) -> PlannedEntry | None:
        """Return the hits of a loaded batch if the front would read what it read for them."""
        if entry is None or PRINT not in entry.view.kept or not entry.ready():
            return None
        if entry.view.padding != (None if lengths is None else lengths.padding):
            return None
        with Attempt():  # a leaf may be of another kind than it was
            prints = row_prints({p: leaves[p] for p in sorted(entry.view.cut.read)}, lengths)
            if torch.equal(entry.kept[PRINT], prints[entry.hit]):  # type: ignore[arg-type]
                return entry
        self.cache.draws_count(self._source)
        return None

    def _size(self, num_samples: int, whole: tuple[int, ...]) -> float:
        """Return how many samples as long as in the first batch this one is worth, with padding."""
        self._length = self._length or sum(whole)
        return num_samples * sum(whole) / max(self._length, 1)

    def _stores(self, plan: Plan) -> bool:
        """Whether rows of a batch may be stored; else it is computed as without a cache, as a
        control is of which all is stored that will be read.
        """
        if plan.task.seed is None or not self.cache.may_store(self._source.key):
            return False
        control = plan.control
        if control is None or (control.num_misses and self._source.served == 1):
            return True
        return control.view not in self.cache.views.of(self._source.key)[:1]

    def _measured(self, plan: Plan, loaded: Loaded) -> np.ndarray:
        """Return the lengths of loaded samples, int64, shape (B, axes).

        Raises:
            EgeriaError: They cannot be told, or a sample is not in its place in the batch.
        """
        if loaded.lengths is None or loaded.axes != self._source.study.axes:
            # Loaded before it was known that it has to be.
            rows = np.ones(len(plan.task.ids), bool) if plan.entry is None else ~plan.entry.hit
            loaded = self._source.measure(plan.task.take(rows))
        if loaded.lengths is None:
            raise EgeriaError("its samples cannot be measured one by one")
        if loaded.differs is not None:
            raise EgeriaError(_MOVED.format(loaded.differs))
        return loaded.lengths

    def _joint_lengths(self, plan: Plan, entry: PlannedEntry, loaded: Loaded) -> Lengths | None:
        """Return how long hits and misses are together; None if the misses cannot tell."""
        view, own = entry.view, entry.lengths
        assert view.padding is not None
        assert own is not None
        if entry.num_misses:
            measured = None
            with Attempt():  # an error will be raised again where the whole batch is loaded
                measured = self._measured(plan, loaded)
            if measured is None or self._source.study.padding != view.padding:
                return None
            own = np.empty((len(plan.task.ids), measured.shape[1]), np.int64)
            own[entry.hit], own[~entry.hit] = entry.lengths, measured
        return Lengths(view.padding, own, tuple(own.max(0).tolist()))

    def _is_understood(self, structure: Structure, data: Any, leaves: Leaves, size: int) -> bool:
        """Whether batches like this can be taken apart and built again, found with the first."""
        if self._rebuilds is None:
            self._rebuilds = False
            with Attempt():
                self._rebuilds = batches.is_faithful(structure, data, leaves, size)
            if not self._rebuilds:
                self.cache.leave_uncached(
                    self._source.key,
                    f"its batches, of class {type(data).__qualname__}, cannot be built from parts",
                )
        return self._rebuilds

    def _batch(
        self,
        plan: Plan,
        leaves: dict[str, Any],
        structure: Structure,
        rows: Mapping[str, Tensor],
        lengths: Lengths | None,
        found: Found | None = None,
    ) -> Batch:
        source, task, entry = self._source, plan.task, plan.entry
        size, view = len(task.ids), None if entry is None else entry.view
        plan.size = size if lengths is None else self._size(size, lengths.whole)
        is_read = entry is not None and not entry.num_misses
        stores = is_read or self._stores(plan)
        constants, metas = dict[str, Any](), dict(rows)
        padding = Padding((), {}) if lengths is None else lengths.padding
        for path, leaf in leaves.items():
            if path in view.constants if view is not None else not batches.is_rows(leaf, size):
                constants[path] = leaf.clone() if batches.is_dense(leaf) else leaf
            elif isinstance(leaf, Tensor) and not (is_read and path in rows):
                metas[path] = padding.row_meta(path, leaf)
        batches.forget_lost()
        age = source.fingerprint.age
        if entry is not None:
            entry.is_given, count = True, self.cache.counters.batch
            entry.whole = None if lengths is None else lengths.whole
            entry.on_load = partial(count, size, entry.hit, is_random=source.is_random)
        entering: batches.Entry | None = entry
        if found is not None:
            task, stores = task.at(found.order), stores and not is_read
            if entry is not None and found.order != list(range(size)):
                entering = batches.PartEntry(entry, entry.load, np.array(found.order))
        return Batch(
            ids=task.ids, draws=np.array(task.draws, np.int64), loader_name=source.key,
            leaves=leaves,
            load_rows=partial(self._load_rows, task, lengths, None if found is None else [*leaves]),
            planned_entry=entering,
            context=BatchContext(source, structure, task, metas, constants, age),
            may_be_stored=stores, lengths=lengths, missing=plan.missing,
            mixed={} if found is None else found.mixed, why_mixed=source.study.company or "",
        )  # fmt: skip

    def _load_rows(
        self, task: Task, lengths: Lengths | None, own: list[str] | None, rows: np.ndarray
    ) -> Leaves:
        """Load some rows of a batch once more, as long as the batch is, and in its order; `own` are
        the leaves that are its samples' own where batches are loaded whole.
        """
        task, size = task.take(rows), int(rows.sum())
        self.cache.counters.counts.refetched += size
        if own is None:
            leaves = flatten(self._source.load(task), size)[1]
        else:
            loaded = self._source.measure(task)
            assert loaded.places is not None
            again, back = flatten(loaded.data, size)[1], np.argsort(loaded.places.order)
            leaves = {path: batches.at_rows(again[path], back) for path in own}
        return leaves if lengths is None else lengths.widened(leaves)


@lru_cache(64)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor that nobody may change: to make one takes 4 us."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _shared(leaves: Leaves) -> str | None:
    """Name a leaf that has elements in common with one before it; None if none has."""
    dense = {path: leaf for path, leaf in leaves.items() if batches.is_dense(leaf)}
    if len({leaf.untyped_storage().data_ptr() for leaf in dense.values()}) == len(dense):
        return None
    pairs = combinations(dense.items(), 2)
    return next((path for (_, one), (path, other) in pairs if batches.overlap(one, other)), None)
