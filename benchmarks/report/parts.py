"""What a results file is turned into, before it becomes HTML or Markdown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Report", "Section", "Table", "as_fast", "bytes_", "number", "percent", "ratio", "seconds",
    "verdict",
]  # fmt: skip

Report = dict[str, Any]
Row = list[str]


@dataclass(kw_only=True)
class Table:
    """Cells as text; the first column names the rows."""

    title: str
    columns: list[str]
    rows: list[Row]
    short: bool = False
    """Whether README shows it."""


@dataclass(kw_only=True)
class Section:
    """One results file."""

    name: str
    title: str
    about: str
    """What was measured, in a sentence or two."""
    tables: list[Table] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """Targets and what was measured, in words; README shows the first few."""
    environment: dict[str, Any] = field(default_factory=dict)
    short: bool = False
    """Whether README has this section."""


def number(value: Any, digits: int = 3, unit: str = "") -> str:
    """Write a number with so many significant digits; "-" where there is none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}{unit}"
    if isinstance(value, float):
        if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
            return f"{value:.{digits - 1}e}{unit}"
        whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
        return f"{value:,.{max(0, digits - whole)}f}{unit}"
    return str(value)


def ratio(value: float | None) -> str:
    """Write a factor, such as 1.05x."""
    return "-" if value is None else f"{value:.2f}x"


def as_fast(slower: float | None) -> str:
    """Write a quotient of times the way all of them are shown: 2x takes half as long."""
    return ratio(None if slower is None else 1 / slower)


def percent(value: float | None, digits: int = 1) -> str:
    """Write a part as per cent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Write a time in its natural unit."""
    if value is None:
        return "-"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{number(value * factor)} {unit}"
    return f"{number(value * 1e6)} us"


def bytes_(value: float | None) -> str:
    """Write a size in powers of ten."""
    if value is None:
        return "-"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{number(value / factor)} {unit}"
    return f"{number(float(value))} B"


def verdict(
    what: str,
    measured: float,
    *,
    most: float | None = None,
    least: float | None = None,
    unit: str = "x",
    where: str = "",
) -> str:
    """Say in words whether a target, `most` or `least`, was met; a factor has a least."""
    bound = most if most is not None else least
    assert bound is not None
    met = measured <= bound if most is not None else measured >= bound
    limit = f"at {'most' if most is not None else 'least'} {bound:.3g}{unit}"
    # A digit more than the bound has, so that 1.051 does not look like 1.05.
    text = f"{measured:.3f}{unit}" + (f" ({where})" if where else "")
    return f"{what}: target {limit}, measured {text}: {'met' if met else '**missed**'}."
