"""What the figures say against the targets, in words: also where it does not pay, and why."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["findings", "verdicts"]


TARGETS = {
    "digits": {"egeria": 1.25, "egeria+cache": 1.25},
    "source": {"egeria": 1.05, "egeria+cache": 1.05},
    "digits-finetune": {"egeria": 0.97, "egeria+cache": 0.97, "static+cache": 3.0},
    "source-finetune": {"egeria": 0.97, "egeria+cache": 0.97, "static+cache": 1.5},
}
SWEEP_TARGETS = {"sweep-head": 5.0, "sweep-stage": 1.4}
"""What the arithmetic allows. Where plain needs nearly its whole schedule to get to its metric, no
harmless freezing can save more than its share of the steps; of a sweep with two thirds of the
forward frozen, a cache can save no more than 1.7x."""


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per figure to reach: what was asked, what was measured, and, beside it, what
    plain training reaches whose schedule is cut to the same time."""
    rows = []
    for name, task in report["tasks"].items():
        summary = task.get("summary")
        if summary is None:
            continue
        short = summary["methods"].get("shortened")
        for method, target in TARGETS[name].items():
            row = summary["methods"].get(method)
            if row is None:
                continue
            reach = row["processor_to_strict"]
            same = method == task["shortened_to"] and short is not None
            rows.append(
                {
                    "what": f"{name}: {method}, time to plain's metric",
                    "target": target,
                    "measured": reach["pooled"],
                    "clock": row["time_to_strict"]["pooled"],
                    "per_seed": reach["speedup"]["median"],
                    "reached": f"{reach['reached']} of {len(row['seeds'])} seeds",
                    "deviations_worse": row.get("deviations_worse"),
                    "cut_short": short["processor_to_strict"]["pooled"] if same else None,
                    "cut_short_deviations_worse": short.get("deviations_worse") if same else None,
                }
            )
    for name, sweep in report["sweeps"].items():
        if sweep.get("summary") is not None:
            speedup = sweep["summary"]["cpu_speedup"]["median"]
            rows.append(
                {
                    "what": f"{name}: eight runs over one cache",
                    "target": SWEEP_TARGETS[name],
                    "measured": speedup,
                    "clock": sweep["summary"]["speedup"]["median"],
                    "per_seed": speedup,
                    "reached": f"{len(sweep['summary']['seeds'])} seeds",
                }
            )
    return rows


def findings(task: dict[str, Any]) -> list[str]:
    """Return a line for each method that freezes: what it could save, did save, and what it cost.

    A step is counted as three forwards (forward, and a backward of twice its arithmetic). With the
    part f of the forward frozen, computing it still leaves 1 - 2 f / 3 of a step, and skipping it
    1 - f. A measured figure may be better: a frozen BatchNorm runs in inference mode, which is
    cheaper, and what is frozen needs no optimizer.
    """
    summary = task["summary"]
    methods = summary["methods"]
    lines = []
    for name, row in methods.items():
        if name in ("plain", "shortened"):
            continue
        part = row["frozen_forward"]
        saved = part if name.endswith("+cache") else part * 2 / 3
        bound = 1 / max(1e-6, 1 - saved)
        total = row["total_cpu_speedup"]["median"]
        text = (
            f"{name}: {part:.0%} of the forward frozen on average, so {bound:.2f}x by arithmetic "
            f"for the whole schedule; measured {total:.2f}x"
        )
        reach = row["processor_to_strict"]
        missing = len(row["seeds"]) - reach["reached"]
        if "predicted_harm" in row:
            text += f"; predicted to cost {row['predicted_harm']['mean']:.4f} nats"
            if task["metric"] == "loss":
                text += f", cost {row['worse'] * math.log(2):.4f}"
        worse = row.get("deviations_worse")
        if worse is not None and worse > 1:
            text += f"; ends {worse:.1f} of plain's deviations worse"
        if missing:
            text += f"; misses plain's metric in {missing} of {len(row['seeds'])} seeds"
        if name.endswith("+cache") and total < 0.8 * bound:
            text += "; lost to " + _overheads(row, methods)
        lines.append(text)
    return lines


def _overheads(row: dict[str, Any], methods: dict[str, Any]) -> str:
    """Name what a cached run spends beside its arithmetic, as parts of its own time."""
    total = row["seconds"]["median"]
    costs = {
        f"proving {row['moves']:.0f} cut(s)": row["phases"]["cut"],
        "waiting for batches": row["phases"]["data"],
        "the controller": row["phases"]["control"],
        "waiting for the writer": row["phases"]["flush"],
        "forwards beyond the frozen share": row["phases"]["forward"]
        - (1 - row["frozen_forward"]) * methods["plain"]["phases"]["forward"],
    }
    worst = sorted(costs.items(), key=lambda item: -item[1])[:3]
    behind = f"; {row['background_cpu']:.0%} of its CPU time is the cache's threads"
    named = [f"{what} {seconds / total:.0%}" for what, seconds in worst if seconds > 0.01 * total]
    return (", ".join(named) or "nothing that was measured alone") + behind
