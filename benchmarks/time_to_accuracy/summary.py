"""Figures from finished runs: pure functions, so that given records give known numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["pooled", "summarise_sweep", "summarise_task", "targets_of", "time_to"]

Record = dict[str, Any]


def targets_of(
    finals: Sequence[float], *, higher: bool, resolution: float, relaxed: float
) -> dict[str, float]:
    """Return the metrics to be reached, from plain's final ones over the seeds.

    `strict`: plain's mean, less one standard deviation over the seeds (one validation sample where
    that is more). `relaxed`: less `relaxed`, absolute for an accuracy, relative for a loss.
    """
    mean = statistics.mean(finals)
    spread = max(statistics.stdev(finals) if len(finals) > 1 else 0.0, resolution)
    if higher:
        return {"strict": mean - spread, "relaxed": mean - max(relaxed, spread)}
    return {"strict": mean + spread, "relaxed": mean + max(relaxed * mean, spread)}


def time_to(curve: Sequence[Sequence[float]], target: float, *, higher: bool) -> float | None:
    """Return the training time of the first of two evaluations in a row that reach a metric.

    None if there are no such two: a single touch may be one lucky sample.
    """
    reached = [
        (point[2] >= target - 1e-9) if higher else (point[2] <= target + 1e-9) for point in curve
    ]
    pairs = zip(curve, itertools.pairwise(reached), strict=False)
    return next((point[1] for point, both in pairs if all(both)), None)


def pooled(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float, float]]:
    """Return the mean curve over the seeds: mean time and mean metric at each evaluation.

    Over several seeds' validation rows no single one of them decides.
    """
    points = zip(*curves, strict=True)
    return [tuple(statistics.mean(own[i] for own in point) for i in range(3)) for point in points]


def by_clock(record: Record) -> Any:
    """Return a run's curve over its training time."""
    return record["curve"]


def by_processor(record: Record) -> list[tuple[float, float, float]]:
    """Return a run's curve over its processor time, which a busy machine hardly changes.

    A run that noted none on the way is taken to have had the same part of the machine all along.
    """
    part = record["cpu_seconds"] / record["seconds"]
    return [
        (point[0], point[3] if len(point) > 3 else part * point[1], point[2])
        for point in record["curve"]
    ]


def _stopped(curve: Sequence[Sequence[float]], seconds: float) -> float | None:
    """Return the metric at the last evaluation within this time; None before the first."""
    return next((point[2] for point in reversed(curve) if point[1] <= seconds), None)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "least": min(values),
        "most": max(values),
    }


def summarise_task(
    records: Sequence[Record],
    *,
    higher: bool,
    resolution: float,
    relaxed: float,
    stopped_at: str = "egeria+cache",
) -> dict[str, Any] | None:
    """Return targets and, per method, figures over its seeds; None without a plain run.

    Ratios are to the plain run of the same seed, and medians over the seeds. A seed in which a
    method misses the target counts as a speed-up of 0; a seed in which plain misses it counts
    plain's whole time. `pooled` figures are of the mean curves of the method and of plain over the
    seeds that both have. `stopped_at` names the method in whose time plain is stopped.
    """
    plain = {r["seed"]: r for r in records if r["method"] == "plain"}
    if not plain:
        return None
    finals = [record["curve"][-1][2] for record in plain.values()]
    targets = targets_of(finals, higher=higher, resolution=resolution, relaxed=relaxed)
    methods: dict[str, Any] = {}
    for name in dict.fromkeys(record["method"] for record in records):
        runs = [r for r in records if r["method"] == name and r["seed"] in plain]
        if runs:
            methods[name] = _method(runs, plain, targets, higher=higher)
    cached = [r for r in records if r["method"] == stopped_at and r["seed"] in plain]
    stopped = [_stopped(plain[r["seed"]]["curve"], r["seconds"]) for r in cached]
    result: dict[str, Any] = {"targets": targets, "methods": methods}
    if cached and None not in stopped:
        finals = [m for m in stopped if m is not None]
        result["plain_stopped"] = {"at": stopped_at, "final": _spread(finals)}
    return result


def _method(
    runs: Sequence[Record],
    plain: dict[int, Record],
    targets: dict[str, float],
    *,
    higher: bool,
) -> dict[str, Any]:
    pairs = [(run, plain[run["seed"]]) for run in runs]
    row: dict[str, Any] = {
        "seeds": [run["seed"] for run in runs],
        "final": _spread([run["curve"][-1][2] for run in runs]),
        "best": _spread([(max if higher else min)(c[2] for c in run["curve"]) for run in runs]),
        "seconds": _spread([run["seconds"] for run in runs]),
        "total_speedup": _spread([own["seconds"] / run["seconds"] for run, own in pairs]),
        "total_cpu_speedup": _spread(
            [own["cpu_seconds"] / run["cpu_seconds"] for run, own in pairs]
        ),
        "frozen_forward": statistics.mean(run["frozen_forward"] for run in runs),
        "frozen_parameters": statistics.mean(run["frozen_parameters"] for run in runs),
        "hit_rate": statistics.mean(
            run["hits"] / (run["steps"] * run["batch_size"]) for run in runs
        ),
        "bytes_on_disk": max(run["bytes_on_disk"] for run in runs),
        "moves": statistics.median(len(run["schedule"]) for run in runs),
        "background_cpu": statistics.median(
            run["background_cpu_seconds"] / run["cpu_seconds"] for run in runs
        ),
        "phases": {
            phase: statistics.median(run["phases"][phase] for run in runs)
            for phase in runs[0]["phases"]
        },
    }
    for kind, target in targets.items():
        row[f"time_to_{kind}"] = _reach(pairs, target, higher=higher, curve_of=by_clock)
        row[f"processor_to_{kind}"] = _reach(pairs, target, higher=higher, curve_of=by_processor)
    predicted = [run["predicted_harm"] for run in runs if run.get("predicted_harm") is not None]
    if predicted:
        row["predicted_harm"] = _spread(predicted)
    worse = statistics.mean(own["curve"][-1][2] - run["curve"][-1][2] for run, own in pairs)
    row["worse"] = worse if higher else -worse
    theirs = [own["curve"][-1][2] for own in plain.values()]
    if len(theirs) > 1:
        deviation = max(statistics.stdev(theirs), runs[0].get("resolution", 0.0))
        row["deviations_worse"] = row["worse"] / deviation
    return row


def _reach(
    pairs: Sequence[tuple[Record, Record]],
    target: float,
    *,
    higher: bool,
    curve_of: Callable[[Record], Any],
) -> dict[str, Any]:
    """Return in how many seeds a metric was reached, when, and how much sooner than by plain.

    `pooled`: plain's time to the metric over the method's, by mean curves; 0 if it is missed.
    """

    def sooner(own: Any, theirs: Any) -> float:
        seconds = time_to(own, target, higher=higher)
        return (
            0.0
            if seconds is None
            else (time_to(theirs, target, higher=higher) or theirs[-1][1]) / seconds
        )

    curves = [(curve_of(run), curve_of(own)) for run, own in pairs]
    times = [time_to(run, target, higher=higher) for run, _ in curves]
    reached = [seconds for seconds in times if seconds is not None]
    return {
        "reached": len(reached),
        "seconds": _spread(reached) if reached else None,
        "speedup": _spread([sooner(*pair) for pair in curves]),
        "pooled": sooner(*(pooled(side) for side in zip(*curves, strict=True))),
    }


def summarise_sweep(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the sweep's figures over the seeds that have both; None without any."""
    uncached = {r["seed"]: r for r in records if r["method"] == "uncached"}
    cached = {r["seed"]: r for r in records if r["method"] == "cached"}
    seeds = sorted(uncached.keys() & cached.keys())
    if not seeds:
        return None
    pairs = [(uncached[seed], cached[seed]) for seed in seeds]
    return {
        "seeds": seeds,
        "speedup": _spread([a["seconds"] / b["seconds"] for a, b in pairs]),
        "cpu_speedup": _spread([a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs]),
        "uncached_s": _spread([a["seconds"] for a, _ in pairs]),
        "cached_s": _spread([b["seconds"] for _, b in pairs]),
        "first_run_speedup": _spread([a["each_s"][0] / b["each_s"][0] for a, b in pairs]),
        "later_run_speedup": _spread(
            [sum(a["each_s"][1:]) / sum(b["each_s"][1:]) for a, b in pairs]
        ),
        "best_uncached": _spread([max(a["finals"]) for a, _ in pairs]),
        "best_cached": _spread([max(b["finals"]) for _, b in pairs]),
        "hits": [b["hits"] for _, b in pairs],
        "misses": [b["misses"] for _, b in pairs],
        "bytes_on_disk": max(b["bytes_on_disk"] for _, b in pairs),
        "phases_uncached": _phases([a for a, _ in pairs]),
        "phases_cached": _phases([b for _, b in pairs]),
    }


def _phases(records: Sequence[Record]) -> dict[str, float]:
    return {
        name: statistics.median(record["phases"][name] for record in records)
        for name in records[0]["phases"]
    }
