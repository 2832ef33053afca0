"""Does the predicted harm of freezing foretell the measured one?

    python -m benchmarks.harm [--half tuning fresh] [--threads 1] [--render] [--json] [--quick]

Every run of tasks.RUNS is trained plain, with all readings kept, and branched: copies of its state
at several moments freeze the first layers and train on to the end of the same schedule. Harm is the
final loss of a branch less that of the plain run. Finished runs are kept in runs/harm/, so that the
same command goes on where an interrupted one was; --render only makes the tables. Writes
benchmarks/results/harm.json and .png (not with --quick).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment, parser, publish, tell
from benchmarks.time_to_accuracy.work import Work

from .branch import run_plain
from .plots import plot
from .policy import VARIANTS, run_policy
from .summary import points_of, summarise, summarise_policy
from .tasks import RUNS, TASKS

QUICK_STEPS = 40
WORK = Path(__file__).parents[2] / "runs" / "harm"


def measure(options: argparse.Namespace, work: Work) -> None:
    """Do what is still missing: the branched runs, and then the runs under the policy."""
    for name, seed, half in RUNS:
        task = replace(TASKS[name], steps=QUICK_STEPS) if options.quick else TASKS[name]
        key = {"task": name, "method": "branches", "seed": seed, "fingerprint": task.fingerprint()}
        if half in options.half and not _found(work, key):
            started = time.perf_counter()
            plain, branches = run_plain(task, seed)
            work.add(key | {"half": half, "branches": branches} | plain)
            tell(f"{name} {seed} ({half}): {time.perf_counter() - started:.0f} s")
        if options.quick:
            break
    for variant, setting in VARIANTS.items():
        for name, seed, _ in RUNS:
            task = replace(TASKS[name], steps=QUICK_STEPS) if options.quick else TASKS[name]
            key = {"task": name, "method": variant, "seed": seed, "fingerprint": task.fingerprint()}
            if seed in setting.seeds and not _found(work, key):
                started = time.perf_counter()
                work.add(key | run_policy(task, setting, seed))
                tell(f"{name} {seed} {variant}: {time.perf_counter() - started:.0f} s")
            if options.quick:
                break


def _found(work: Work, key: dict[str, Any]) -> bool:
    return work.find(key["task"], key["method"], key["seed"], key["fingerprint"]) is not None


def render(work: Work, *, quick: bool) -> dict[str, Any]:
    """Return the report of all finished runs under the present settings."""
    settings = {
        name: replace(task, steps=QUICK_STEPS).fingerprint() if quick else task.fingerprint()
        for name, task in TASKS.items()
    }
    branched = [work.find(name, "branches", seed, settings[name]) for name, seed, _ in RUNS]
    plain = {(r["task"], r["seed"]): r for r in branched if r is not None}
    points = [point for record in plain.values() for point in points_of(record)]
    runs = [
        work.find(name, variant, seed, settings[name])
        for variant in VARIANTS
        for name, seed in plain
    ]
    report = {
        "environment": environment(sorted({seed for _, seed in plain})),
        "settings": {name: asdict(task) for name, task in TASKS.items()},
        "variants": {name: asdict(variant) for name, variant in VARIANTS.items()},
        "summary": summarise(points),
        "policy": summarise_policy([run for run in runs if run is not None], plain),
        "points": points,
    }
    rounded: dict[str, Any] = _rounded(report)
    return rounded


def _rounded(value: Any) -> Any:
    """Return plain values with four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--half", nargs="+", default=["tuning", "fresh"], help="these alone")
    options_of.add_argument("--threads", type=int, default=1, help="of torch")
    options_of.add_argument("--work", type=Path, default=WORK, help="where finished runs are kept")
    options_of.add_argument("--render", action="store_true", help="measure nothing")
    options = options_of.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        work = Work((Path(scratch) if options.quick else options.work) / "runs.jsonl")
        if not options.render:
            measure(options, work)
        report = render(work, quick=options.quick)
    publish("harm", report, options, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
