"""Batches whose samples depend on their company: loaded whole, and only the front's work is spared.

A collate function may sort its samples, or give leaves that no sample has as its own: labels that
are shifted behind the padding, a tokenizer's objects, negatives drawn from the batch. What the
front reads may be each sample's own all the same. Such a batch is loaded as DataLoader loads it;
each sample is collated alone as well, which shows where it stands and which leaves are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from egeria_cache.batch import (
    Batch,
    Lengths,
    PartEntry,
    SharedRows,
    Structure,
    at_rows,
    flatten,
    row_meta,
)
from egeria_cache.errors import EgeriaError
from egeria_cache.loader.plan import Plan
from egeria_cache.samples import (
    BatchContext,
    Loaded,
    LoaderSource,
    Task,
    find_places,
    own_lengths,
)


@dataclass(slots=True)
class Found:
    """What a batch that was loaded whole consists of."""

    structure: Structure
    order: list[int]
    """Which of the planned samples stands in each row."""
    own: dict[str, Tensor]
    """Leaves in which each row is a sample as it is alone, padded perhaps."""
    mixed: dict[str, Any]
    """The others."""
    lengths: Lengths | None
    is_new: bool
    """Whether less is known of such batches than was believed: what is stored is void."""


def find(
    source: LoaderSource, task: Task, loaded: Loaded, structure: Structure, leaves: dict[str, Any]
) -> Found:
    """Find the samples of a loaded batch in it.

    Raises:
        EgeriaError: No leaf is the samples' own.
    """
    study, alone = source.study, None
    places = loaded.places
    if places is None:
        alone = study.each_alone(task)
        places = find_places(leaves, alone)
    is_new = not places.mixed <= study.mixed
    study.mixed, study.made = study.mixed | places.mixed, study.made | places.made
    own = {
        path: leaf
        for path, leaf in leaves.items()
        if path not in study.mixed and isinstance(leaf, Tensor)
    }
    if not own:
        raise EgeriaError(study.company or "")
    is_new |= study.look_for_padding(task, own)
    if study.why_not is not None:
        raise EgeriaError(study.why_not)
    lengths = None
    if study.padding is not None:
        measured = loaded.lengths
        if alone is not None or loaded.axes != source.axes:
            alone = alone or study.each_alone(task)
            measured = np.array([own_lengths(source.axes, alone[i]) for i in places.order])
        assert measured is not None
        lengths = Lengths(study.padding, measured, study.padding.sizes(own))
        if tuple(measured.max(0).tolist()) != lengths.whole:
            raise EgeriaError(study.company or "")
    mixed = {path: leaf for path, leaf in leaves.items() if path not in own}
    return Found(structure, places.order, own, mixed, lengths, is_new)


def together(source: LoaderSource, plan: Plan, task: Task, found: Found, *, stores: bool) -> Batch:
    """Return the batch, its samples in the order in which they stand."""
    entry, order = plan.entry, found.order
    if entry is not None:
        entry.whole = None if found.lengths is None else found.lengths.whole
    task, lengths = task.at(order), found.lengths
    metas = {
        path: row_meta(leaf) if lengths is None else lengths.padding.row_meta(path, leaf)
        for path, leaf in found.own.items()
    }
    kinds: dict[str, type] = dict.fromkeys(found.own, Tensor)
    is_moved = entry is not None and order != list(range(len(order)))
    return Batch(
        ids=task.ids,
        draws=task.draws,
        loader_name=source.key,
        leaves=found.own,
        load_rows=partial(_load_own, source, task, lengths, tuple(found.own)),
        entry=PartEntry(SharedRows(entry), np.array(order)) if entry and is_moved else entry,
        context=BatchContext(
            source, found.structure, task, metas, kinds, {}, source.fingerprint.age
        ),
        may_be_stored=stores and (entry is None or entry.num_misses > 0),
        lengths=lengths,
        mixed=found.mixed,
        why_mixed=source.study.company or "",
    )


def _load_own(
    source: LoaderSource,
    task: Task,
    lengths: Lengths | None,
    paths: tuple[str, ...],
    rows: np.ndarray,
) -> Mapping[str, Any]:
    """Load some samples again, in the order in which they stand in the batch."""
    loaded = source.measure(task.take(rows))
    assert loaded.places is not None
    leaves = flatten(loaded.data, int(rows.sum()))[1]
    back = np.argsort(loaded.places.order)
    again = {path: at_rows(leaves[path], back) for path in paths}
    return again if lengths is None else lengths.widened(again)
