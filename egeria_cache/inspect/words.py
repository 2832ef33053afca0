"""Sizes and times as people read them, and JSON as programs do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["age", "duration", "plain", "print_json", "share", "size"]


def size(num_bytes: float) -> str:
    """Return three digits and a decimal unit: "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Return whole units of the largest that fits; "?" for what is no time."""
    if not 0 <= seconds < math.inf:
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


def plain(text: object) -> str:
    """Return a text without what a terminal would obey: of a damaged file, anything may come."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in str(text))


def print_json(content: Any) -> None:
    """Write JSON to the standard output; a number that JSON has no word for is null."""
    print(json.dumps(_finite(content), indent=2, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(name): _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
