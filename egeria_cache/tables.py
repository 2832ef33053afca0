"""Lines and sizes for people."""

from __future__ import annotations

from collections.abc import Mapping


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
