"""Sizes and times as people read them, and JSON as programs do."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_PIPE_COLUMNS = 10_000
"""A pipe has no width: nothing is folded or cut there."""


def console() -> Console:
    """Return what prints to the standard output: as wide as its terminal, or as it takes."""
    made = Console(highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPE_COLUMNS
    return made


def progress_bar(*, quiet: bool) -> Progress:
    """Return what shows on a terminal how far something has come; elsewhere nothing."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
    )


def fitting(
    out: Console,
    columns: Mapping[str, JustifyMethod],
    rows: Sequence[Sequence[str | Text]],
    drop: Sequence[str],
) -> Table:
    """Return a table of as many columns as fit.

    Args:
        out: What it is for.
        columns: Names, and to which side each is justified.
        rows: A cell for each column.
        drop: Columns that go where there is too little room, the first one first.
    """
    dropped: set[str] = set()
    wide = out.options.update(width=_PIPE_COLUMNS)
    while True:
        table = Table(box=None, header_style="bold")
        kept = [index for index, name in enumerate(columns) if name not in dropped]
        for name, justify in columns.items():
            if name not in dropped:
                table.add_column(name, justify=justify)
        for row in rows:
            table.add_row(*(row[index] for index in kept))
        if len(dropped) == len(drop) or out.measure(table, options=wide).maximum <= out.width:
            return table
        dropped.add(drop[len(dropped)])


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
