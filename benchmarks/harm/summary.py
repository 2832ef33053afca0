"""From traces and branches to figures: predicted harm beside measured harm, per half and kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from egeria_core import ControllerConfig
from egeria_core.policies import HarmEstimate, Movement

from .tasks import TASKS

__all__ = ["area", "correlation", "points_of", "summarise", "summarise_policy"]

HARMFUL = 0.01
"""Nats: the default budget."""
NEAR = 5 * HARMFUL
"""Nats: among so much the rule chooses, where all layers rest."""
TELLING = 0.003
"""Nats: below this a ratio says nothing, two runs of one seed differ by as much."""
MEASURES = ("tail", "valid")
"""Final loss of the training steps, and of the validation data."""

Point = dict[str, Any]


def points_of(record: dict[str, Any]) -> list[Point]:
    """Return one point for each branch: what the library predicts from the plain run's readings."""
    num_layers, steps = len(record["layers"]), len(record["rates"])
    every = ControllerConfig(total_steps=steps).interval(num_layers, "movement")
    rates, branches = record["rates"], sorted(record["branches"], key=lambda b: int(b["at"]))
    estimate = HarmEstimate()
    found, step = [], 0
    for branch in branches:
        while step + every <= branch["at"]:
            rows = record["trace"][step : step + every]
            middle = sum(rates[:step]) + sum(rates[step : step + every]) / 2
            estimate.observe(_round(rows, middle, num_layers))
            step += every
        found.append(_point(record, branch, estimate))
    return found


def _round(rows: Sequence[Sequence[float | None]], middle: float, num_layers: int) -> Movement:
    """Return the reading of some steps, of each of which one layer was read."""

    def mean(column: int) -> float | None:
        known = [value for value in (row[column] for row in rows) if value is not None]
        return statistics.fmean(known) if known else None

    losses = [row[0] for row in rows if row[0] is not None]
    return Movement(
        statistics.fmean(losses),
        middle,
        tuple(mean(2 + layer) for layer in range(num_layers)),
        tuple(mean(2 + num_layers + layer) for layer in range(num_layers)),
    )


def _point(record: dict[str, Any], branch: dict[str, Any], estimate: HarmEstimate) -> Point:
    task, depth, at = TASKS[record["task"]], branch["depth"], branch["at"]
    shares = estimate.shares(0)
    share = math.nan if shares is None else shares[depth]
    harm = {key: branch["result"][key] - value for key, value in record["result"].items()}
    return {
        "task": task.name, "seed": record["seed"], "half": record["half"],
        "schedule": task.schedule, "optimizer": task.optimizer, "at": at / task.steps,
        "depth": depth, "rests": all(estimate.rests(layer) for layer in range(depth)),
        "predicted": share * estimate.gain(sum(record["rates"][at:])),
    } | {key: harm[key] for key in (*MEASURES, "accuracy")}  # fmt: skip


def area(scores: Sequence[float], positive: Sequence[bool]) -> float | None:
    """Return the area under the ROC curve; None where all are of one kind."""
    yes = [score for score, is_ in zip(scores, positive, strict=True) if is_]
    no = [score for score, is_ in zip(scores, positive, strict=True) if not is_]
    if not yes or not no:
        return None
    above = sum((a > b) + 0.5 * (a == b) for a in yes for b in no)
    return above / (len(yes) * len(no))


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None for fewer than three points."""
    if len(x) < 3:
        return None
    return statistics.correlation(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(v) + len(ordered) - 1 - ordered[::-1].index(v)) / 2 for v in values]


def _figures(points: Sequence[Point], measure: str) -> dict[str, Any]:
    """Return how well the prediction foretells one measure of harm."""
    predicted = [p["predicted"] for p in points]
    measured = [p[measure] for p in points]
    ratios = sorted(p["predicted"] / p[measure] for p in points if p[measure] > TELLING)
    resting = [p for p in points if p["rests"] and p["predicted"] <= HARMFUL]
    near = [p for p in points if p["rests"] and p["predicted"] <= NEAR]
    near_ratios = [p["predicted"] / p[measure] for p in near if p[measure] > TELLING]
    return {
        "count": len(points),
        "harmful": sum(m > HARMFUL for m in measured),
        "area": area(predicted, [m > HARMFUL for m in measured]),
        "correlation": correlation(predicted, measured),
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_95": [ratios[int(0.025 * len(ratios))], ratios[int(0.975 * (len(ratios) - 1))]]
        if ratios
        else None,
        "near": {
            "count": len(near),
            "telling": len(near_ratios),
            "ratio": statistics.median(near_ratios) if near_ratios else None,
            "within_two": sum(0.5 <= ratio <= 2 for ratio in near_ratios),
        },
        "allowed": len(resting),
        "worst_allowed": max((p[measure] for p in resting), default=None),
    }


def summarise(points: Sequence[Point]) -> dict[str, Any]:
    """Return the figures of each half, and of the fresh one by schedule, optimizer and task."""
    fresh = [p for p in points if p["half"] == "fresh"]
    kinds: dict[str, Callable[[Point], str]] = {
        "schedule": lambda p: str(p["schedule"]),
        "optimizer": lambda p: str(p["optimizer"]),
        "task": lambda p: f"{p['task']} {p['seed']}",
    }
    return {
        "halves": {
            half: {m: _figures([p for p in points if p["half"] == half], m) for m in MEASURES}
            for half in sorted({p["half"] for p in points})
        },
        "fresh": {
            kind: {
                name: {m: _figures([p for p in fresh if key(p) == name], m) for m in MEASURES}
                for name in sorted(set(map(key, fresh)))
            }
            for kind, key in kinds.items()
        },
    }


def summarise_policy(
    runs: Sequence[dict[str, Any]], plain: dict[tuple[str, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what each run under the policy lost against the plain run of its seed."""
    found = []
    for run in runs:
        base = plain[run["task"], run["seed"]]
        harm = {key: run["result"][key] - base["result"][key] for key in base["result"]}
        found.append(
            {
                "task": run["task"], "seed": run["seed"], "setting": run["method"],
                "half": base["half"], "budget": run["budget"], "predicted": run["predicted"],
                "harm": {key: harm[key] for key in (*MEASURES, "accuracy")},
                "saved": run["saved"], "moves": run["moves"], "unfrozen": run["unfrozen"],
                "drift": {m: base["twin"][m] - base["result"][m] for m in MEASURES},
            }
        )  # fmt: skip
    return found
