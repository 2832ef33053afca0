"""Which parts of a batch the prefix is run on, to see any dependence between samples.

A statistic of any kind (a mean, a maximum, a quantile, a count, parity of the size) differs
somewhere between the whole batch, two halves, single rows, a repeated row and another order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["another", "others", "take"]

_NUM_MADE_UP = 3


def another(size: int) -> list[int]:
    """Return other rows than 0..B-1: another number, in another order.

    Rows from B on are made-up neighbours of a sample that is alone in its batch.
    """
    if size == 1:
        return [0, 1]
    return [1, 0, 1] if size == 2 else list(range(size - 1, 0, -1))


def others(size: int) -> Iterator[list[int]]:
    """Yield further parts, each another than the whole batch."""
    if size == 1:
        yield from ([1, 0], [2, 0], [0, 3, 0], [1], [3], [0, 0])
        return
    half = size // 2
    parts = [list(range(half)), list(range(half, size)), [0], [size - 1], [half], [half, half]]
    for i, part in enumerate(parts):
        if part not in parts[:i]:
            yield part


def take(leaf: Tensor, rows: list[int], size: int) -> Tensor:
    """Return some rows of a leaf of shape (B, ...), made-up ones included."""
    if size == 1 and max(rows) > 0:
        leaf = torch.cat([leaf, *_made_up(leaf)])
    return leaf[torch.tensor(rows, device=leaf.device)]


def _made_up(leaf: Tensor) -> list[Tensor]:
    """Return other samples than the one there is, of values that a sample may have."""
    if leaf.dim() < 2:  # a label, a length: what is possible cannot be known
        return [leaf] * _NUM_MADE_UP
    rolled, flipped = leaf.roll(1, -1), leaf.flip(-1)
    if leaf.is_floating_point() or leaf.is_complex():
        return [rolled, -flipped, 3 * leaf + 0.5]
    return [rolled, flipped, leaf.roll(leaf.shape[-1] // 2, -1)]
