"""What the figures say against the targets, in words: also where it does not pay, and why."""

from __future__ import annotations

from typing import Any

__all__ = ["findings", "verdicts"]


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per figure to reach: what was asked, what was measured."""
    rows = []
    for name, task in report["tasks"].items():
        summary = task.get("summary")
        if summary is None:
            continue
        tuned = name.endswith("-finetune")
        target = 2.0 if tuned else 1.43
        for method in ("egeria+cache", "static+cache") if tuned else ("egeria", "egeria+cache"):
            row = summary["methods"].get(method)
            if row is not None:
                reach = row["time_to_strict"]
                rows.append(
                    {
                        "what": f"{name}: {method}, time to plain's metric",
                        "target": target,
                        "measured": reach["speedup"]["median"],
                        "relaxed": row["time_to_relaxed"]["speedup"]["median"],
                        "reached": f"{reach['reached']} of {len(row['seeds'])} seeds",
                    }
                )
    for name, sweep in report["sweeps"].items():
        if sweep.get("summary") is not None:
            rows.append(
                {
                    "what": f"{name}: eight runs over one cache",
                    "target": 4.0,
                    "measured": sweep["summary"]["speedup"]["median"],
                    "relaxed": None,
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
        total = row["total_speedup"]["median"]
        text = (
            f"{name}: {part:.0%} of the forward frozen on average, so {bound:.2f}x by arithmetic "
            f"for the whole schedule; measured {total:.2f}x"
        )
        reach = row["time_to_strict"]
        missing = len(row["seeds"]) - reach["reached"]
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
