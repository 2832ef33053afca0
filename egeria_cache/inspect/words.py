"""Sizes and times as people read them, and JSON as programs do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any


def table(columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of columns.

    Args:
        columns: Names, and to which side each is justified: "<" or ">".
        rows: A cell for each column.
    """
    cells = [tuple(columns), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(columns.values(), widths, strict=True)]
    lines = (zip(row, forms, strict=True) for row in cells)
    return "\n".join("  ".join(f"{one:{form}}" for one, form in line).rstrip() for line in lines)


def age(since: float) -> str:
    """Return how long ago a time was, given in seconds since the epoch, in whole units of the
    largest that fits; "?" for what is no time.
    """
    seconds = time.time() - since
    if not 0 <= seconds < math.inf:
        return "?"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def plain(text: object) -> str:
    """Return a text without what a terminal would obey: of a damaged file, anything may come."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in str(text))


def print_json(content: Any) -> None:
    """Write JSON to the standard output; a number that JSON has no word for is null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=2))
