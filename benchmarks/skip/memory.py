"""What the engine needs of a cache, in memory: every batch is a hit, and costs no reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from egeria_cache.batch import Batch, BatchTensor, without_data
from egeria_cache.errors import BoundaryError
from egeria_cache.skip import Cut

__all__ = ["MemoryEntry", "MemoryHost", "make_batch"]


class MemoryEntry:
    """All rows of a batch are hits, already in memory."""

    def __init__(self, cut: Cut, rows: dict[str, Tensor], size: int) -> None:
        self.cut = cut
        self.hit = np.ones(size, bool)
        self.alive = self.was_used = True
        self._rows = rows

    def load(self) -> dict[str, Tensor]:
        """Return the stored rows."""
        return self._rows


class MemoryHost:
    """Keeps the last captured rows."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}

    def cut_found(self, batch: Batch, cut: Cut) -> None:
        """Nothing to open."""

    def captured(
        self, batch: Batch, cut: Cut, rows: np.ndarray | None, tensors: dict[str, Tensor]
    ) -> None:
        """Remember the rows."""
        self.rows = {name: tensor.clone() for name, tensor in tensors.items()}

    def entry_at(self, batch: Batch, cut: object) -> None:
        """Every batch is planned for one cut."""

    def called(self) -> None:
        """Nothing is counted."""

    def audited(self, batch: Batch, entry: object) -> None:
        """Audit nothing."""

    def audit_leaves(self, batch: Batch, rows: np.ndarray, loaded: object) -> bool:
        """Not called: nothing is audited."""
        return True

    def audit_failed(self, batch: Batch, rows: np.ndarray, finding: str) -> bool:
        """Not called: nothing is audited."""
        return False

    def prefix_changed(self, reason: str, *, unlink: bool = False) -> None:
        """Cannot happen here."""
        raise RuntimeError(reason)

    def unproved(self, reason: str) -> None:
        """Nothing here is padded."""

    def refused(self, error: BoundaryError, *, at_first: bool = False) -> None:
        """Cannot happen here."""
        raise error

    def failed(self, error: Exception, batch: Batch | None = None) -> None:
        """Nothing fails here."""
        raise error

    def postpones(self, batch: Batch) -> None:
        """Nothing is postponed."""

    is_idle = False
    """Nothing waits for a proof."""

    @property
    def idle(self) -> Mapping[str, str]:
        """Nothing is postponed."""
        return {}

    def is_refused(self) -> bool:
        """Whether what loaders give cannot be cached."""
        return False

    def timed(self, batch: Batch, front_s: float, forward_s: float) -> None:
        """Nothing is measured here."""

    def thawed(self, name: str, cut: str | None) -> None:
        """No part of the prefix is ever trained."""
        raise AssertionError(name)

    def uncached(self, reason: str, remedy: str) -> None:
        """Every batch knows its samples."""
        raise AssertionError(reason)

    def note(self, kind: str, seconds: float) -> None:
        """Not measured here."""


def make_batch(x: Tensor, entry: MemoryEntry | None = None) -> BatchTensor:
    """Tag a batch; with an entry it has no data."""
    leaves: dict[str, Any] = {"x": x if entry is None else x[:0]}
    batch = Batch(
        ids=range(len(x)), draws=np.zeros(len(x), np.int64), loader_name="train", leaves=leaves,
        load_rows=lambda mask: {"x": x}, planned_entry=entry,
    )  # fmt: skip
    if entry is None:
        return BatchTensor.wrap(x, batch, "x")
    return without_data(x.to("meta"), batch, "x")
