"""Lines and sizes for people, and sizes as people write them."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

PAGE_BYTES = 4096
"""Files are counted in whole pages, as the disk does."""


def end_with_reader() -> None:
    """Have this program end when whoever reads its output has seen enough."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


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
        match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*(?:([kmgt]?)(i?)b)?\s*", size.lower())
        if match is None:
            raise ValueError(
                f"{size!r} is not a size; write bytes, or a text like '100GB' or '8GiB'"
            )
        number, unit, is_binary = match.groups()
        power = " kmgt".index(unit or " ")
        size = int(float(number.replace("_", "")) * (1024 if is_binary else 1000) ** power)
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"the size limit is bytes, or a text like '100GB'; got {size!r}")
    if size <= 0:
        raise ValueError(f"the size limit must be positive, got {size}")
    return int(size)
