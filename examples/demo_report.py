"""What the demo shows: a table and a figure."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from demo import Run

__all__ = ["print_table", "save_figure"]


def print_table(
    console: Console, result: dict[str, Any], plain: Run, egeria: Run, uncached: Run, target: float
) -> None:
    """Print times and accuracies side by side, then what froze and what the cache did."""
    runs = (plain, egeria, uncached)
    table = Table(title="Handwritten digits, ResNet, same seeds and schedule")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    base = plain.seconds[-1]
    table.add_row(
        "training time", *(f"{r.seconds[-1]:.1f} s ({r.seconds[-1] / base:.2f}x)" for r in runs)
    )
    table.add_row(
        f"time to {target:.0%} accuracy", *(_seconds(run.time_to(target)) for run in runs)
    )
    table.add_row("final test accuracy", *(f"{run.accuracies[-1]:.2%}" for run in runs))
    table.add_row("best test accuracy", *(f"{max(run.accuracies):.2%}" for run in runs))
    table.add_row(
        "mean fraction frozen", *(f"{sum(run.frozen) / len(run.frozen):.0%}" for run in runs)
    )
    console.print(table)
    console.print(_cache_table(result))
    console.print(_schedule_table(result))


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f} s"


def _cache_table(result: dict[str, Any]) -> Table:
    cache = result["cache"]
    table = Table(title="The cache", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    samples = cache["hits"] + cache["misses"]
    rows = {
        "batches served whole": cache["hit_batches"],
        "batches served in part": cache["partial_batches"],
        "batches computed": cache["miss_batches"],
        "samples hit": f"{cache['hits']} of {samples}" if samples else "0",
        "bytes on disk": f"{cache['bytes_on_disk'] / 1e6:.1f} MB",
        "compression ratio": f"{cache['compression_ratio']:.2f}",
        "largest loss difference, cached against computed": _difference(result),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _difference(result: dict[str, Any]) -> str:
    largest = result["largest_loss_difference"]
    if largest == 0:
        return "0 (equal to the bit, every step)"
    return f"{largest:.3g} (first at step {result['first_step_that_differs']})"


def _schedule_table(result: dict[str, Any]) -> Table:
    table = Table(title="Layers frozen over time")
    table.add_column("from step", justify="right")
    table.add_column("frozen up to")
    for step, boundary in result["schedule"]:
        table.add_row(str(step), boundary or "nothing (the learning rate fell to a tenth)")
    if not result["schedule"]:
        table.add_row("-", "nothing froze in this run")
    return table


def save_figure(path: Path, result: dict[str, Any], plain: Run, egeria: Run) -> None:
    """Save accuracy against wall time, the frozen fraction, and plasticity per layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for run, colour in ((plain, "tab:gray"), (egeria, "tab:green")):
        left.plot(run.seconds, run.accuracies, label=run.name, color=colour)
    left.axhline(result["settings"]["target"], color="black", linewidth=0.6, linestyle=":")
    left.set(xlabel="training time [s]", ylabel="test accuracy", ylim=(0.8, 1.0))
    left.set_title("Accuracy against time")
    left.legend(loc="lower right")

    steps_per_epoch = len(egeria.losses) // len(egeria.frozen)
    ends = [(epoch + 1) * steps_per_epoch for epoch in range(len(egeria.frozen))]
    middle.step(ends, egeria.frozen, where="pre", color="tab:blue")
    middle.fill_between(ends, egeria.frozen, step="pre", alpha=0.2)
    for epoch in result["settings"]["drops"]:
        middle.axvline(epoch * steps_per_epoch, color="tab:red", linestyle="--", linewidth=0.8)
    middle.set(xlabel="training step", ylabel="fraction of the parameters", ylim=(0, 1))
    middle.set_title("Frozen (red: the learning rate falls)")

    readings: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for reading in result["readings"]:
        readings[reading["boundary"]].append((reading["step"], reading["value"]))
    for boundary, points in readings.items():
        right.plot(*zip(*points, strict=True), ".", markersize=3, label=boundary)
    for step, _ in result["schedule"]:
        right.axvline(step, color="black", linewidth=0.5)
    right.set(xlabel="training step", ylabel="SP loss against the reference", yscale="log")
    right.set_title("Plasticity of the frontmost active layer")
    if readings:
        right.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
