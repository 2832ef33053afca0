"""From the plan of a batch and its loaded misses to the batch that the training loop gets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

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
    own_containers,
    row_meta,
    without_data,
)
from egeria_cache.loader.plan import Plan
from egeria_cache.samples import BatchContext, LoaderSource, Task

if TYPE_CHECKING:
    from egeria_cache.cache import LoaderPort

__all__ = ["Assembly"]


class Assembly:
    """Puts a loader's batches together.

    Args:
        source: The loader's samples.
        seed: Of their augmentation.
    """

    def __init__(self, source: LoaderSource, seed: int | None) -> None:
        self.cache: LoaderPort | None = None
        """Of the pass that began last."""
        self._source = source
        self._seed = seed
        self._rebuilds: bool | None = None
        """Whether its batches can be taken apart and built again; None until one was tried."""

    def assemble(self, plan: Plan, missing: Any) -> Any:
        """Return the batch: `missing` holds the collated misses (None if there are none)."""
        entry = plan.entry
        if self.cache is None or (entry is None and self.cache.boundary is None):
            return missing
        if entry is None:
            return self._tag(plan, missing)
        view, num_misses = entry.view, int((~entry.hit).sum())
        _, misses = flatten(missing, num_misses) if num_misses else (None, {})
        if not entry.ready() or (num_misses and not view.admits(misses)):
            self.cache.count_refetched(int(entry.hit.sum()))
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
        entry.on_load = partial(self.cache.count_batch, len(plan.ids), entry.hit)
        self.cache.count_yielded()
        return view.structure.rebuild(tagged)

    def _tag(self, plan: Plan, data: Any) -> Any:
        """Return a fully loaded batch whose tensors know their samples."""
        assert self.cache is not None
        if self.cache.boundary is None:
            return data
        plan.entry = None
        structure, leaves = flatten(data, len(plan.ids))
        if not self._is_understood(structure, data, leaves, len(plan.ids)):
            return data
        batch = self._batch(plan, leaves, structure, {})
        only = self.cache.tagged_leaves(self._source.key)
        tagged = {
            path: _wrap(rows, batch, path) if only is None or path in only else rows
            for path, rows in leaves.items()
        }
        self.cache.count_batch(len(plan.ids), None)
        self.cache.count_yielded()
        self._source.yields(tagged.values())
        return own_containers(data, structure.rebuild(tagged))

    def _is_understood(
        self, structure: Structure, data: Any, leaves: Mapping[str, Any], size: int
    ) -> bool:
        """Whether batches like this can be taken apart and built again, found with the first."""
        if self._rebuilds is None:
            try:
                self._rebuilds = is_faithful(structure, data, leaves, size)
            except Exception:
                self._rebuilds = False
            if not self._rebuilds:
                assert self.cache is not None
                self.cache.leave_uncached(
                    self._source.key,
                    f"its batches, of class {type(data).__qualname__}, cannot be built from parts",
                )
        return self._rebuilds

    def _batch(
        self,
        plan: Plan,
        leaves: Mapping[str, Rows],
        structure: Structure,
        rows: Mapping[str, Tensor],
    ) -> Batch:
        forget_lost()
        source, task = self._source, plan.whole(self._seed)
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
            load_rows=partial(_load_rows, self.cache, source, task),
            entry=plan.entry,
            context=context,
            may_be_stored=self.cache is not None and self.cache.may_store(source.key),
        )

    def _load_here(self, plan: Plan) -> Any:
        """Load and collate a whole batch in this process."""
        every = np.ones(len(plan.ids), bool)
        return self._source.load(plan.whole(self._seed).take(every))


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
