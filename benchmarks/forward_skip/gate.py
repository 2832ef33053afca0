"""What the gate makes of a boundary, and whether it is right."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import seconds

from .bench import NUM_BATCHES, Bench, Loop, opened

__all__ = ["gate", "judged"]

MAX_GATE_HITS = 17
SAME = 0.05
"""Where hits and computed steps differ by less, either decision of the gate counts as right."""


def gate(bench: Bench, boundary: str, directory: Path, loop: Loop) -> dict[str, Any]:
    """Train with gate="auto" until it has decided; say where it cuts then, if at all, and why."""
    with opened(bench, boundary, directory, "auto") as (cache, loader):
        steps, num_hits = iter(loader), 0
        served: list[float] = []
        computed: list[float] = []

        def step() -> bool:
            hits = cache.stats().hits
            taken = seconds(lambda: loop.next_of(steps), bench.device)
            is_hit = cache.stats().hits > hits
            (served if is_hit else computed).append(taken)
            return is_hit

        for _ in range(3 * NUM_BATCHES + MAX_GATE_HITS):
            num_hits += step()
            views = cache.api.views.of(loader.source.key)
            if num_hits == MAX_GATE_HITS or (num_hits and not views):
                break
        views = cache.api.views.of(loader.source.key)
        why = cache.stats().gate
    return {
        "skips": bool(views),
        "cut": views[0].cut.boundary if views else None,
        "reason": why.removeprefix("'train': "),
        "served_s": round(statistics.median(served), 4) if served else None,
        # The first one or two find the cut.
        "computed_s": round(statistics.median(computed[1:]), 4) if computed[1:] else None,
    }


def judged(decision: dict[str, Any], boundary: str, hit_vs_frozen: float) -> dict[str, Any]:
    """Say whether the gate was right: to skip where hits are faster, to compute where not."""
    if not decision["skips"]:
        return decision | {"right": hit_vs_frozen > 1 - SAME}
    measured = hit_vs_frozen
    if decision["cut"] != boundary and decision["served_s"] and decision["computed_s"]:
        # At an earlier cut than was measured above, its own steps are all there is.
        measured = decision["served_s"] / decision["computed_s"]
    return decision | {"right": measured < 1 + SAME}
