"""What may be read from a generation now, by whom, and who takes it back.

A `View` is made on the training thread when a cut was found for a loader
(`cache/engine_callbacks.py`), and given up there: retired when newer ones have taken its place,
void when its activations are stale. Reader threads and batches that are under way hold the `View`
itself and ask it whether it is alive right before they use what was read: so that a void reaches
every batch wherever it is, without a lock.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from egeria_cache.batch import Lengths, Padding, Rows, Structure, counting
from egeria_cache.device import runs_late

if TYPE_CHECKING:
    from egeria_cache.prefetch.ring import Ring
    from egeria_cache.skip import Cut
    from egeria_cache.store import Generation

ACTIVATION, KEPT, LENGTHS = "a:", "k:", "lengths"
"""Prefixes of a record's names: activations at the cut, and leaves kept from the loader's batch;
and the name of a padded sample's own lengths, int32."""
PRINT = "#"
"""The path, among those kept, of a print of what the front read of each sample: int64, (B, 1). It
stands in for leaves where samples are loaded in every epoch, and shows that they are the same."""
MAX_LIVE_BOUNDARIES = 2
"""What was stored two moves ago is not read any more: the last move has filled anew from it."""
MAX_LIVE_VIEWS = 16
"""Of one loader: a generation per boundary and shape of its batches."""


@dataclass(eq=False)
class View:
    """One generation as one loader sees it. Compared by identity."""

    loader_name: str
    cut: Cut
    generation: Generation
    structure: Structure
    """Of the loader's batches."""
    rows: Mapping[str, Tensor]
    """Meta tensor of one row of each tensor leaf."""
    kept: Mapping[str, type]
    """Leaves stored beside the activation, so that a hit needs no dataset, and their type."""
    device: torch.device
    """Where the activations are wanted, except for those that `cut.devices` names."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Leaves without rows: their value in every batch."""
    counts: frozenset[str] = frozenset()
    """Those of them that count the samples."""
    ring: Ring | None = None
    """Rows on the device, where they are gathered from there; kept from pass to pass."""
    room_looked_at: float = field(default_factory=time.monotonic, init=False)
    padding: Padding | None = None
    """How the loader pads its samples; stored rows have none of it."""
    is_void: bool = False
    is_outdated: bool = False
    """Whether it is void only because the data are others by now: batches that were given out
    before are what they were."""

    @cached_property
    def is_late(self) -> bool:
        """Whether any of the activations lies on a device that runs behind the host."""
        return any(map(runs_late, (self.device, *self.cut.devices.values())))

    @cached_property
    def has_ring(self) -> bool:
        """Whether rows are gathered from a ring on the device, which has all of them; set to False
        once that had no memory left for one.

        It spares the copy to the device for rows that are still there. On the host it would copy
        each row twice more, and take the interpreter from training: a reader's time for 64 records
        of 9 KiB goes from 2.3 to 1.5 ms without it, and the training thread's 0.2 ms a batch go to
        nothing.
        """
        return runs_late(self.device) and len({self.device, *self.cut.devices.values()}) == 1

    @cached_property
    def growth(self) -> Mapping[str, Any]:
        """How they are padded, of the activations that are."""
        return {} if self.padding is None else self.cut.growth

    @property
    def alive(self) -> bool:
        """Whether its activations may still be served."""
        return not self.is_void and self.generation.alive

    def admits(self, leaves: Mapping[str, Rows]) -> bool:
        """Whether loaded leaves can stand beside stored ones: same paths, same shape of rows."""
        if leaves.keys() != set(self.structure.paths):
            return False
        found: dict[str, Any] = {path: leaves[path] for path in self.rows}
        if self.padding is not None:
            found = {path: self.padding.row_meta(path, leaf) for path, leaf in found.items()}
        return all(row.shape[1:] == found[path].shape[1:] for path, row in self.rows.items())

    def constants_for(self, batch_size: int) -> dict[str, Any]:
        """Return the leaves without rows for a batch of this size, each the caller's own."""
        found = {}
        for path, value in self.constants.items():
            is_count = path in self.counts
            found[path] = counting(value, batch_size) if is_count else copy.copy(value)
        return found

    def contains(self, ids: Sequence[Any], draws: np.ndarray) -> np.ndarray:
        """Which samples are stored, each in one of its draws: bool, shape (B,)."""
        return self.generation.contains(ids, variant=draws) & self.alive


class Views:
    """All views of one cache. Used from the training thread only."""

    def __init__(self) -> None:
        """Begin with nothing to read."""
        self.live: dict[str, list[View]] = {}
        """What each loader's samples may be read from, deepest boundary first; see `of`."""
        self._made: WeakSet[View] = WeakSet()
        """All of them: batches may be planned with one that another has taken the place of."""
        self._process = os.getpid()
        self.num_voided = 0

    def of(self, loader_name: str) -> list[View]:
        """What this loader's samples may be read from now, deepest boundary first: nothing in a
        forked child.
        """
        if os.getpid() != self._process:
            return []
        return list(filter(attrgetter("alive"), self.live.get(loader_name, ())))

    def at(self, loader_name: str, cut: Cut) -> View | None:
        """Where this loader's samples are stored that were captured at a cut, if anywhere."""
        return next((view for view in self.of(loader_name) if view.cut is cut), None)

    def everywhere(self) -> list[View]:
        """What may be read now, of all loaders."""
        return [view for views in self.live.values() for view in views if view.alive]

    def forget(self, loader_name: str) -> None:
        """Drop what a loader may read, without a word on whether it is right."""
        for view in self.live.pop(loader_name, ()):
            self._let_go(view)

    def add(self, view: View) -> None:
        """Read from this one first from now on; the oldest of its loader may have to go."""
        self._made.add(view)
        views = [view, *(old for old in self.of(view.loader_name) if old.cut is not view.cut)]
        boundaries = list(dict.fromkeys(one.cut.boundary for one in views))[:MAX_LIVE_BOUNDARIES]
        kept = [one for one in views if one.cut.boundary in boundaries][:MAX_LIVE_VIEWS]
        for retired in [one for one in views if one not in kept]:
            self._let_go(retired)
            retired.generation.release()
        self.live[view.loader_name] = kept

    def prefer(self, view: View) -> None:
        """Read from this one first from now on: the loop has come back to it."""
        views = self.live.get(view.loader_name, [])
        if view in views:
            self.live[view.loader_name] = [view, *(one for one in views if one is not view)]

    def void(
        self, stale: Callable[[View], bool], *, unlink: bool, is_outdated: bool = False
    ) -> None:
        """Serve nothing from these any more, wherever their batches are by now.

        Args:
            stale: Which.
            unlink: Also forget what is on disk: it is wrong, and not only of another boundary.
            is_outdated: Their data are others by now; batches that were given out go on.
        """
        for view in [view for views in self.live.values() for view in views if stale(view)]:
            for same in [one for one in self._made if one.generation is view.generation]:
                same.is_void |= same.loader_name == view.loader_name or unlink
                same.is_outdated = is_outdated
            self.num_voided += 1
            if os.getpid() != self._process:
                continue  # a forked child: its files' locks may be held for ever
            self._let_go(view)
            if unlink:
                view.generation.void("its activations are stale")
            else:
                view.generation.release()
        for name, views in self.live.items():
            self.live[name] = [view for view in views if not view.is_void]

    def clear(self) -> None:
        """Forget all of them; the store is about to be closed."""
        for name in list(self.live):
            self.forget(name)

    def _let_go(self, view: View) -> None:
        """Free a view's memory on the device, unless another reads from it, too."""
        ring, view.ring = view.ring, None
        others = (one.ring for views in self.live.values() for one in views if one is not view)
        if ring is not None and os.getpid() == self._process and ring not in others:
            ring.close()


def record(
    cut: Cut, activations: Mapping[str, Tensor], kept: Mapping[str, Rows], lengths: Lengths | None
) -> dict[str, Any]:
    """Name a batch of rows as they are stored: without padding, where there is some."""
    if lengths is None:
        return {ACTIVATION + name: rows for name, rows in activations.items()} | {
            KEPT + path: rows for path, rows in kept.items()
        }
    return (
        {ACTIVATION + name: cut.stripped(name, rows, lengths) for name, rows in activations.items()}
        | {KEPT + path: lengths.rows(path, rows) for path, rows in kept.items()}
        | {LENGTHS: torch.from_numpy(lengths.own.astype(np.int32))}
    )
