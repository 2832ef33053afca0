"""Loaders that somebody else rebuilds from their attributes, around another batch sampler.

A library that shards or skips batches makes a new `DataLoader` of a loader's data set, its options
and a batch sampler that wraps the loader's own. Whose it was is known by that sampler.
"""

from __future__ import annotations

import weakref
from typing import Any

_LOADERS: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""Batch sampler -> the loaders that draw from it, the latest last."""


def note(loader: Any) -> None:
    """Remember an `EgeriaLoader` by its batch sampler."""
    try:
        known = _LOADERS.setdefault(loader.batch_sampler, [])
    except TypeError:  # it cannot be referred to weakly, or has no hash
        return
    known[:] = [*(ref for ref in known if ref() is not None), weakref.ref(loader)]


def original_of(batch_sampler: Any, dataset: Any, collate_fn: Any) -> Any:
    """Return the `EgeriaLoader` that another is made from, told by its parts; None if none."""
    while batch_sampler is not None:
        try:
            loaders = [ref() for ref in _LOADERS.get(batch_sampler, ())]
        except TypeError:
            loaders = []
        for loader in reversed(loaders):
            if loader is None or loader.dataset is not dataset:
                continue
            if loader.collate_fn is collate_fn:
                return loader
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)
    return None
