"""Time to accuracy: Egeria, with and without its cache, against plain training and other ways.

    python -m benchmarks.time_to_accuracy [--task NAME ...] [--method NAME ...]
        [--seeds [COUNT] [METHOD=COUNT ...]] [--jobs 2] [--render] [--json] [--quick]

Real data that every machine has: handwritten digits, and the text of Python's standard library.
A ResNet and a transformer from scratch, both again as fine-tuning, and sweeps of eight runs over
one frozen backbone. One schedule per task for all methods (FreezeOut, which is one, has its own);
the clock stands still while a run is evaluated. Five seeds of the methods that the targets are
about, three of the others. With --jobs several processes measure other seeds and tasks beside
each other, so that each has a neighbour that is as busy as itself. Every finished run is kept in
runs/time_to_accuracy/, so that the same command goes on where an interrupted one was; --render
only makes the tables from what is there. Writes benchmarks/results/time_to_accuracy.json, .png
(metric over time) and _speedups.png (not with --quick); of what is there only what is asked for:
sweeps, and tasks of which all runs are finished.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, environment, keep, parser, print_report, tell

from .findings import findings, verdicts
from .methods import METHODS
from .plots import plot
from .suggested import settled, suggestion_for
from .summary import summarise_sweep, summarise_task
from .sweep import SWEEPS, run_sweep, sweep_task
from .tasks import TASKS, Task, quick
from .train import make_loader, train
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
    method = METHODS[name]
    own = settled(task, directory) if method.policy == "static" else task
    if method.policy == "static" and not own.static_boundary:
        return None  # the probe advises against any
    fingerprint = own.fingerprint()
    found = work.find(task.name, name, seed, fingerprint)
    if found is not None:
        return found
    problem = own.make(task, seed, directory)
    total = None
    if name == "shortened":
        share = _share_of_time(task, seed, work, directory)
        if share is None:
            return None
        steps = task.epochs * len(make_loader(task, problem, seed))
        total = max(1, min(steps, round(steps * share)))
    with tempfile.TemporaryDirectory(dir=directory, prefix="run-") as scratch:
        run = train(own, method, seed, Path(scratch), problem=problem, total_steps=total)
    fields = asdict(run)
    fields.pop("losses")
    resolution = 1 / len(problem.targets) if task.higher_is_better else 0.0
    record = {
        "task": task.name, "method": name, "seed": seed, "fingerprint": fingerprint,
        "batch_size": task.batch_size, "resolution": resolution, "rows": len(problem.inputs),
        "static_boundary": own.static_boundary if method.policy == "static" else None, **fields,
    }  # fmt: skip
    work.add(record)
    return record


def _share_of_time(task: Task, seed: int, work: Work, directory: Path) -> float | None:
    """Return how much of plain's processor time the method takes that `shortened` is cut to."""
    plain = work.find(task.name, "plain", seed, task.fingerprint())
    other = METHODS[task.shortened_to]
    own = settled(task, directory) if other.policy == "static" else task
    theirs = work.find(task.name, other.name, seed, own.fingerprint())
    if plain is None or theirs is None:
        return None
    return float(theirs["cpu_seconds"] / plain["cpu_seconds"])


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


def finished(options: argparse.Namespace, work: Work, name: str, task: Task) -> list[Any]:
    """Return the records of a task under the present settings, in the methods' order."""
    found: list[dict[str, Any] | None] = []
    for method in METHODS.values():
        own = settled(task, options.directory) if method.policy == "static" else task
        seeds, fingerprint = range(options.counts[method.name]), own.fingerprint()
        found += [work.find(name, method.name, seed, fingerprint) for seed in seeds]
    return [record for record in found if record is not None]


def render(options: argparse.Namespace, work: Work) -> dict[str, Any]:
    """Return the report of all finished runs under the present settings."""
    most = max(options.counts.values())
    report: dict[str, Any] = {"environment": environment(most), "tasks": {}, "sweeps": {}}
    command: str = report["environment"]["command"]
    report["environment"]["command"] = re.sub(
        r" --render| --(work|note) ('[^']*'|\S+)", "", command
    )
    report["environment"]["note"] = options.note
    for name, task in options.tasks.items():
        runs = finished(options, work, name, task)
        summary = None
        if runs:
            summary = summarise_task(
                runs,
                higher=task.higher_is_better,
                resolution=runs[0]["resolution"],
                relaxed=task.relaxed if task.higher_is_better else 2 * task.relaxed,
                stopped_at=task.shortened_to,
            )
        report["tasks"][name] = {
            "title": task.title, "about": task.about, "metric": task.metric,
            "settings": task.settings(), "summary": summary, "runs": runs,
            "shortened_to": task.shortened_to,
            "suggestion": suggestion_for(task, options.directory) if task.suggest_steps else None,
            "complete": len(runs) == sum(options.counts.values()),
            "environment": report["environment"],
        }  # fmt: skip
        if summary is not None:
            report["tasks"][name]["findings"] = findings(report["tasks"][name])
    for name in options.sweeps:
        task = sweep_task(name, small=options.quick)
        found = (
            work.find(name, method, seed, task.fingerprint())
            for method in SWEEP_METHODS
            for seed in range(options.sweep_seeds)
        )
        runs = [record for record in found if record is not None]
        report["sweeps"][name] = {
            "title": task.title, "boundary": SWEEPS[name], "settings": task.settings(),
            "summary": summarise_sweep(runs), "runs": runs, "environment": report["environment"],
            "complete": len(runs) == len(SWEEP_METHODS) * options.sweep_seeds,
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


def units(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return what one process does at a stretch: a seed of a task, whose runs are compared."""
    most = max(options.counts.values())
    return [
        (name, seed)
        for seed in range(max(most, options.sweep_seeds))
        for name in [*options.tasks, *options.sweeps]
        if seed < (options.sweep_seeds if name in options.sweeps else most)
    ]


def measure(options: argparse.Namespace, work: Work, directory: Path) -> None:
    """Do what is still missing; seed by seed, so that what there is can be compared."""
    started = time.perf_counter()

    def done(what: str) -> None:
        tell(f"{time.perf_counter() - started:6.0f} s  {what}")

    number, jobs = options.share
    for name, seed in units(options)[number::jobs]:
        if name in options.sweeps:
            for method in rotated(SWEEP_METHODS, seed):
                run_one_sweep(name, method, seed, work, directory, options.quick)
                done(f"{name:16} {method:16} seed {seed}")
            continue
        wanted = [method for method in options.methods if seed < options.counts[method]]
        for method in rotated(wanted, seed):
            record = run_one(options.tasks[name], method, seed, work, directory)
            if record is not None:
                seconds, final = record["seconds"], record["curve"][-1][2]
                done(f"{name:16} {method:16} seed {seed}: {seconds:6.1f} s, {final:.4f}")


def measure_beside(options: argparse.Namespace, argv: Sequence[str], directory: Path) -> None:
    """Have several processes measure, each its own seeds and tasks."""
    for task in options.tasks.values():
        task.make(task, 0, directory)  # pre-trained once, before they start
        settled(task, directory)
    command = [sys.executable, "-m", "benchmarks.time_to_accuracy", *argv]
    started = [
        subprocess.Popen(
            [*command, "--share", f"{number}/{options.jobs}", "--work", str(directory)]
        )
        for number in range(options.jobs)
    ]
    try:
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.terminate()
    if any(codes):
        raise SystemExit(f"a process that measured ended with status {max(codes, key=abs)}")


def _counts(words: Sequence[str]) -> dict[str, int]:
    """Return how many seeds each method gets."""
    counts = {name: method.seeds for name, method in METHODS.items()}
    for word in words:
        name, equals, count = word.rpartition("=")
        if not count.isdigit() or (equals and name not in METHODS):
            raise SystemExit(f"--seeds takes a number or METHOD=NUMBER, got {word!r}")
        counts.update({one: int(count) for one in ([name] if equals else METHODS)})
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    names = [*TASKS, *SWEEPS]
    options_of = parser(__doc__)
    options_of.add_argument("--task", nargs="+", choices=names, default=names, help="these alone")
    options_of.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    options_of.add_argument(
        "--seeds", nargs="+", default=[], metavar="N", help="of all methods, or METHOD=N"
    )
    options_of.add_argument("--sweep-seeds", type=int, default=3, help="of the sweeps")
    options_of.add_argument("--jobs", type=int, default=1, help="processes beside each other")
    options_of.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
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
    options.counts = _counts(options.seeds)
    number, _, jobs = options.share.partition("/")
    options.share = int(number), int(jobs)
    if options.quick:
        options.counts, options.sweep_seeds = dict.fromkeys(METHODS, 1), 1
        options.tasks = {name: quick(task) for name, task in options.tasks.items()}
    with tempfile.TemporaryDirectory() as scratch:
        alone = options.share == (0, 1)
        directory = Path(scratch) if options.quick and alone else options.work
        options.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"runs-{options.threads}-threads.jsonl"
        if options.jobs > 1 and not options.render and alone:
            measure_beside(options, sys.argv[1:] if argv is None else argv, directory)
        elif not options.render:
            measure(options, Work(path), directory)
        if not alone:
            return 0
        report = _rounded(render(options, Work(path)))
    print_report("time_to_accuracy", report, options)
    if not options.quick and (options.task == names or options.render):
        keep("time_to_accuracy", report, plot)
    elif not options.quick:  # minutes, where all takes hours
        known = json.loads((RESULTS / "time_to_accuracy.json").read_text())
        whole = {name: task for name, task in report["tasks"].items() if task["complete"]}
        if whole or report["sweeps"]:
            known["tasks"] |= whole
            known["sweeps"] |= report["sweeps"]
            keep("time_to_accuracy", known | {"verdicts": _rounded(verdicts(known))}, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
