"""How long padded samples are, and what padding them to the longest would take, in words."""

from __future__ import annotations

from collections.abc import Sequence

from egeria_cache.inspect.words import size
from egeria_cache.store import Contents, Spread

__all__ = ["length_words", "sample_words"]


def sample_words(inside: Contents) -> list[str]:
    """Return how large the samples of a generation are."""
    own = inside.tensor_bytes
    if own is None:
        return []
    if own.least == own.most:
        return [f"{size(own.most)} each"]
    lines = [
        f"{size(own.least)} at least, median {size(own.median)}, nine in ten up to "
        f"{size(own.p90)}, {size(own.most)} at most"
    ]
    if inside.numbers and own.total:
        ratio = inside.largest_bytes / own.total
        lines.append(
            f"{size(own.total)} in all; padded to the longest: {size(inside.largest_bytes)}, "
            f"{ratio:.2f} times as many"
        )
    return lines


def length_words(inside: Contents) -> list[str]:
    """Return how long the samples are, along all axes that differ; none if nothing is padded."""
    return [
        f"axis {_numbered(axes)}: {one.least:,} at least, median {one.median:,.10g}, nine in ten "
        f"up to {one.p90:,.10g}, {one.most:,} at most; {one.total:,} tokens"
        for one, axes in _distinct(inside.numbers).items()
    ]


def _distinct(numbers: Sequence[Spread]) -> dict[Spread, list[int]]:
    """Return which axes are alike: a mask is as long as its words."""
    found: dict[Spread, list[int]] = {}
    for axis, one in enumerate(numbers):
        found.setdefault(one, []).append(axis)
    return found


def _numbered(axes: Sequence[int]) -> str:
    return ", ".join(map(str, axes))
