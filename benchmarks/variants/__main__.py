"""What drawing random samples anew is worth: accuracy and time, by how long a draw is used.

    python -m benchmarks.variants [--seeds 5] [--epochs 20] [--json] [--quick]

Real data (handwritten digits, photographs, docstrings) whose samples are augmented at random, and
fronts of convolutions and of attention that were trained on other classes. The front is frozen, a
head trains behind it: with draws made anew in every epoch, by plain PyTorch; with draws that are
used for 2, 4, 8 and 16 epochs and for ever; with 2, 4 and 8 draws kept for ever; and with features
augmented behind the front instead. Everything in turns, for every seed. Then two larger models,
whose front is three quarters of a step, are trained for 12 epochs and more: for their time alone.
Writes benchmarks/results/variants.json and variants.png (not with --quick).
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.harness import RESULTS, environment, parser, publish, pyplot, tell
from benchmarks.variants.speed import MODELS, speed
from benchmarks.variants.tasks import TASKS, Augmented, Task, front_of, warmed_up
from egeria_cache import ActivationCache, EgeriaLoader, FeatureAugment

BATCH_SIZE = 40


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train the head."""

    reuse: int | None = None
    kept: int = 1
    is_served: bool = True
    """By a cache; else plain PyTorch, which draws anew in every epoch."""
    draws: bool = True
    """Whether samples are augmented."""
    augments_features: bool = False


FRESH = "fresh in every epoch"
ARMS = {
    FRESH: Arm(is_served=False),
    **{f"reuse={n}": Arm(n) for n in (2, 4, 8, 16)},
    "reuse=None": Arm(None),
    **{f"reuse=None, {n} variants": Arm(None, n) for n in (2, 4, 8)},
    "features alone": Arm(draws=False, augments_features=True),
    "reuse=4 and features": Arm(4, augments_features=True),
}


def run(task: Task, model: nn.Module, arm: Arm, epochs: int, seed: int, directory: Path) -> Any:
    """Train the head; return what it came to."""
    samples, labels, test_samples, test_labels = task.samples(False)
    data = Augmented(samples, labels, task.augment if arm.draws else task.plain)
    if arm.augments_features:
        FeatureAugment(*task.operations).before(model.get_submodule(task.head))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=task.lr, momentum=0.9, weight_decay=1e-4)
    front = [model.get_submodule(name) for name in front_of(model, task.boundary)]
    torch.manual_seed(seed)
    began, hits = time.process_time(), []
    with (
        ActivationCache(model, directory, task.boundary, gate="always")
        if arm.is_served
        else nullcontext()
    ) as cache:
        order = torch.Generator().manual_seed(seed)
        loader: Any = DataLoader(
            data, BATCH_SIZE, shuffle=True, collate_fn=task.collate, generator=order
        )
        if cache is not None:
            loader = EgeriaLoader(
                data, BATCH_SIZE, shuffle=True, collate_fn=task.collate, generator=order,
                cache=cache, seed=seed, reuse=arm.reuse, augmentation_variants=arm.kept,
            )  # fmt: skip
        times = []
        for _ in range(epochs):
            model.train()
            for module in front:
                module.eval()
            epoch_began, losses = time.process_time(), []
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            times.append(time.process_time() - epoch_began)
            hits.append(0 if cache is None else cache.stats().hits)
    spent_s = time.process_time() - began
    model.eval()
    plain = task.plain or (lambda sample: sample)
    with torch.no_grad():
        batch = [(plain(one), label) for one, label in zip(test_samples, test_labels, strict=True)]
        inputs, targets = task.collate(batch)
        correct = (model(inputs).argmax(1) == targets).float().mean().item()
    return {
        "accuracy": correct,
        "train_loss": statistics.mean(losses),
        "processor_s": spent_s,
        "later_epoch_s": statistics.median(times[epochs // 2 :]),
        "hits": hits[-1] / (epochs * len(data)),
        "hits_of_second_epoch": (hits[1] - hits[0]) / len(data),
    }


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means over the seeds, deviations, and processor time against fresh draws in the same turn."""
    found: dict[str, Any] = {}
    for name, own in runs.items():
        ratios = [
            a["processor_s"] / b["processor_s"] for a, b in zip(own, runs[FRESH], strict=True)
        ]
        later = [
            a["later_epoch_s"] / b["later_epoch_s"] for a, b in zip(own, runs[FRESH], strict=True)
        ]
        found[name] = {
            **{key: round(statistics.mean(one[key] for one in own), 4) for key in own[0]},
            "accuracy_std": round(_spread([one["accuracy"] for one in own]), 4),
            "time_ratio": round(statistics.median(ratios), 3),
            "later_ratio": round(statistics.median(later), 3),
        }
    return found


def fastest(arms: dict[str, Any]) -> str:
    """Return the way that takes least time of those that are served from the second epoch on, and
    within a deviation of fresh draws.
    """
    fresh = arms[FRESH]
    least = fresh["accuracy"] - max(fresh["accuracy_std"], 0.001)
    good = [
        name
        for name, one in arms.items()
        if name.startswith("reuse=") and one["hits_of_second_epoch"] and one["accuracy"] >= least
    ]
    return min(good, key=lambda name: arms[name]["time_ratio"], default=FRESH)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw accuracy over speed: one panel a task."""
    tasks = report["tasks"]
    figure, axes = pyplot().subplots(1, len(tasks), figsize=(4.2 * len(tasks), 3.6))
    for axis, (title, arms) in zip(axes, tasks.items(), strict=True):
        fresh = arms[FRESH]
        low, high = (100 * (fresh["accuracy"] + sign * fresh["accuracy_std"]) for sign in (-1, 1))
        axis.axhspan(low, high, color="tab:grey", alpha=0.2, linewidth=0)
        for number, (name, one) in enumerate(arms.items()):
            colour, at = _colour(name), (1 / one["later_ratio"], 100 * one["accuracy"])
            axis.errorbar(*at, 100 * one["accuracy_std"], fmt="o", color=colour, capsize=2,
                          markersize=4)  # fmt: skip
            axis.annotate(
                _short(name), at, fontsize=7, xytext=(4, 4 + 9 * (number % 3 - 1)),
                textcoords="offset points", color=colour,
            )  # fmt: skip
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("speed of a later epoch, by the processor, fresh draws = 1", fontsize=8)
        axis.margins(x=0.3)
    axes[0].set_ylabel("test accuracy, %")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _short(name: str) -> str:
    short = {
        " in every epoch": "", "reuse=None, ": "", "variants": "kept", "reuse=None": "1 kept",
        "reuse=": "r", " and features": " + f", "features alone": "f alone",
    }  # fmt: skip
    for long, brief in short.items():
        name = name.replace(long, brief)
    return name


def _colour(name: str) -> str:
    if name == FRESH:
        return "black"
    if "features" in name:
        return "tab:orange"
    return "tab:blue" if "None" in name else "tab:green"


def larger(*, quick: bool) -> dict[str, dict[str, float]]:
    """Return what runs of larger models take, by model and length."""
    found = {}
    for name, (_, _, runs) in list(MODELS.items())[: 1 if quick else None]:
        for epochs, num_samples in ((2, 96),) if quick else runs:
            one = speed(name, epochs=epochs, num_samples=num_samples)
            label = f"{name}, {epochs} epochs of {one['batches']}"
            found[label] = {key: round(value, 3) for key, value in one.items()}
            tell(f"{label}: {found[label]}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=5)
    options_of.add_argument("--epochs", type=int, default=20)
    options_of.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    options_of.add_argument(
        "--larger", action="store_true", help="larger models alone; the other results stay"
    )
    options = options_of.parse_args(argv)
    if options.larger:
        torch.set_num_threads(1)
        report = json.loads((RESULTS / "variants.json").read_text())
        report |= {"speed": larger(quick=options.quick), "speed_environment": environment()}
        publish("variants", report, options)
        return 0
    arms = dict(ARMS)
    if options.quick:
        options.seeds, options.epochs, options.tasks = 1, 4, options.tasks[:1]
    torch.set_num_threads(1)
    runs: dict[str, dict[str, list[Any]]] = {
        name: {arm: [] for arm in arms} for name in options.tasks
    }
    with tempfile.TemporaryDirectory() as text:
        for seed in range(options.seeds):
            for name in options.tasks:
                start = warmed_up(TASKS[name], seed)
                for number, (arm, how) in enumerate(arms.items()):
                    there = Path(text) / f"{seed}-{number}-{name[:5]}{len(name)}"
                    model = copy.deepcopy(start)
                    runs[name][arm].append(
                        run(TASKS[name], model, how, options.epochs, seed, there)
                    )
                accuracy = {arm: round(own[-1]["accuracy"], 3) for arm, own in runs[name].items()}
                tell(f"{name}, seed {seed}: {accuracy}")
    found = {name: summary(own) for name, own in runs.items()}
    report = {
        "environment": environment(options.seeds),
        "epochs": options.epochs,
        "batch_size": BATCH_SIZE,
        "tasks": found,
        "fastest": {name: fastest(arms) for name, arms in found.items()},
        "speed": larger(quick=options.quick),
    }
    publish("variants", report, options, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
