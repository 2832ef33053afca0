"""What a cache has done so far, as counts."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from egeria_cache.gate.policy import ServingPolicy
from egeria_cache.gate.stats import CacheStats
from egeria_cache.prefetch import Views
from egeria_cache.store import ActivationStore

log = logging.getLogger("egeria")

_CLOSED = (
    "the cache is closed, and its loader goes on without it: train inside `with "
    "ActivationCache(...) as cache:`, or close the cache when all epochs are done"
)
MAX_UNSEEN = 3
"""Batches that may be yielded without the model having been called, before that is said."""


class Accounts:
    """Keeps one cache's counts. Used from the training thread."""

    def __init__(self) -> None:
        """Start at zero."""
        self.counts = CacheStats()
        self._given: deque[weakref.ref[Any]] = deque(maxlen=16)
        """Batches that were given out last, and the model was not called yet."""
        self._num_unseen = 0
        self._stepped: deque[bool] = deque(maxlen=1)
        """Not empty if an optimizer has stepped since: this is no pass for statistics."""
        self._steps: RemovableHandle | None = None
        self._told_unseen = ""
        self._next_look = 16

    def batch(self, num_samples: int, hit: np.ndarray | None, *, is_random: bool = False) -> None:
        """Note what a batch consists of: yielded without hits, or served with some."""
        num_hits = 0 if hit is None else int(np.count_nonzero(hit))
        self.counts.hits += num_hits
        self.counts.misses += num_samples - num_hits
        self.counts.random_samples += num_samples if is_random else 0
        self.counts.fresh_samples += num_samples - num_hits if is_random else 0
        self.counts.hit_batches += num_hits == num_samples
        self.counts.miss_batches += num_hits == 0
        self.counts.partial_batches += 0 < num_hits < num_samples

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count nothing of what happens inside the block as hits and misses of training."""
        names = (
            "hits", "misses", "hit_batches", "partial_batches", "miss_batches", "refetched",
            "random_samples", "fresh_samples",
        )  # fmt: skip
        before = {name: getattr(self.counts, name) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.counts, name, value)

    def yielded(self, batch: Any) -> None:
        """Note that a batch was yielded which the model should see, if something is trained.

        Others are for an average of it, or to be looked at: no optimizer steps between them.
        Trainers collect batches before they use any: what counts is those that are gone.
        """
        self._given.append(weakref.ref(batch))
        if len(self._given) == 2 and self._steps is None:
            stepped = self._stepped  # and not `self`: the hook is the process's
            self._steps = register_optimizer_step_post_hook(lambda *_: stepped.append(True))
            weakref.finalize(self, self._steps.remove)
        if len(self._given) < MAX_UNSEEN:
            return
        self._num_unseen += 1
        if self._num_unseen == self._next_look:  # a cycle's parts are there until it is looked for
            self._next_look *= 2
            gc.collect()
        num_gone = sum(one() is None for one in self._given)
        if num_gone >= MAX_UNSEEN and self._stepped and self.counts.why_not is None:
            self.counts.why_not = self._told_unseen = (
                f"{num_gone} batches were yielded and the model was not called with any of them, "
                "so nothing is cached. Does the loop call a part of it (`self.net(x)`)? Make the "
                "cache of that part. Is the whole model compiled? Compile its blocks instead "
                "(block.compile()), and give it the loader's batches as they come"
            )
            log.warning(self.counts.why_not)

    def yielded_closed(self) -> None:
        """Note that a batch was yielded after the cache was closed."""
        if self.counts.why_not != _CLOSED:
            self.counts.why_not = _CLOSED
            log.warning(_CLOSED)

    def model_called(self) -> None:
        """Note that the model was called with a batch."""
        self._given.clear()
        if self._steps is not None:
            self._steps.remove()
            self._steps = None
            self._stepped.clear()
        if self._told_unseen and self.counts.why_not == self._told_unseen:
            self.counts.why_not = None

    def stats(
        self,
        store: ActivationStore | None,
        views: Views,
        policy: ServingPolicy,
        boundary: str | None,
    ) -> CacheStats:
        """Return all figures as they are now; without a store, a forked child's."""
        if store is None:
            why = "this is a forked child of the process that made the cache; call cache.reopen()"
            return replace(self.counts, boundary=boundary, voided=views.num_voided, why_not=why)
        on_disk, (raw_bytes, stored_bytes) = store.stats(), views.retired_bytes
        return replace(
            self.counts,
            boundary=boundary,
            voided=views.num_voided,
            dropped_writes=on_disk.dropped_writes,
            corrupt=on_disk.corrupt,
            num_samples=on_disk.num_samples,
            bytes_on_disk=on_disk.bytes_on_disk,
            raw_bytes=on_disk.raw_bytes + raw_bytes,
            stored_bytes=on_disk.stored_bytes + stored_bytes,
            limit_bytes=on_disk.limit_bytes,
            saved_s=policy.saved_s,
            proof_s=policy.proof_s,
            gate=policy.sentence(boundary),
        )
