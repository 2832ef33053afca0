"""Sizes and times as people read them, and JSON as programs do."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any


def table(
    columns: Mapping[str, str], rows: Sequence[Sequence[str]], drop: Sequence[str] = ()
) -> str:
    """Return lines of as many columns as fit the terminal; into a pipe goes all.

    Args:
        columns: Names, and to which side each is justified: "<" or ">".
        rows: A cell for each column.
        drop: Columns that go where there is too little room, the first one first.
    """
    cells = [tuple(columns), *rows]
    widths = {name: max(map(len, column)) for name, *column in zip(columns, *cells, strict=True)}
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    for name in drop:
        if sum(widths.values()) + 2 * len(widths) > room:
            del widths[name]
    kept = [(i, f"{columns[n]}{widths[n]}") for i, n in enumerate(columns) if n in widths]
    return "\n".join("  ".join(f"{row[i]:{form}}" for i, form in kept).rstrip() for row in cells)


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
