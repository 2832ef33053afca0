"""The two plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import pyplot

__all__ = ["plot"]


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the metric over training time, and, beside it in *_speedups.png, the speed-ups."""
    tasks = {name: t for name, t in report["tasks"].items() if t.get("summary") is not None}
    if not tasks:
        return
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), squeeze=False)
    for axis, (name, task) in zip(axes.flat, tasks.items(), strict=False):
        _draw_curves(axis, name, task)
    for axis in list(axes.flat)[len(tasks) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)

    figure, axes = plt.subplots(1, len(tasks) + 1, figsize=(4 * len(tasks) + 4, 4.5), squeeze=False)
    for axis, (name, task) in zip(axes.flat, tasks.items(), strict=False):
        rows = {n: r for n, r in task["summary"]["methods"].items() if n != "plain"}
        _draw_bars(
            axis,
            f"{name}: time to plain's metric",
            {n: row["processor_to_strict"]["speedup"] for n, row in rows.items()},
        )
    sweeps = {n: s["summary"]["speedup"] for n, s in report["sweeps"].items() if s.get("summary")}
    _draw_bars(axes.flat[-1], "sweeps of eight", sweeps)
    figure.tight_layout()
    figure.savefig(path.with_name(f"{path.stem}_speedups.png"), dpi=110)


def _draw_curves(axis: Any, name: str, task: dict[str, Any]) -> None:
    scale = 100 if task["metric"] == "accuracy" else 1
    seen = []
    for index, method in enumerate(task["summary"]["methods"]):
        run = next(run for run in task["runs"] if run["method"] == method)
        seconds, metrics = zip(*(point[1:3] for point in run["curve"]), strict=True)
        own = method.startswith("egeria")
        axis.plot(
            seconds,
            [scale * m for m in metrics],
            label=method,
            color="black" if method == "plain" else f"C{index % 10}",
            linewidth=2.2 if own else 1,
            linestyle="-" if own or method == "plain" else "--",
        )
        seen.append(scale * metrics[-1])
    target = scale * task["summary"]["targets"]["strict"]
    axis.axhline(target, color="grey", linewidth=0.8, linestyle=":")
    room = max(0.02 * abs(target), 1.5 * (max(seen) - min(seen)))
    top = max(*seen, target) + room
    axis.set_ylim(min(*seen, target) - room, min(top, 100.2) if scale == 100 else top)
    axis.set_title(f"{name}, seed {task['runs'][0]['seed']}", fontsize=10)
    axis.set_xlabel("training time, s")
    axis.set_ylabel("accuracy, %" if scale == 100 else "loss, bits")
    axis.legend(fontsize=7)


def _draw_bars(axis: Any, title: str, speedups: dict[str, dict[str, float]]) -> None:
    names = list(speedups)
    values = [speedups[name]["median"] for name in names]
    low = [speedups[name]["median"] - speedups[name]["least"] for name in names]
    high = [speedups[name]["most"] - speedups[name]["median"] for name in names]
    own = {name for name in names if name.startswith(("egeria", "sweep")) or "+cache" in name}
    colours = ["tab:green" if name in own else "tab:grey" for name in names]
    bars = axis.barh(names, values, xerr=(low, high) if names else None, color=colours)
    labels = [f"{value:.2f}x" if value else "not reached" for value in values]
    axis.bar_label(bars, labels=labels, padding=3, fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
