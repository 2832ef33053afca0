"""The figures beside their targets, tables for people, and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import pyplot

from .cells import CODECS

__all__ = ["plot", "show", "summary"]

TARGET = 1.05
"""Hits against the oracle."""
PAPER_STORAGE = (1.5, 5.3)
"""ResNet-50's activations against its input (Egeria, section 6.5)."""


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Set the figures beside their targets."""
    cells = [(m["model"], cell) for m in report["models"] for cell in m["cells"]]
    over = [f"{n} {c['boundary']}: {c['hit_vs_oracle']}" for n, c in cells
            if c["hit_vs_oracle"] > TARGET]  # fmt: skip
    wrong = [f"{n} {c['boundary']}" for n, c in cells if not c["gate"]["right"]]
    storage = [c["stored_vs_input"] for n, c in cells if n == "ResNet-50"]
    return {
        "cells": len(cells),
        "hits_over_target": over,
        "gate_wrong": wrong,
        "resnet50_stored_vs_input": [min(storage), max(storage)] if storage else None,
        "paper_resnet50_stored_vs_input": PAPER_STORAGE,
    }


def show(report: dict[str, Any]) -> None:
    console = Console(width=150)
    speed = Table(title="seconds a step; ratios are medians of pairs; "
                  "work: hits/oracle in processor seconds")  # fmt: skip
    for title in (
        "model", "boundary", "%", "full", "frozen", "hits", "oracle", "frozen/full", "hits/full",
        "hits/frozen", "hits/oracle", "work", "pays from", "gate",
    ):  # fmt: skip
        speed.add_column(title, justify="left" if title in ("model", "boundary") else "right")
    storage = Table(title="bytes a sample, and compression (raw / stored)")
    for title in ("model", "boundary", "input", "raw", "stored", "x input", *CODECS[1:],
                  "data set", "GB"):  # fmt: skip
        storage.add_column(title, justify="left" if title in ("model", "boundary") else "right")
    for model in report["models"]:
        for cell in model["cells"]:
            gate, step = cell["gate"], cell["step_s"]
            decision = "skips" if gate["skips"] else "computes"
            if gate["skips"] and gate["cut"] != cell["boundary"]:
                decision += f" at {gate['cut']}"
            epoch = cell["break_even_epoch"]
            speed.add_row(
                model["model"], cell["boundary"], f"{100 * cell['share']:.0f}",
                *(f"{step[name]:.3f}" for name in ("full", "frozen", "hit", "oracle")),
                *(f"{cell[name]:.2f}" for name in ("frozen_vs_full", "hit_vs_full")),
                *(f"{cell[name]:.3f}"
                  for name in ("hit_vs_frozen", "hit_vs_oracle", "hit_vs_oracle_work")),
                "never" if epoch is None else f"epoch {epoch:.1f}",
                f"{decision}, {'right' if gate['right'] else 'WRONG'}",
            )  # fmt: skip
            storage.add_row(
                model["model"], cell["boundary"],
                *(f"{cell[name]:,}" for name in ("input_bytes", "raw_bytes", "stored_bytes")),
                f"{cell['stored_vs_input']:.2f}",
                *(f"{cell['codecs'][codec]['ratio']:.2f}" for codec in CODECS[1:]),
                model["data_set"], f"{cell['data_set_bytes'] / 1e9:,.1f}",
            )  # fmt: skip
    console.print(speed)
    console.print(storage)
    for model in report["models"]:
        for cell in model["cells"]:
            console.print(
                f"gate, {model['model']} {cell['boundary']}: {cell['gate']['reason']}",
                highlight=False,
            )
    found = report["summary"]
    console.print(
        f"hits within {TARGET}x of the oracle: {found['cells'] - len(found['hits_over_target'])} "
        f"of {found['cells']} cells; over: {found['hits_over_target'] or 'none'}"
    )
    console.print(
        f"gate right: {found['cells'] - len(found['gate_wrong'])} of {found['cells']} cells; "
        f"wrong: {found['gate_wrong'] or 'none'}"
    )
    if found["resnet50_stored_vs_input"]:
        low, high = found["resnet50_stored_vs_input"]
        console.print(
            f"ResNet-50 stores {low:.2f} to {high:.2f} times its fp32 input; the paper: "
            f"{PAPER_STORAGE[0]} to {PAPER_STORAGE[1]}"
        )


def plot(report: dict[str, Any], path: Path) -> None:
    models = report["models"]
    figure, axes = pyplot().subplots(
        2, len(models), figsize=(2.3 * len(models), 5.4), sharey="row", squeeze=False
    )
    kinds = {"frozen": "tab:grey", "hit": "tab:green", "oracle": "tab:olive"}
    for column, model in enumerate(models):
        cells = model["cells"]
        labels = [f"{100 * cell['share']:.0f} %" for cell in cells]
        upper, lower = axes[0][column], axes[1][column]
        for i, (kind, colour) in enumerate(kinds.items()):
            at = [x + 0.27 * (i - 1) for x in range(len(cells))]
            values = [cell[f"{kind}_vs_full"] for cell in cells]
            upper.bar(at, values, 0.27, color=colour, label={"hit": "all hits"}.get(kind, kind))
        upper.axhline(1, color="black", linewidth=0.8)
        upper.set_title(model["model"], fontsize=10)
        for i, (name, colour) in enumerate((("raw", "tab:grey"), ("auto", "tab:green"))):
            sizes = [cell["codecs"][name]["bytes"] / cell["input_bytes"] for cell in cells]
            at = [x + 0.36 * (i - 0.5) for x in range(len(cells))]
            lower.bar(at, sizes, 0.36, color=colour, label={"auto": "as stored"}.get(name, name))
        lower.set_yscale("log")
        for axis in (upper, lower):
            axis.set_xticks(range(len(cells)), labels, fontsize=8)
            axis.tick_params(labelsize=8)
    axes[0][0].set_ylabel("time of a step / nothing frozen", fontsize=8)
    axes[1][0].set_ylabel("bytes a sample / input's", fontsize=8)
    axes[1][0].set_xlabel("layers frozen", fontsize=8)
    axes[0][0].legend(fontsize=7)
    axes[1][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
