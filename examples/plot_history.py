"""Draws a history: plasticity per layer with decisions, and active parameters over training.

    python examples/plot_history.py runs/history.jsonl -o history.png

They are the paper's Figures 4 and 11. Needs matplotlib (the `plot` extra).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

from egeria_core import History

mpl.use("Agg")

from matplotlib import pyplot as plt


def plot_plasticity(history: History, axes: Any) -> None:
    """Draw every layer's readings, a line at each freeze and a band edge at each unfreeze."""
    readings = [r for r in history.of("reading") if r["value"] is not None]
    for layer in sorted({record["layer"] for record in readings}):
        own = [record for record in readings if record["layer"] == layer]
        axes.plot(
            [record["step"] for record in own],
            # A reading of exactly zero has no place on a logarithmic axis.
            [max(record["value"], 1e-12) for record in own],
            marker=".",
            markersize=3,
            linewidth=0.8,
            label=own[0]["boundary"],
        )
    for record in history.of("boundary"):
        unfrozen = record["boundary"] is None
        axes.axvline(
            record["step"],
            color="tab:red" if unfrozen else "0.6",
            linestyle="--" if unfrozen else ":",
            linewidth=1.0,
        )
    axes.set_yscale("log")
    axes.set_ylabel("plasticity")
    axes.set_xlabel("training step")
    axes.set_title("Readings of the front layer (dotted: frozen, red: unfrozen)", fontsize=9)
    if readings:
        axes.legend(fontsize=7, ncols=2)


def plot_active_parameters(history: History, axes: Any) -> None:
    """Draw the number of trainable parameters as steps."""
    moves = history.of("boundary")
    if not moves:
        axes.set_title("Nothing was frozen", fontsize=9)
        return
    counts = [record["active_parameters"] for record in moves]
    total = max(record["total_parameters"] for record in moves)
    last = max((record["step"] for record in history), default=0)
    steps = [0, *(record["step"] for record in moves), last]
    shares = [1.0, *(count / total for count in counts)]
    axes.stairs(shares, steps, fill=True, alpha=0.4)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("active parameters")
    axes.set_xlabel("training step")
    axes.set_title("Trainable part of the model", fontsize=9)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("history", type=Path, help="JSON lines written by FreezeController")
    parser.add_argument("-o", "--output", type=Path, default=None, help="image to write")
    options = parser.parse_args(argv)
    output = options.output or options.history.with_suffix(".png")
    history = History()
    history += map(json.loads, options.history.read_text(encoding="utf-8").splitlines())
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, gridspec_kw={"height_ratios": [2, 1]}
    )
    plot_plasticity(history, upper)
    plot_active_parameters(history, lower)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)
    print(output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
