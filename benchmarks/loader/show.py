"""Tables for people, and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import pyplot

__all__ = ["plot", "show"]


def show(report: dict[str, Any]) -> None:
    console = Console(width=110)
    for kind in ("cheap", "expensive"):
        part = report[kind]
        table = Table(title=f"{kind} data set, {part['sample_us']} us a sample; DataLoader = 1")
        for title in ("", "loading", "s", "training", "s", "state_dict us", "bytes"):
            table.add_column(title, justify="left" if not title else "right")
        for name in part["training"]:
            loading, state = part["loading"].get(name, {}), part["state_dict"].get(name, {})
            training = part["training"][name]
            cells = [loading.get("ratio"), loading.get("median_s"), training["ratio"],
                     training["median_s"], state.get("us"), state.get("bytes")]  # fmt: skip
            table.add_row(name, *("" if cell is None else str(cell) for cell in cells))
        console.print(table)
        for what, rows in part["parity"].items():
            near = ", ".join(f"{name}: {row['ratio']}" for name, row in rows.items())
            console.print(f"{what}, more rounds: {near}")
    for title in ("first_batch_s", "large"):
        table = Table(title=title)
        rows = report[title]
        columns = list(dict.fromkeys(key for row in rows.values() for key in row))
        for column in ("", *columns):
            table.add_column(column, justify="right" if column else "left")
        for name, row in rows.items():
            table.add_row(name, *(str(row.get(column, "")) for column in columns))
        console.print(table)
    for name, reason in report["skipped"].items():
        console.print(f"skipped: {name}: {reason}")


def plot(report: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot().subplots(2, 2, figsize=(11, 6), sharex="col")
    for row, kind in enumerate(("cheap", "expensive")):
        for column, what in enumerate(("loading", "training")):
            rows = report[kind][what]
            axis = axes[row][column]
            ratios = [report[kind]["parity"][what].get(name, rows[name])["ratio"] for name in rows]
            colours = ["tab:green" if "Egeria" in name else "tab:grey" for name in rows]
            bars = axis.barh(list(rows), ratios, color=colours)
            axis.bar_label(bars, padding=3, fontsize=8)
            axis.axvline(1, color="black", linewidth=0.8)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            if what == "loading":
                axis.set_xscale("log")
                axis.set_xlim(0.5, 250)
            axis.set_title(f"{what} epoch, {kind} data set", fontsize=10)
            axis.tick_params(labelsize=8)
    axes[1][0].set_xlabel("time / DataLoader's (less is better)")
    axes[1][1].set_xlabel("time / DataLoader's (less is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
