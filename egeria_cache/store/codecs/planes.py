"""Numbers <-> planes of their bytes, and zeros <-> a bitmap; for many records at once. Pure.

The low planes are the mantissa's noise, so they are cut coarsely: fewer passes, and nothing lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from egeria_cache.store.codecs.gather import Bytes, Scratch

__all__ = ["GROUPS", "Elements", "cut", "expand", "join", "numbers_of", "rank"]

Elements = tuple[int, bool]
"""Width of one element in bytes, and whether it is a floating-point number."""

GROUPS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((1, 0),),
    2: ((1, 0), (1, 8)),
    4: ((2, 0), (1, 16), (1, 24)),
    8: ((4, 0), (2, 32), (1, 48), (1, 56)),
}
"""Per element width: (bytes, bit position) of the planes, lowest first."""

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def numbers_of(data: Bytes, width: int) -> npt.NDArray[Any]:
    """View bytes as unsigned numbers."""
    return data.view(f"<u{width}")


def cut(numbers: npt.NDArray[Any], elements: Elements) -> list[npt.NDArray[Any]]:
    """Return the planes, lowest first, each of the shape of `numbers`."""
    width, floating = elements
    if floating:  # sign to the lowest bit: the exponent then fills the highest plane alone
        numbers = (numbers << 1) | (numbers >> (8 * width - 1))
    return [(numbers >> position).astype(f"<u{size}") for size, position in GROUPS[width]]


def join(
    planes: Sequence[Bytes], out: npt.NDArray[Any], elements: Elements, scratch: Scratch
) -> None:
    """Undo `cut`: fill `out` (1-d) from the bytes of its planes."""
    width, floating = elements
    groups = GROUPS[width]
    whole = [plane.view(f"<u{size}") for plane, (size, _) in zip(planes, groups, strict=True)]
    joined: npt.NDArray[Any] = whole[-1]
    for lower, (size, _) in zip(whole[-2::-1], groups[-2::-1], strict=True):
        # Twice as wide at each step, so that the first passes are over few bytes.
        wide = (
            out if 2 * size == width else scratch.array(f"u{2 * size}", len(out), f"<u{2 * size}")
        )
        np.left_shift(joined, 8 * size, out=wide, dtype=wide.dtype)
        np.bitwise_or(wide, lower, out=wide)
        joined = wide
    if joined is not out:
        out[:] = joined
    if not floating:
        return
    if not int(np.bitwise_or.reduce(whole[0])) & 1:  # no sign at all, as behind a ReLU
        np.right_shift(out, 1, out=out)
        return
    signs = scratch.array("signs", len(out), out.dtype)
    np.left_shift(out, 8 * width - 1, out=signs)
    np.right_shift(out, 1, out=out)
    np.bitwise_or(out, signs, out=out)


def rank(
    bitmaps: Bytes, num_elements: int, scratch: Scratch
) -> tuple[npt.NDArray[np.signedinteger[Any]], npt.NDArray[np.int64]]:
    """Number the marked elements of all bitmaps (N, bytes) together, from 1.

    Returns:
        The numbers, 0 where not marked, shape (N * num_elements,), and how many are marked in each
        bitmap, shape (N,).
    """
    if num_elements % 8:
        marks = np.unpackbits(bitmaps, axis=1, count=num_elements).reshape(-1)
    else:
        marks = np.unpackbits(bitmaps.reshape(-1))
    dtype = np.int32 if len(marks) < 2**31 else np.int64
    # Of one dtype: while it converts in a running sum, NumPy keeps the GIL.
    wide = scratch.array("marks", len(marks), dtype)
    ranks = scratch.array("ranks", len(marks), dtype)
    wide[:] = marks
    np.cumsum(wide, out=ranks)
    counts = np.diff(ranks[num_elements - 1 :: num_elements], prepend=0)
    np.multiply(ranks, wide, out=ranks)
    return ranks, counts


def expand(
    ranks: npt.NDArray[np.signedinteger[Any]], values: npt.NDArray[Any], out: npt.NDArray[Any]
) -> None:
    """Fill `out` (1-d): the n-th of the values where a rank is n. The value of rank 0 is a zero."""
    signed = _SIGNED[out.dtype.itemsize]
    # Three times as fast as NumPy's take, and bounds checked like it.
    torch.index_select(
        torch.from_numpy(values.view(signed)),
        0,
        torch.from_numpy(ranks),
        out=torch.from_numpy(out.view(signed)),
    )
