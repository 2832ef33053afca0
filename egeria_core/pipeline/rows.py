"""Brings the rows of a batch, of which every rank has some, to where a pipeline begins and ends.

Each rank brings rows of its own; the batch is all of them, those of rank 0 first.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from egeria_cache import EgeriaError


def count_rows(
    inputs: Any, targets: Any, frozen: int, group: dist.ProcessGroup, wire: torch.device
) -> tuple[list[int], int]:
    """Ask every rank how many rows it brings.

    Returns:
        Rows of each rank, and a number for the structure, shapes and types of a row: the same on
        all ranks.

    Raises:
        EgeriaError: They cannot be put into one batch, or the ranks have frozen differently.
    """
    kind, number = _kind((inputs, targets))
    mine = torch.tensor([number, kind, frozen], dtype=torch.int64, device=wire)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    ranks: list[list[int]] = torch.stack(table).tolist()
    for what, column in (("rows of another shape, type or structure", 1), ("frozen blocks", 2)):
        values = [row[column] for row in ranks]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise EgeriaError(
                f"rank {other} differs from rank 0 in its {what}; all ranks must bring rows that "
                "fit into one batch (pad them to one length), at the same step"
            )
    rows = [row[0] for row in ranks]
    if -1 in rows:
        raise EgeriaError(
            f"rank {rows.index(-1)} brings inputs and targets of different numbers of rows, or "
            "something other than tensors"
        )
    if not sum(rows):
        raise EgeriaError("no rank brings any rows")
    return rows, ranks[0][1]


def route(
    tree: Any,
    counts: Sequence[int],
    to: int,
    group: dist.ProcessGroup,
    wire: torch.device,
    device: torch.device,
) -> Any:
    """Send all rows to one rank; return them there, and none elsewhere.

    Args:
        tree: Tensors, shape (rows of this rank, ...).
        counts: Rows of each rank.
        to: The rank that takes them.
        group: All ranks of the pipeline.
        wire: Where the group's messages lie.
        device: Where the result is wanted.
    """
    rank = dist.get_rank(group)
    sent = [counts[rank] if other == to else 0 for other in range(len(counts))]
    received = list(counts) if rank == to else [0] * len(counts)
    leaves, spec = tree_flatten(tree)
    found = []
    for leaf in leaves:
        # As bytes: not every backend knows every type.
        width = math.prod(leaf.shape[1:])
        rows = leaf.detach().to(wire).reshape(len(leaf), width).contiguous().view(torch.uint8)
        taken = torch.empty(sum(received), rows.shape[1], dtype=torch.uint8, device=wire)
        dist.all_to_all_single(taken, rows, received, sent, group=group)
        found.append(taken.view(leaf.dtype).reshape(len(taken), *leaf.shape[1:]).to(device))
    return tree_unflatten(found, spec)


def _kind(tree: Any) -> tuple[int, int]:
    """Return a number for the kind of a row, and how many rows there are; -1 if that is unclear."""
    leaves, spec = tree_flatten(tree)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return 0, -1
    told = [str(spec), *(f"{tuple(leaf.shape[1:])} {leaf.dtype}" for leaf in leaves)]
    numbers = {leaf.shape[0] for leaf in leaves}
    return zlib.crc32("; ".join(told).encode()), numbers.pop() if len(numbers) == 1 else -1
