"""What a cache has done so far: counts, time saved, and whether skipping pays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from egeria_cache.gate.ledger import Ledger
from egeria_cache.gate.stats import CacheStats
from egeria_cache.prefetch import PlannedEntry, View
from egeria_cache.store import ActivationStore

__all__ = ["Accounts"]

log = logging.getLogger("egeria")

MAX_UNSEEN = 64
"""Batches that may be yielded without the model having been called, before that is said."""


class Accounts:
    """Keeps one cache's figures. Used from the training thread."""

    def __init__(self) -> None:
        """Start at zero."""
        self.counts = CacheStats()
        self.gated: dict[str, str] = {}
        """Loaders for which skipping did not pay under this boundary, and why."""
        self._ledgers: dict[tuple[str, str, str], Ledger] = {}
        self._retired_bytes = [0, 0]
        self._num_unseen = 0

    def batch(self, num_samples: int, hit: np.ndarray | None) -> None:
        """Note what a batch consists of: yielded without hits, or served with some."""
        num_hits = 0 if hit is None else int(hit.sum())
        self.counts.hits += num_hits
        self.counts.misses += num_samples - num_hits
        self.counts.hit_batches += num_hits == num_samples
        self.counts.miss_batches += num_hits == 0
        self.counts.partial_batches += 0 < num_hits < num_samples

    def yielded(self) -> None:
        """Note that a batch was yielded which the model should see."""
        self._num_unseen += 1
        if self._num_unseen == MAX_UNSEEN:
            log.warning(
                "%d batches were yielded and the model was not called with any of them, so nothing "
                "is cached. Is the whole model compiled? Compile its blocks instead "
                "(block.compile()), and give it the loader's batches as they come",
                MAX_UNSEEN,
            )

    def model_called(self) -> None:
        """Note that the model was called with a batch."""
        self._num_unseen = 0

    def step(
        self,
        view: View,
        boundary: str,
        frozen: str,
        seconds: float,
        num_samples: int,
        entry: PlannedEntry | None,
        is_control: bool,
    ) -> str | None:
        """Note what a whole training step cost; say why skipping does not pay, if so.

        Args:
            view: Where the loader's batches enter now.
            boundary: The boundary as the user named it.
            frozen: The last frozen module, as the model names it.
            seconds: From one request for a batch to the next.
            num_samples: Of the batch.
            entry: Its hits; None if it was computed whole.
            is_control: It could have been served.
        """
        at_frozen = self._ledger(view.loader_name, boundary, frozen)
        ledger = self._ledger(view.loader_name, boundary, view.cut.boundary)
        if ledger is not at_frozen and not ledger.has_computed:
            ledger.inherit(at_frozen)
        if entry is None:
            ledger.computed(seconds, num_samples, is_control=is_control)
        elif entry.view is view and entry.hit.all():
            ledger.served(seconds, num_samples)
        pays, why = ledger.verdict
        if not pays:
            return why
        return ledger.worse_than(at_frozen) if ledger is not at_frozen else None

    def wants_control(self, view: View, boundary: str) -> bool:
        """Whether a batch that this view could serve whole should be computed, for comparison."""
        return self._ledger(view.loader_name, boundary, view.cut.boundary).wants_control()

    def was_served(self, view: View, boundary: str) -> bool:
        """Whether enough whole steps were served from this view's cut to know what they cost."""
        return self._ledger(view.loader_name, boundary, view.cut.boundary).is_served_enough

    def _ledger(self, loader_name: str, boundary: str, cut: str) -> Ledger:
        return self._ledgers.setdefault((loader_name, boundary, cut), Ledger())

    def retire(self, view: View) -> None:
        """Keep the size of what a view held, now that it is given up."""
        self._retired_bytes[0] += view.generation.raw_bytes
        self._retired_bytes[1] += view.generation.stored_bytes

    def stats(self, store: ActivationStore, boundary: str | None, gate: str = "") -> CacheStats:
        """Return all figures as they are now."""
        on_disk = store.stats()
        decisions: Sequence[str] = [
            f"{name.rpartition('#')[0]!r} at {cut!r}: {self.gated.get(name) or ledger.verdict[1]}"
            for (name, at, cut), ledger in self._ledgers.items()
            if at == boundary and ledger.has_any
        ]
        return replace(
            self.counts,
            boundary=boundary,
            dropped_writes=on_disk.dropped_writes,
            corrupt=on_disk.corrupt,
            num_samples=on_disk.num_samples,
            bytes_on_disk=on_disk.bytes_on_disk,
            raw_bytes=on_disk.raw_bytes + self._retired_bytes[0],
            stored_bytes=on_disk.stored_bytes + self._retired_bytes[1],
            limit_bytes=on_disk.limit_bytes,
            saved_s=sum(ledger.saved_s for ledger in self._ledgers.values()),
            gate="; ".join(filter(None, (gate, *decisions))),
        )
