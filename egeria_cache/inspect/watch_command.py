"""`cache-inspect DIR watch`: what running caches are doing, and how the directory fills."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from egeria_cache.inspect.words import console, plain, print_json, share, size
from egeria_cache.store import CacheReport, read_live, survey

__all__ = ["watch"]

Looked = tuple[CacheReport, dict[int, list[dict[str, Any]]], float]


def watch(directory: Path, *, every_s: float, times: int | None, as_json: bool) -> int:
    """Show the directory again and again, until Ctrl-C or for so many times; return 0.

    On a terminal the picture is drawn over; elsewhere each look is printed below the last, and with
    `as_json` as one object a look.
    """
    out = console()
    looks = _looks(directory, every_s, times)
    try:
        if as_json:
            for report, live, _ in looks:
                print_json(_as_json(report, live))
                sys.stdout.flush()
        elif not out.is_terminal:
            for look in _with_rates(looks):
                out.print(_picture(*look))
        else:
            with Live(console=out, auto_refresh=False) as screen:
                for look in _with_rates(looks):
                    screen.update(_picture(*look), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def _looks(directory: Path, every_s: float, times: int | None) -> Iterator[Looked]:
    for number in itertools.count() if times is None else range(times):
        if number:
            time.sleep(every_s)
        yield survey(directory), read_live(directory), time.monotonic()


def _with_rates(looks: Iterator[Looked]) -> Iterator[tuple[Looked, Looked | None]]:
    """Give each look the one before it, so that rates can be told."""
    before: Looked | None = None
    for look in looks:
        yield look, before
        before = look


def _picture(look: Looked, before: Looked | None) -> RenderableType:
    report, live, _ = look
    parts: list[RenderableType] = [_fill_line(report)]
    runs = Table("process", "frozen up to", "from the cache", "lately", "saved", box=None,
                 header_style="bold")  # fmt: skip
    notes: list[RenderableType] = []
    for process, number, one in _each(live):
        runs.add_row(*_run(process, one, _earlier(before, process, number)))
        if one.get("why_not"):
            notes.append(Text(f"{process}: not cached: {plain(one['why_not'])}", "yellow"))
        elif one.get("gate"):
            notes.append(Text(f"{process}: {plain(one['gate'])}", "dim"))
    parts += [runs, *notes] if live else [Text("no running process uses this cache", "dim")]
    kept = Table("generation", "boundary", "samples", "stored", "on disk", "in use", box=None,
                 header_style="bold")  # fmt: skip
    for generation in report.generations:
        kept.add_row(
            plain(generation.name[:12]), Text(plain(generation.boundary or "-")),
            f"{generation.num_samples:,}", _rate(look, before, generation.name),
            size(generation.bytes_on_disk), "yes" if generation.in_use else "no",
        )  # fmt: skip
    return Group(*parts, kept, Text(""))


def _fill_line(report: CacheReport) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    text = size(report.bytes_on_disk)
    if report.limit_bytes is None:
        line.add_row(plain(report.directory), text)
        return line
    part = min(1.0, report.bytes_on_disk / report.limit_bytes)
    text += f" of {size(report.limit_bytes)} ({share(part)})"
    line.add_row(plain(report.directory), ProgressBar(total=1.0, completed=part, width=30), text)
    return line


def _each(live: dict[int, list[dict[str, Any]]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    for process, caches in live.items():
        for number, one in enumerate(caches):
            yield process, number, one


def _earlier(before: Looked | None, process: int, number: int) -> dict[str, Any] | None:
    caches = [] if before is None else before[1].get(process, [])
    return caches[number] if number < len(caches) else None


def _run(process: int, one: dict[str, Any], earlier: dict[str, Any] | None) -> list[str | Text]:
    hits, seen = _counts(one)
    late_hits, late_seen = hits, seen
    if earlier is not None:
        past_hits, past_seen = _counts(earlier)
        late_hits, late_seen = hits - past_hits, seen - past_seen
    saved = one.get("saved_s")
    return [
        str(process),
        Text(plain(one.get("boundary") or "nothing yet")),
        f"{hits:,} of {seen:,}",
        share(late_hits / late_seen) if late_seen > 0 else "-",
        f"{saved:.1f} s" if isinstance(saved, int | float) else "-",
    ]


def _counts(one: dict[str, Any]) -> tuple[int, int]:
    hits, misses = (one.get(name) for name in ("hits", "misses"))
    hits = hits if isinstance(hits, int) else 0
    return hits, hits + (misses if isinstance(misses, int) else 0)


def _rate(look: Looked, before: Looked | None, name: str) -> str:
    """Return how fast a generation grows."""
    if before is None:
        return "-"
    now, past = (
        next((one.num_samples for one in each[0].generations if one.name == name), None)
        for each in (look, before)
    )
    if now is None or past is None or now <= past:
        return "-"
    return f"{(now - past) / max(look[2] - before[2], 1e-9):,.0f} a second"


def _as_json(report: CacheReport, live: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "bytes_on_disk": report.bytes_on_disk,
        "limit_bytes": report.limit_bytes,
        "processes": live,
        "generations": {
            one.name: {"boundary": one.boundary, "samples": one.num_samples, "in_use": one.in_use}
            for one in report.generations
        },
    }
