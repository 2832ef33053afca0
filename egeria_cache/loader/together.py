"""Batches whose samples depend on their company: loaded whole, and only the front's work is spared.

A collate function may sort its samples, or give leaves that no sample has as its own: labels that
are shifted behind the padding, a tokenizer's objects, negatives drawn from the batch. What the
front reads may be each sample's own all the same. Such a batch is loaded as DataLoader loads it;
each sample is collated alone as well, which shows where it stands and which leaves are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from egeria_cache.batch import Lengths, at_rows, flatten
from egeria_cache.errors import EgeriaError
from egeria_cache.samples import Loaded, LoaderSource, Task, find_places, own_lengths


@dataclass(slots=True)
class Found:
    """What a batch that was loaded whole consists of."""

    order: list[int]
    """Which of the planned samples stands in each row."""
    own: dict[str, Tensor]
    """Leaves in which each row is a sample as it is alone, padded perhaps."""
    mixed: dict[str, Any]
    """The others."""
    lengths: Lengths | None
    is_new: bool
    """Whether less is known of such batches than was believed: what is stored is void."""


def find(source: LoaderSource, task: Task, loaded: Loaded, leaves: dict[str, Any]) -> Found:
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
    return Found(places.order, own, mixed, lengths, is_new)


def load_own(
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
