"""What a skipped forward saves, per model and boundary: the paper's seven models at real size.

    python -m benchmarks.forward_skip [--model NAME ...] [--boundary 50 | MODULE ...]
        [--device NAME] [--bf16] [--batch-size N] [--rounds N] [--json] [--quick]

Each cell: one training step with nothing frozen, with the front frozen and computed, with the front
read from the cache (the whole way: loader, disk store, ring), and of the rest alone on activations
that are in memory already, the oracle. They are taken in turns, and a ratio is the median over the
rounds of two steps of the same round. Then what is stored, what the first epoch pays for it, and
what the gate makes of it. Models have random weights, inputs are synthetic: see tasks.py. Writes
benchmarks/results/forward_skip.json and .png after each model (not with --quick or --boundary);
--model replaces that model's figures and leaves the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, environment, keep, parser, print_report, pyplot, tell
from egeria_cache.device import runs_late

from .cells import Bench, measure
from .tasks import ALL, Task

QUICK = ("ResNet-56", "Transformer-Tiny")


def known(path: Path) -> dict[str, Any]:
    """Return the models that earlier runs have measured."""
    if not path.exists():
        return {}
    return {model["model"]: model for model in json.loads(path.read_text())["models"]}


def in_order(models: dict[str, Any]) -> dict[str, Any]:
    """Return the report of the models."""
    return {"models": [models[name] for name in ALL if name in models]}


def run_model(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model at all of its boundaries."""
    where = environment(seeds=1, device=options.device)
    where["dtype"] = "bfloat16 autocast" if options.bf16 else "float32"
    device = torch.device(options.device)
    shape = task.accelerator if runs_late(device) else task.cpu
    if options.quick:
        shape = replace(shape, batch_size=min(8, shape.batch_size))
    if options.batch_size:
        shape = replace(shape, batch_size=options.batch_size)
    started = time.perf_counter()
    rounds = options.rounds or (2 if options.quick else task.rounds)
    bench = Bench.make(task, shape, device, rounds, options.bf16, task.build)
    cells = []
    for boundary, stop in chosen(task, bench.model, options).items():
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            cells.append(measure(bench, boundary, stop, Path(directory)))
        tell(f"{task.name} {boundary}: {time.perf_counter() - started:.0f} s")
    return {
        "model": task.name,
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "batch_size": shape.batch_size,
        "input_size": shape.size,
        "rounds": rounds,
        "data_set": task.data_set,
        "num_samples": task.num_samples,
        "num_samples_source": task.source,
        "seconds": round(time.perf_counter() - started, 1),
        "environment": where | {"load_average_after": round(os.getloadavg()[0], 2)},
        "cells": cells,
    }


def chosen(task: Task, model: Any, options: argparse.Namespace) -> dict[str, int]:
    """Return the boundaries to measure, and how many layers lie before each."""
    if not options.boundary:
        default = task.boundaries(model)
        return dict(list(default.items())[1:2]) if options.quick else default
    found: dict[str, int] = {}
    for text in options.boundary:
        if text.isdigit():
            found |= replace(task, shares=(int(text) / 100,)).boundaries(model)
        elif text in model.layers:
            found[text] = model.layers.index(text) + 1
        else:
            names = f"{model.layers[0]} ... {model.layers[-1]}"
            raise SystemExit(f"{task.name} has no layer {text!r}: a percentage, or one of {names}")
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    models = report["models"]
    figure, axes = pyplot().subplots(
        2, len(models), figsize=(2.3 * len(models), 5.4), sharey="row", squeeze=False
    )
    kinds = {"frozen": "tab:grey", "hit": "tab:green", "oracle": "tab:olive"}
    for column, model in enumerate(models):
        cells = model["cells"]
        labels = [f"{100 * cell['share']:.0f} %" for cell in cells]
        upper, lower = axes[0][column], axes[1][column]
        for i, (kind, colour) in enumerate(kinds.items()):
            at = [x + 0.27 * (i - 1) for x in range(len(cells))]
            values = [cell[f"{kind}_vs_full"] for cell in cells]
            upper.bar(at, values, 0.27, color=colour, label={"hit": "all hits"}.get(kind, kind))
        upper.axhline(1, color="black", linewidth=0.8)
        upper.set_title(model["model"], fontsize=10)
        for i, (name, colour) in enumerate((("raw", "tab:grey"), ("auto", "tab:green"))):
            sizes = [cell["codecs"][name]["bytes"] / cell["input_bytes"] for cell in cells]
            at = [x + 0.36 * (i - 0.5) for x in range(len(cells))]
            lower.bar(at, sizes, 0.36, color=colour, label={"auto": "as stored"}.get(name, name))
        lower.set_yscale("log")
        for axis in (upper, lower):
            axis.set_xticks(range(len(cells)), labels, fontsize=8)
            axis.tick_params(labelsize=8)
    axes[0][0].set_ylabel("time of a step / nothing frozen", fontsize=8)
    axes[1][0].set_ylabel("bytes a sample / input's", fontsize=8)
    axes[1][0].set_xlabel("layers frozen", fontsize=8)
    axes[0][0].legend(fontsize=7)
    axes[1][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--model", action="append", choices=list(ALL), help="repeatable")
    options_of.add_argument(
        "--boundary", action="append", help="percentage of the layers, or a layer; repeatable"
    )
    options_of.add_argument("--device", default="cpu")
    options_of.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    options_of.add_argument("--batch-size", type=int)
    options_of.add_argument("--rounds", type=int)
    options_of.add_argument("--threads", type=int, default=torch.get_num_threads())
    options_of.add_argument("--directory", help="where caches are made; default: the system's")
    options = options_of.parse_args(argv)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    kept = not (options.quick or options.boundary)
    device = torch.device(options.device).type
    name = "forward_skip" if device == "cpu" else f"forward_skip_{device}"
    models: dict[str, Any] = known(RESULTS / f"{name}.json") if kept else {}
    for one in options.model or (QUICK if options.quick else ALL):
        models[one] = run_model(ALL[one], options)
        gc.collect()
        if kept:
            keep(name, in_order(models), plot)
    print_report("forward_skip", in_order(models), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
