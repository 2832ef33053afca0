"""Time to accuracy: Egeria, with and without its cache, against plain training and seven others.

    python -m benchmarks.time_to_accuracy [--task NAME ...] [--method NAME ...] [--seeds 3]
        [--render] [--json] [--quick]

Real data that every machine has: handwritten digits, and the text of Python's standard library.
A ResNet and a transformer from scratch, both again as fine-tuning, and sweeps of eight runs over
one frozen backbone. One schedule per task for all methods; the clock stands still while a run is
evaluated. Every finished run is kept in runs/time_to_accuracy/, so that the same command goes on
where an interrupted one was; --render only makes the tables from what is there. Writes
benchmarks/results/time_to_accuracy.json, .png (metric over time) and _speedups.png (not with
--quick).
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment, keep, parser, print_report, tell

from .findings import findings, verdicts
from .methods import METHODS
from .plots import plot
from .summary import summarise_sweep, summarise_task
from .sweep import SWEEPS, run_sweep, sweep_task
from .tasks import TASKS, Task, quick
from .train import train
from .work import Work

WORK = Path(__file__).parents[2] / "runs" / "time_to_accuracy"
SWEEP_METHODS = ("uncached", "cached")


def rotated(names: Sequence[str], seed: int) -> list[str]:
    """Return the methods in the order of this seed; `shortened` needs others' times, so it ends."""
    first = [name for name in names if name != "shortened"]
    turn = seed * max(1, len(first) // 3) % max(1, len(first))
    return first[turn:] + first[:turn] + [name for name in names if name == "shortened"]


def run_one(task: Task, name: str, seed: int, work: Work, directory: Path) -> dict[str, Any] | None:
    """Return the record of one run, from the working file or by training; None if it must wait."""
    fingerprint = task.fingerprint()
    found = work.find(task.name, name, seed, fingerprint)
    if found is not None:
        return found
    own, method = task, METHODS[name]
    if name == "shortened":
        plain = work.find(task.name, "plain", seed, fingerprint)
        cached = work.find(task.name, "egeria+cache", seed, fingerprint)
        if plain is None or cached is None:
            return None
        part = cached["seconds"] / plain["seconds"]
        own = replace(task, epochs=max(1, min(task.epochs, round(task.epochs * part))))
    problem = own.make(task, seed, directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix="run-") as scratch:
        run = train(own, method, seed, Path(scratch), problem=problem)
    fields = asdict(run)
    fields.pop("losses")
    resolution = 1 / len(problem.targets) if task.higher_is_better else 0.0
    record = {
        "task": task.name, "method": name, "seed": seed, "fingerprint": fingerprint,
        "epochs": own.epochs, "batch_size": task.batch_size, "resolution": resolution, **fields,
    }  # fmt: skip
    work.add(record)
    return record


def run_one_sweep(
    name: str, method: str, seed: int, work: Work, directory: Path, small: bool
) -> None:
    """Train the eight runs of one sweep, unless the working file has them."""
    task = sweep_task(name, small=small)
    if work.find(name, method, seed, task.fingerprint()) is None:
        cached, settings = method == "cached", 3 if small else 8
        record = run_sweep(task, cached=cached, seed=seed, directory=directory, settings=settings)
        key = {"task": name, "method": method, "seed": seed, "fingerprint": task.fingerprint()}
        work.add(key | record)


def render(options: argparse.Namespace, work: Work) -> dict[str, Any]:
    """Return the report of all finished runs under the present settings."""
    report: dict[str, Any] = {"environment": environment(options.seeds), "tasks": {}, "sweeps": {}}
    command: str = report["environment"]["command"]
    report["environment"]["command"] = re.sub(
        r" --render| --(work|note) ('[^']*'|\S+)", "", command
    )
    report["environment"]["note"] = options.note
    for name, task in options.tasks.items():
        found = (
            work.find(name, method, seed, task.fingerprint())
            for method in METHODS
            for seed in range(options.seeds)
        )
        runs = [record for record in found if record is not None]
        summary = None
        if runs:
            summary = summarise_task(
                runs,
                higher=task.higher_is_better,
                resolution=runs[0]["resolution"],
                relaxed=task.relaxed if task.higher_is_better else 2 * task.relaxed,
            )
        report["tasks"][name] = {
            "title": task.title, "about": task.about, "metric": task.metric,
            "settings": task.settings(), "summary": summary, "runs": runs,
            "complete": len(runs) == len(METHODS) * options.seeds,
        }  # fmt: skip
        if summary is not None:
            report["tasks"][name]["findings"] = findings(report["tasks"][name])
    for name in options.sweeps:
        task = sweep_task(name, small=options.quick)
        found = (
            work.find(name, method, seed, task.fingerprint())
            for method in SWEEP_METHODS
            for seed in range(options.seeds)
        )
        runs = [record for record in found if record is not None]
        report["sweeps"][name] = {
            "title": task.title, "boundary": SWEEPS[name], "settings": task.settings(),
            "summary": summarise_sweep(runs), "runs": runs,
            "complete": len(runs) == len(SWEEP_METHODS) * options.seeds,
        }  # fmt: skip
    report["methods"] = {name: method.about for name, method in METHODS.items()}
    report["verdicts"] = verdicts(report)
    return report


def _rounded(value: Any) -> Any:
    """Return plain values with four significant places behind the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def measure(options: argparse.Namespace, work: Work, directory: Path) -> None:
    """Do what is still missing; seed by seed, so that what there is can be compared."""
    started = time.perf_counter()

    def done(what: str) -> None:
        tell(f"{time.perf_counter() - started:6.0f} s  {what}")

    for seed in range(options.seeds):
        for name, task in options.tasks.items():
            for method in rotated(options.methods, seed):
                record = run_one(task, method, seed, work, directory)
                if record is not None:
                    seconds, final = record["seconds"], record["curve"][-1][2]
                    done(f"{name:16} {method:13} seed {seed}: {seconds:6.1f} s, {final:.4f}")
        for name in options.sweeps:
            for method in rotated(SWEEP_METHODS, seed):
                run_one_sweep(name, method, seed, work, directory, options.quick)
                done(f"{name:16} {method:13} seed {seed}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    names = [*TASKS, *SWEEPS]
    options_of = parser(__doc__)
    options_of.add_argument("--task", nargs="+", choices=names, default=names, help="these alone")
    options_of.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    options_of.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    options_of.add_argument("--threads", type=int, default=1, help="of torch, in its own thread")
    options_of.add_argument("--work", type=Path, default=WORK, help="where finished runs are kept")
    options_of.add_argument("--render", action="store_true", help="measure nothing")
    options_of.add_argument("--note", default="", help="about the machine; kept with the results")
    options = options_of.parse_args(argv)
    torch.set_num_threads(options.threads)
    logging.getLogger("egeria").setLevel(logging.ERROR)
    options.tasks = {name: TASKS[name] for name in options.task if name in TASKS}
    options.sweeps = [name for name in options.task if name in SWEEPS]
    options.methods = [name for name in METHODS if name in options.method]
    if options.quick:
        options.seeds = 1
        options.tasks = {name: quick(task) for name, task in options.tasks.items()}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) if options.quick else options.work
        directory.mkdir(parents=True, exist_ok=True)
        work = Work(directory / f"runs-{options.threads}-threads.jsonl")
        if not options.render:
            measure(options, work, directory)
        report = _rounded(render(options, work))
    print_report("time_to_accuracy", report, options)
    if not options.quick and (options.task == names or options.render):
        keep("time_to_accuracy", report, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
