"""Draws schedules as SmartPipe's slides do: forwards blue, backwards green, bubbles grey.

`python -m benchmarks.schedules --stages 4 --microbatches 6 --frozen 2 -o pipeline.png`, or
`draw_schedule` on your own axes. Needs matplotlib (the `plot` extra).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bubbles import Bubbles, Layout, count_bubbles
from .orders import SCHEDULES

__all__ = ["COLUMNS", "draw_schedule", "draw_schedules", "main"]

Axes = Any
"""A `matplotlib.axes.Axes`; the library is optional, so the name is not imported."""

COLUMNS: tuple[tuple[str, bool, Layout], ...] = (
    ("no freezing", False, "kept"),
    ("frozen stages run forwards alone (SmartPipe)", True, "rebuilt"),
    ("front cached, active stages stay", True, "cached"),
    ("front cached, active part on all ranks", True, "repartition"),
    ("front cached, freed ranks as replicas", True, "replicate"),
)
"""Title, whether the front is frozen, and the layout of each drawing."""
FORWARD, BACKWARD, BUBBLE, UNCOUNTED = "#4f81bd", "#9bbb59", "0.8", "0.95"


def draw_schedule(bubbles: Bubbles, axes: Axes, title: str = "") -> None:
    """Draw one schedule: a row per rank, time to the right, micro-batches numbered from 1."""
    for rank in range(bubbles.ranks):
        own = [slot for slot in bubbles.slots if slot.rank == rank]
        row = bubbles.ranks - 1 - rank
        counted = bubbles.time if own else 0.0
        if own and all(slot.task.stage < bubbles.frozen for slot in own):
            counted = max(slot.end for slot in own)
        axes.broken_barh([(0, counted)], (row, 1), facecolor=BUBBLE)
        axes.broken_barh([(counted, bubbles.time - counted)], (row, 1), facecolor=UNCOUNTED)
        for slot in own:
            axes.broken_barh(
                [(slot.start, slot.end - slot.start)],
                (row, 1),
                facecolor=FORWARD if slot.task.is_forward else BACKWARD,
                edgecolor="white",
                linewidth=0.5,
            )
            axes.text(
                (slot.start + slot.end) / 2, row + 0.5, slot.task.microbatch + 1,
                ha="center", va="center", fontsize=6, color="white", clip_on=True,
            )  # fmt: skip
    axes.set_yticks([i + 0.5 for i in range(bubbles.ranks)])
    axes.set_yticklabels([f"rank {bubbles.ranks - 1 - i}" for i in range(bubbles.ranks)])
    axes.set_ylim(0, bubbles.ranks)
    axes.tick_params(labelsize=6)
    axes.set_title(
        f"{title}: time {bubbles.time:g}, bubbles {bubbles.bubbles:g}, all idle {bubbles.idle:g}",
        fontsize=8,
        loc="left",
    )


def draw_schedules(
    path: str | Path,
    schedule: str,
    stages: int,
    microbatches: int,
    frozen: int,
    **options: Any,
) -> list[Bubbles]:
    """Write the schedule with and without a frozen front into one image, in all layouts.

    Args:
        path: The image.
        schedule: As for `count_bubbles`, like all that follows.
        stages: S.
        microbatches: In each mini-batch.
        frozen: How many stages are frozen.
        options: `minibatches`, `flush`, `ranks`, `backward`.

    Returns:
        What was drawn, in the order of `COLUMNS`; without frozen stages the first alone.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: As `count_bubbles`.
    """
    found = [
        count_bubbles(
            schedule, stages, microbatches, frozen if is_frozen else 0, layout=layout, **options
        )
        for _, is_frozen, layout in (COLUMNS if frozen else COLUMNS[:1])
    ]
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ranks, longest = found[0].ranks, max(bubbles.time for bubbles in found)
    figure, axes = plt.subplots(
        len(found), 1, sharex=True, squeeze=False,
        figsize=(min(30, 2 + 0.35 * longest), len(found) * (0.7 + 0.28 * ranks)),
    )  # fmt: skip
    for bubbles, place, (title, *_) in zip(found, axes[:, 0], COLUMNS, strict=False):
        draw_schedule(bubbles, place, title)
    axes[-1, 0].set_xlim(0, longest)
    axes[-1, 0].set_xlabel("units of one stage's forward", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Draw schedules. Exit codes: 0 drawn, 2 bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedules", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--schedule", default="GPipe", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=6, help="in each mini-batch")
    parser.add_argument("--frozen", type=int, default=2, help="stages at the front")
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--no-flush", action="store_true", help="between mini-batches; 1F1B only")
    parser.add_argument("--ranks", type=int, default=None, help="default: as many as stages")
    parser.add_argument("--backward", type=float, default=1.0, help="its cost in forwards")
    parser.add_argument("-o", "--output", type=Path, default=Path("pipeline.png"))
    arguments = parser.parse_args(argv)
    try:
        found = draw_schedules(
            arguments.output, arguments.schedule, arguments.stages, arguments.microbatches,
            arguments.frozen, minibatches=arguments.minibatches, flush=not arguments.no_flush,
            ranks=arguments.ranks, backward=arguments.backward,
        )  # fmt: skip
    except ValueError as error:
        print(f"schedules: {error}", file=sys.stderr)
        return 2
    for (title, *_), bubbles in zip(COLUMNS, found, strict=False):
        print(
            f"{title:48} time {bubbles.time:g}, bubbles {bubbles.bubbles:g}, "
            f"all idle {bubbles.idle:g}"
        )
    print(arguments.output)
    return 0
