"""What one loader may read from one generation, and how its batches look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.batch import Rows, Structure

if TYPE_CHECKING:
    from egeria_cache.skip import Cut
    from egeria_cache.store import Generation

__all__ = ["ACTIVATION", "KEPT", "View", "record"]

ACTIVATION, KEPT = "a:", "k:"
"""Prefixes of a record's names: activations at the cut, and leaves kept from the loader's batch."""


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
    dropped: tuple[str, ...]
    """Leaves that a hit has no data for."""
    kept: Mapping[str, type]
    """Leaves stored beside the activation, so that a hit needs no dataset, and their type."""
    device: torch.device
    """Where the activations are wanted."""
    is_void: bool = False
    is_checked: bool = False
    """Whether rows that were found in it have been compared with computed ones."""

    @property
    def alive(self) -> bool:
        """Whether its activations may still be served."""
        return not self.is_void and self.generation.alive

    @property
    def readable(self) -> bool:
        """Whether the store itself still answers (it stops after trouble with the disk)."""
        return self.generation.alive

    def admits(self, leaves: Mapping[str, Rows]) -> bool:
        """Whether loaded leaves can stand beside stored ones: same paths, same shape of rows."""
        return leaves.keys() == set(self.structure.paths) and all(
            row.shape[1:] == leaves[path].shape[1:]  # type: ignore[union-attr]
            for path, row in self.rows.items()
        )

    def contains(self, ids: Sequence[Any], variant: int) -> np.ndarray:
        """Which samples are stored: bool, shape (B,)."""
        if not self.alive:
            return np.zeros(len(ids), dtype=bool)
        return self.generation.contains(ids, variant=variant)


def record(activations: Mapping[str, Tensor], kept: Mapping[str, Rows]) -> dict[str, Any]:
    """Name a batch of rows as they are stored."""
    return {ACTIVATION + name: rows for name, rows in activations.items()} | {
        KEPT + path: rows for path, rows in kept.items()
    }
