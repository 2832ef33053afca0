"""One plot: predicted against measured harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import pyplot

__all__ = ["plot"]

LEAST = 1e-4
"""Where the logarithmic axes begin; what is less, or a gain, lies on the edge."""


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw one point a branch: filled where the layers rest, coloured by schedule."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5), sharex=True, sharey=True)
    schedules = sorted({p["schedule"] for p in report["points"]})
    for axis, half in zip(axes, ("tuning", "fresh"), strict=True):
        for index, schedule in enumerate(schedules):
            own = [p for p in report["points"] if p["half"] == half and p["schedule"] == schedule]
            for rests in (False, True):
                chosen = [p for p in own if p["rests"] is rests]
                axis.scatter(
                    [max(LEAST, p["predicted"]) for p in chosen],
                    [max(LEAST, p["tail"]) for p in chosen],
                    s=22,
                    color=f"C{index}",
                    facecolors=f"C{index}" if rests else "none",
                    label=schedule if rests else None,
                )
        ends = [LEAST, 2.0]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.fill_between(ends, [e / 2 for e in ends], [e * 2 for e in ends], alpha=0.1)
        axis.axvline(0.01, color="grey", linestyle=":", linewidth=0.8)
        axis.axhline(0.01, color="grey", linestyle=":", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="predicted harm (nats)", title=f"{half} half")
    axes[0].set_ylabel("measured harm, final training loss (nats)")
    axes[1].legend(fontsize=8, title="filled: all layers rest")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
