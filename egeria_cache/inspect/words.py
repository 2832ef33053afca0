"""Sizes and times as people read them, and JSON as programs do."""

from __future__ import annotations

import json
import math
import time
from typing import Any

__all__ = ["age", "duration", "print_json", "share", "size"]


def size(num_bytes: float) -> str:
    """Return three digits and a decimal unit: "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Return whole units of the largest that fits; "?" for what is no time."""
    if not seconds >= 0:
        return "?"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def age(since: float) -> str:
    """Return how long ago a time was, given in seconds since the epoch."""
    return duration(time.time() - since)


def share(part: float) -> str:
    """Return a part of 1 in percent."""
    return "-" if math.isnan(part) else f"{100 * part:.0f} %"


def print_json(content: Any) -> None:
    """Write JSON to the standard output."""
    print(json.dumps(content, indent=2))
