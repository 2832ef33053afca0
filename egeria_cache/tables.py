"""Lines and sizes for people, and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

PAGE_BYTES = 4096
"""Files are counted in whole pages, as the disk does."""

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def as_text(lines: Mapping[str, str]) -> str:
    """Return names and values in two columns."""
    width = max(map(len, lines), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def size(num_bytes: float) -> str:
    """Return three digits and a decimal unit: "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def parse_size(size: int | str) -> int:
    """Return a positive number of bytes from 100_000 or "100GB", "1.5 GiB".

    Raises:
        TypeError: It is neither a number nor text.
        ValueError: The text is no size, or the size is not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{size!r} is not a size; write bytes, or a text like '100GB' or '8GiB'"
            )
        size = int(float(match[1].replace("_", "")) * _UNITS[match[2].lower()])
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"the size limit is bytes, or a text like '100GB'; got {size!r}")
    if size <= 0:
        raise ValueError(f"the size limit must be positive, got {size}")
    return int(size)
