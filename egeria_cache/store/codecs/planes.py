"""Numbers -> planes of their bytes; the kernel joins them again. Pure.

The low planes are the mantissa's noise, so they are cut coarsely: fewer passes, and nothing lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GROUPS", "Bytes", "Elements", "cut", "numbers_of"]

Bytes = npt.NDArray[np.uint8]

Elements = tuple[int, bool]
"""Width of one element in bytes, and whether it is a floating-point number."""

GROUPS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((1, 0),),
    2: ((1, 0), (1, 8)),
    4: ((2, 0), (1, 16), (1, 24)),
    8: ((4, 0), (2, 32), (1, 48), (1, 56)),
}
"""Per element width: (bytes, bit position) of the planes, lowest first."""


def numbers_of(data: Bytes, width: int) -> npt.NDArray[Any]:
    """View bytes as unsigned numbers."""
    return data.view(f"<u{width}")


def cut(numbers: npt.NDArray[Any], elements: Elements) -> list[npt.NDArray[Any]]:
    """Return the planes, lowest first, each of the shape of `numbers`."""
    width, floating = elements
    if floating:  # sign to the lowest bit: the exponent then fills the highest plane alone
        numbers = (numbers << 1) | (numbers >> (8 * width - 1))
    return [(numbers >> position).astype(f"<u{size}") for size, position in GROUPS[width]]
