"""Which parts of a batch the prefix is run on, to see any dependence between samples.

A statistic of any kind (a mean, a maximum, a quantile, a count, parity of the size) differs
somewhere between the whole batch, two parts of it, single rows and a repeated row. Where
all samples happen to agree in it, the largest token say, made-up neighbours do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["another", "few_rows", "rest", "take", "with_made_up"]

_FEW = 9
"""Rows of a run that shows what does not depend on their number."""


def another(size: int) -> list[int]:
    """Return other rows than 0..B-1: another number, in another order.

    Rows from B on are made-up samples.
    """
    if size <= 3:
        return [[0, 1], [1, 0, 1, 0], [2, 1]][size - 1]
    return list(range(size - 1, max(size // 2 - 1, size - 1 - _FEW), -1))


def rest(size: int) -> list[int]:
    """Return the rows that `another` leaves; all of a batch of three or fewer.

    Both are reversed: each sample meets another first, last and next one than in the whole.
    """
    return list(range(size)) if size <= 3 else list(range(size - len(another(size))))[::-1]


def few_rows(size: int) -> list[list[int]]:
    """Return single rows, and last of all a repeated one."""
    rows = dict.fromkeys([0, size - 1, size // 2])
    return [*([row] for row in rows if size > 1), [size // 2] * 2]


def with_made_up(size: int) -> list[list[int]]:
    """Return parts that hold made-up samples, in company and alone."""
    a, b, c = size, size + 1, size + 2
    return [[a, 0], [0, b], [b], [0, c, 0], [c]]


def take(leaf: Tensor, rows: list[int], size: int) -> Tensor:
    """Return some rows of a leaf of shape (B, ...), made-up ones included."""
    if max(rows) >= size:
        leaf = torch.cat([leaf, *_made_up(leaf[:1])])
    return leaf[torch.tensor(rows, device=leaf.device)]


def _made_up(row: Tensor) -> list[Tensor]:
    """Return three other samples than this one, of values that a sample may have."""
    if row.dim() < 2 or not row.numel():  # a label, a length: what is possible cannot be known
        return [row] * 3
    rolled = row.roll(1, -1)
    if row.is_floating_point() or row.is_complex():
        return [rolled, -row.flip(-1), 3 * row + 0.5]
    least, most = row.amin().expand_as(row), row.amax().expand_as(row)
    return [rolled, least, most]
