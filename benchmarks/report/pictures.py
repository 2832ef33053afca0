"""The three pictures that the page opens with, drawn twice: for light and for dark."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import pyplot

from .parts import Report, bytes_

__all__ = ["Picture", "pictures"]

THEMES = {
    "light": {"text": "#1c2024", "quiet": "#5d6670", "line": "#d9dee3"},
    "dark": {"text": "#e3e6e9", "quiet": "#98a2ac", "line": "#333a41"},
}
COLOURS = {
    "plain": "#8a949e", "egeria": "#4fa3e0", "egeria+cache": "#2fa866", "static+cache": "#d98a2b",
}  # fmt: skip
WIDTH = 9.0


@dataclass(frozen=True)
class Picture:
    """One figure, and the sentence that says what it shows."""

    name: str
    sentence: str
    light: str
    """As SVG, on nothing."""
    dark: str


def pictures(reports: dict[str, Report]) -> list[Picture]:
    """Return the pictures for which the results are there."""
    found = []
    for name, of, draw, sentence in _PICTURES:
        report = reports.get(of)
        try:
            if report is not None:
                light, dark = (_svg(draw, report, theme) for theme in THEMES.values())
                found.append(Picture(name, sentence(report), light, dark))
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, StopIteration):
            continue  # a file of another form is told by its section
    return found


def _svg(draw: Callable[[Any, Report], Any], report: Report, theme: dict[str, str]) -> str:
    plt = pyplot()
    style = {
        "text.color": theme["text"], "axes.labelcolor": theme["quiet"], "svg.fonttype": "none",
        "axes.edgecolor": theme["line"], "xtick.color": theme["quiet"], "font.size": 13,
        "ytick.color": theme["quiet"], "axes.titlecolor": theme["text"], "svg.hashsalt": "egeria",
        "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False,
    }  # fmt: skip
    with plt.rc_context(style):
        figure = draw(plt, report)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return text.getvalue()


# -- time to accuracy ----------------------------------------------------------------------------


def _tasks(report: Report) -> dict[str, Any]:
    return {name: task for name, task in report["tasks"].items() if task["runs"]}


def _curves(plt: Any, report: Report) -> Any:
    tasks = _tasks(report)
    rows = -(-len(tasks) // 2)
    figure, axes = plt.subplots(
        rows, 2, figsize=(WIDTH, 3.4 * rows), layout="constrained", squeeze=False
    )
    for axis in list(axes.flat)[len(tasks) :]:
        axis.axis("off")
    for axis, (name, task) in zip(axes.flat, tasks.items(), strict=False):
        scale = 100 if task["metric"] == "accuracy" else 1
        shown = []
        for method, colour in COLOURS.items():
            curves = [run["curve"] for run in task["runs"] if run["method"] == method]
            if not curves:
                continue
            seconds, middle, low, high = _band(curves, scale)
            axis.plot(seconds, middle, color=colour, label=method, linewidth=1.8)
            axis.fill_between(seconds, low, high, color=colour, alpha=0.18, linewidth=0)
            shown += middle[len(middle) // 3 :]
        room = 0.25 * (max(shown) - min(shown)) or 1
        axis.set_ylim(min(shown) - room, max(shown) + room)
        axis.set_title(name, loc="left", fontsize=13)
        axis.set_ylabel("accuracy, %" if scale == 100 else "loss, bits")
        axis.set_xlabel("training time, s")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), fontsize=11, loc="outside upper left", ncols=4
    )
    return figure


def _band(
    curves: Sequence[Sequence[Sequence[float]]], scale: float
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return mean times, and mean, least and greatest metric over the seeds, per evaluation."""
    seconds, middle, low, high = [], [], [], []
    for points in zip(*curves, strict=False):
        metrics = [scale * point[2] for point in points]
        seconds.append(statistics.mean(point[1] for point in points))
        middle.append(statistics.mean(metrics))
        low.append(min(metrics))
        high.append(max(metrics))
    return seconds, middle, low, high


def _curves_sentence(report: Report) -> str:
    seeds = max(len({run["seed"] for run in task["runs"]}) for task in _tasks(report).values())
    return (
        f"Validation metric over training time, the same schedule for all: mean of up to {seeds} "
        "seeds, bands from the worst to the best."
    )


# -- savings per model ---------------------------------------------------------------------------


def _middle_cells(report: Report) -> list[tuple[Report, Report]]:
    return [
        (model, min(model["cells"], key=lambda cell: abs(cell["share"] - 0.5)))
        for model in report["models"]
        if model["cells"]
    ]


def _savings(plt: Any, report: Report) -> Any:
    cells = _middle_cells(report)
    figure, axis = plt.subplots(figsize=(WIDTH, 0.62 * len(cells) + 1.1), layout="constrained")
    for row, (_, cell) in enumerate(cells):
        axis.barh(row - 0.2, 100 * cell["frozen_vs_full"], 0.36, color=COLOURS["plain"],
                  label="front frozen, computed" if row == 0 else None)  # fmt: skip
        axis.barh(row + 0.2, 100 * cell["hit_vs_full"], 0.36, color=COLOURS["egeria+cache"],
                  label="front frozen, from the cache" if row == 0 else None)  # fmt: skip
        axis.text(
            100 * cell["hit_vs_full"] + 1, row + 0.2, f"{bytes_(cell['stored_bytes'])} a sample",
            va="center", fontsize=11,
        )  # fmt: skip
    axis.set_yticks(range(len(cells)), [model["model"] for model, _ in cells])
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("time of a training step, % of the full one")
    figure.legend(fontsize=11, loc="outside upper left", ncols=2)
    return figure


def _savings_sentence(report: Report) -> str:
    ratios = [cell["hit_vs_full"] for _, cell in _middle_cells(report)]
    return (
        f"With about half of the layers frozen, a step whose front comes from the cache takes "
        f"{min(ratios):.0%} to {max(ratios):.0%} of the full step; beside each bar, what a sample "
        "takes on disk."
    )


# -- hits over time ------------------------------------------------------------------------------


def _hits(plt: Any, report: Report) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 3.6), layout="constrained")
    for act, colour in zip(report["acts"], list(COLOURS.values())[1:], strict=False):
        epochs = range(1, len(act["hit_rates"]) + 1)
        axis.plot(epochs, [100 * rate for rate in act["hit_rates"]], "o-", color=colour,
                  label=act["title"], markersize=4)  # fmt: skip
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("epoch")
    axis.set_ylabel("samples from the cache, %")
    axis.set_ylim(-3, 103)
    figure.legend(fontsize=11, loc="outside upper left", ncols=2)
    return figure


def _hits_sentence(report: Report) -> str:
    whole = report["acts"][0]["hit_rates"]
    filled = next(number for number, rate in enumerate(whole, 1) if rate > 0.5)
    return (
        f"Over a frozen front the cache carries training from epoch {filled} on; with random "
        "augmentation some samples are drawn anew in each epoch; from scratch it follows what the "
        "controller freezes."
    )


_PICTURES: tuple[tuple[str, str, Callable[[Any, Report], Any], Callable[[Report], str]], ...] = (
    ("Time to accuracy", "time_to_accuracy", _curves, _curves_sentence),
    ("What a skipped forward saves", "forward_skip", _savings, _savings_sentence),
    ("Hits over time", "demo", _hits, _hits_sentence),
)
