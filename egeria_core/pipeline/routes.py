"""Which rows of a batch go from which rank to which. Pure.

Each rank brings rows of its own; the batch is all of them, those of rank 0 first. A rank that
begins (or ends) a pipeline takes a run of it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["split_sizes"]


def split_sizes(counts: Sequence[int], wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return how many rows each rank sends to each, as `all_to_all_single` takes them.

    Args:
        counts: Rows that each rank brings.
        wanted: First row that each rank takes, and the one behind its last; the same twice: none.

    Returns:
        For each sender, the number of rows for each receiver. A sender's rows go out in their
        order, and arrive in it; receivers are in the order of their runs wherever a sender has
        rows for several.
    """
    sizes, start = [], 0
    for count in counts:
        stop = start + count
        sizes.append([max(0, min(stop, last) - max(start, first)) for first, last in wanted])
        start = stop
    return sizes
