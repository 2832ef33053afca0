"""What a benchmark is told on its command line, what it prints, and what it keeps."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.harness.machine import command
from benchmarks.report.sections import section_of

__all__ = ["RESULTS", "keep", "parser", "print_report", "publish", "pyplot", "tell"]

RESULTS = Path(__file__).parents[1] / "results"

Report = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of what all benchmarks take; its description is the first line of `doc`."""
    made = argparse.ArgumentParser(
        prog=command(sys.argv[:1]), description=(doc or "").partition("\n")[0]
    )
    made.add_argument("--json", action="store_true", help="print JSON for machines")
    made.add_argument("--quick", action="store_true", help="smaller, and write no results")
    return made


def tell(text: str) -> None:
    """Say how far it is, beside the figures."""
    print(text, file=sys.stderr, flush=True)


def publish(
    name: str,
    report: Report,
    options: argparse.Namespace,
    *,
    plot: Callable[[Report, Path], None] | None = None,
) -> None:
    """Print the report, and keep it unless --quick."""
    print_report(name, report, options)
    if not options.quick:
        keep(name, report, plot)


def print_report(name: str, report: Report, options: argparse.Namespace) -> None:
    """Print what the page of all results will show of this one; JSON for machines."""
    if options.json:
        print(json.dumps(report, indent=2))
        return
    console = Console(width=160, highlight=False)
    section = section_of(name, report)
    for table in section.tables:
        shown = Table(title=table.title)
        for number, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if number else "left")
        for row in table.rows:
            shown.add_row(*map(_marked, row))
        console.print(shown)
    for finding in section.findings:
        console.print(f"- {_marked(finding)}")


def _marked(text: str) -> str:
    """Return text as the console's, with **marks** in bold."""
    return re.sub(r"\*\*(.+?)\*\*", r"[bold]\1[/bold]", escape(text))


def keep(name: str, report: Report, plot: Callable[[Report, Path], None] | None = None) -> None:
    """Write results/NAME.json, and NAME.png where there is something to draw."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    if plot is not None:
        plot(report, RESULTS / f"{name}.png")


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files alone; only those who plot need it installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
