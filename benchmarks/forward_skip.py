"""What a skipped forward saves, per model and boundary: the paper's seven models at real size.

    python benchmarks/forward_skip.py [--model NAME ...] [--boundary 50 | MODULE ...]
        [--device cuda] [--bf16] [--batch-size N] [--rounds N] [--json] [--quick]

Each cell: one training step with nothing frozen, with the front frozen and computed, with the front
read from the cache (the whole way: loader, disk store, ring), and of the rest alone on activations
that are in memory already, the oracle. They are taken in turns, and a ratio is the median over the
rounds of two steps of the same round. Then what is stored, what the first epoch pays for it, and
what the gate makes of it. Models have random weights, inputs are synthetic: see
forward_skip_tasks.py. Writes benchmarks/results/forward_skip.json and .png after each model (not
with --quick or --boundary); --model replaces that model's figures and leaves the others.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from forward_skip_cells import CODECS, Bench, measure
from forward_skip_tasks import ALL, Task

RESULTS = Path(__file__).parent / "results"
QUICK = ("ResNet-56", "Transformer-Tiny")
TARGET = 1.05
"""Hits against the oracle."""
PAPER_STORAGE = (1.5, 5.3)
"""ResNet-50's activations against its input (Egeria, section 6.5)."""


def known(path: Path | None) -> list[dict[str, Any]]:
    """Return the models that earlier runs have measured."""
    if path is None or not path.exists():
        return []
    models: list[dict[str, Any]] = json.loads(path.read_text())["models"]
    return models


def run_model(
    task: Task, options: argparse.Namespace, environment: dict[str, Any]
) -> dict[str, Any]:
    """Measure one model at all of its boundaries."""
    device = torch.device(options.device)
    shape = task.cuda if device.type == "cuda" else task.cpu
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
        print(f"{task.name} {boundary}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
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
        "environment": environment | {"load_average_after": round(os.getloadavg()[0], 2)},
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


def environment(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    device = torch.device(options.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": shlex.join(["python", "benchmarks/forward_skip.py", *argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": 0,
        "dtype": "bfloat16 autocast" if options.bf16 else "float32",
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Set the figures beside their targets."""
    cells = [(m["model"], cell) for m in report["models"] for cell in m["cells"]]
    over = [f"{n} {c['boundary']}: {c['hit_vs_oracle']}" for n, c in cells
            if c["hit_vs_oracle"] > TARGET]  # fmt: skip
    wrong = [f"{n} {c['boundary']}" for n, c in cells if not c["gate"]["right"]]
    storage = [c["stored_vs_input"] for n, c in cells if n == "ResNet-50"]
    return {
        "cells": len(cells),
        "hits_over_target": over,
        "gate_wrong": wrong,
        "resnet50_stored_vs_input": [min(storage), max(storage)] if storage else None,
        "paper_resnet50_stored_vs_input": PAPER_STORAGE,
    }


def show(report: dict[str, Any]) -> None:
    console = Console(width=150)
    speed = Table(title="seconds a step; ratios are medians of pairs; "
                  "work: hits/oracle in processor seconds")  # fmt: skip
    for title in (
        "model", "boundary", "%", "full", "frozen", "hits", "oracle", "frozen/full", "hits/full",
        "hits/frozen", "hits/oracle", "work", "pays from", "gate",
    ):  # fmt: skip
        speed.add_column(title, justify="left" if title in ("model", "boundary") else "right")
    storage = Table(title="bytes a sample, and compression (raw / stored)")
    for title in ("model", "boundary", "input", "raw", "stored", "x input", *CODECS[1:],
                  "data set", "GB"):  # fmt: skip
        storage.add_column(title, justify="left" if title in ("model", "boundary") else "right")
    for model in report["models"]:
        for cell in model["cells"]:
            gate, step = cell["gate"], cell["step_s"]
            decision = "skips" if gate["skips"] else "computes"
            if gate["skips"] and gate["cut"] != cell["boundary"]:
                decision += f" at {gate['cut']}"
            epoch = cell["break_even_epoch"]
            speed.add_row(
                model["model"], cell["boundary"], f"{100 * cell['share']:.0f}",
                *(f"{step[name]:.3f}" for name in ("full", "frozen", "hit", "oracle")),
                *(f"{cell[name]:.2f}" for name in ("frozen_vs_full", "hit_vs_full")),
                *(f"{cell[name]:.3f}"
                  for name in ("hit_vs_frozen", "hit_vs_oracle", "hit_vs_oracle_work")),
                "never" if epoch is None else f"epoch {epoch:.1f}",
                f"{decision}, {'right' if gate['right'] else 'WRONG'}",
            )  # fmt: skip
            storage.add_row(
                model["model"], cell["boundary"],
                *(f"{cell[name]:,}" for name in ("input_bytes", "raw_bytes", "stored_bytes")),
                f"{cell['stored_vs_input']:.2f}",
                *(f"{cell['codecs'][codec]['ratio']:.2f}" for codec in CODECS[1:]),
                model["data_set"], f"{cell['data_set_bytes'] / 1e9:,.1f}",
            )  # fmt: skip
    console.print(speed)
    console.print(storage)
    for model in report["models"]:
        for cell in model["cells"]:
            console.print(
                f"gate, {model['model']} {cell['boundary']}: {cell['gate']['reason']}",
                highlight=False,
            )
    found = report["summary"]
    console.print(
        f"hits within {TARGET}x of the oracle: {found['cells'] - len(found['hits_over_target'])} "
        f"of {found['cells']} cells; over: {found['hits_over_target'] or 'none'}"
    )
    console.print(
        f"gate right: {found['cells'] - len(found['gate_wrong'])} of {found['cells']} cells; "
        f"wrong: {found['gate_wrong'] or 'none'}"
    )
    if found["resnet50_stored_vs_input"]:
        low, high = found["resnet50_stored_vs_input"]
        console.print(
            f"ResNet-50 stores {low:.2f} to {high:.2f} times its fp32 input; the paper: "
            f"{PAPER_STORAGE[0]} to {PAPER_STORAGE[1]}"
        )


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    models = report["models"]
    figure, axes = plt.subplots(
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", choices=list(ALL), help="this one; repeatable")
    parser.add_argument(
        "--boundary", action="append", help="percentage of the layers, or a layer; repeatable"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--directory", help="where caches are made; default: the system's")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--quick", action="store_true", help="two small models, one boundary")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    words = sys.argv[1:] if argv is None else argv
    report: dict[str, Any] = {}
    path = None
    if not (options.quick or options.boundary):
        RESULTS.mkdir(exist_ok=True)
        suffix = "" if options.device == "cpu" else "_" + torch.device(options.device).type
        path = RESULTS / f"forward_skip{suffix}.json"
    names = options.model or (QUICK if options.quick else ALL)
    models: dict[str, Any] = {}
    for name in names:
        models[name] = run_model(ALL[name], options, environment(options, words))
        gc.collect()
        models = {m["model"]: m for m in known(path)} | models
        report = {"models": [models[name] for name in ALL if name in models]}
        report["summary"] = summary(report)
        if path is not None:
            path.write_text(json.dumps(report, indent=2) + "\n")
            plot(report, path.with_suffix(".png"))
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
