"""What K augmented versions of each sample cost in the cache, and what they bring.

    python -m benchmarks.variants [--seeds 3] [--epochs 32] [--json] [--quick]

Handwritten digits, a small ResNet, few training images, so that augmentation matters. The network
trains as a whole first; then two thirds of it are frozen, and the rest trains on with K = 1, 4, 16
cached versions of each sample, and with a fresh version in every epoch, uncached. Writes
benchmarks/results/variants.json and variants.png (not with --quick).
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from digits import Digits, ResNet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset

from benchmarks.harness import environment, parser, publish, pyplot
from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.arguments import Gate

VARIANTS = (1, 4, 16, None)
"""None: a fresh version in every epoch, and no cache."""
WARM_EPOCHS = 12


def train_epoch(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for images, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()


@torch.no_grad()
def test(model: nn.Module) -> tuple[float, float]:
    """Accuracy and mean loss on the held-out part."""
    data = Digits(train=False)
    model.eval()
    logits, targets = model(data.images), torch.tensor(data.targets)
    accuracy = (logits.argmax(1) == targets).float().mean().item()
    return accuracy, F.cross_entropy(logits, targets).item()


def warm_up(data: Any, seed: int) -> ResNet:
    """Train the whole network for a while."""
    torch.manual_seed(seed)
    model = ResNet(num_blocks=1, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader: Any = EgeriaLoader(data, 64, shuffle=True, seed=seed)
    for _ in range(WARM_EPOCHS):
        train_epoch(model, loader, optimizer)
    return model


def train_frozen(
    model: ResNet, data: Any, variants: int | None, epochs: int, seed: int, directory: Path
) -> dict[str, Any]:
    """Freeze up to `layer2` and train the rest."""
    for module in (model.conv1, model.bn1, model.layer1, model.layer2):
        module.requires_grad_(False)
    active = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(active, lr=0.02, momentum=0.9, weight_decay=1e-4)
    gate: Gate = "never" if variants is None else "always"
    torch.manual_seed(seed)
    with ActivationCache(model, directory, "layer2", gate=gate) as cache:
        loader: Any = EgeriaLoader(
            data, 64, shuffle=True, cache=cache, seed=seed,
            augmentation_variants=epochs if variants is None else variants,
        )  # fmt: skip
        first_whole, seen = None, 0
        started = time.perf_counter()
        for epoch in range(epochs):
            train_epoch(model, loader, optimizer)
            cache.flush()
            misses = cache.stats().misses
            if misses == seen and variants is not None and first_whole is None:
                first_whole = epoch
            seen = misses
        elapsed = time.perf_counter() - started
        stats = cache.stats()
    accuracy, loss = test(model)
    return {
        "accuracy": accuracy,
        "test_loss": loss,
        "epochs_until_all_hits": first_whole,
        "disk_bytes": stats.bytes_on_disk if variants is not None else 0,
        "hit_rate": stats.hit_rate,
        "seconds": elapsed,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds; accuracy and loss with their standard deviation."""

    def spread(key: str) -> float:
        return statistics.stdev(run[key] for run in runs) if len(runs) > 1 else 0.0

    result: dict[str, Any] = {}
    for key in ("accuracy", "test_loss"):
        result[key] = round(statistics.mean(run[key] for run in runs), 4)
        result[f"{key}_std"] = round(spread(key), 4)
    for key in ("disk_bytes", "hit_rate", "seconds"):
        result[key] = round(statistics.mean(run[key] for run in runs), 3)
    result["epochs_until_all_hits"] = runs[0]["epochs_until_all_hits"]
    return result


def plot(report: dict[str, Any], path: Path) -> None:
    rows = report["variants"]
    names = list(rows)
    figure, axes = pyplot().subplots(1, 4, figsize=(12, 3))
    for axis, (key, scale, title) in zip(
        axes,
        (
            ("accuracy", 100, "test accuracy, %"),
            ("test_loss", 1, "test loss"),
            ("disk_bytes", 1e-6, "disk, MB"),
            ("seconds", 1, "frozen epochs, s"),
        ),
        strict=True,
    ):
        values = [rows[name][key] * scale for name in names]
        errors = [rows[name].get(f"{key}_std", 0) * scale for name in names]
        colours = ["tab:green"] * (len(names) - 1) + ["tab:grey"]
        bars = axis.bar(names, values, yerr=errors if any(errors) else None, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.2)
        if key == "accuracy":
            axis.set_ylim(min(values) - 3, 100)
    for axis in axes:
        axis.set_xlabel("versions of each sample; fresh: uncached")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=3)
    options_of.add_argument("--epochs", type=int, default=32)
    options_of.add_argument("--samples", type=int, default=320)
    options = options_of.parse_args(argv)
    if options.quick:
        options.seeds, options.epochs, options.samples = 1, 6, 128
    torch.set_num_threads(1)
    data = Subset(Digits(train=True), range(options.samples))
    runs: dict[str, list[dict[str, Any]]] = {}
    starts = []
    with tempfile.TemporaryDirectory() as text:
        for seed in range(options.seeds):
            start = warm_up(data, seed)
            starts.append(dict(zip(("accuracy", "test_loss"), test(start), strict=True)))
            for variants in VARIANTS:
                name = "fresh" if variants is None else str(variants)
                run = train_frozen(
                    copy.deepcopy(start), data, variants, options.epochs, seed,
                    Path(text) / f"{seed}-{variants}",
                )  # fmt: skip
                runs.setdefault(name, []).append(run)
    report = {
        "environment": environment(options.seeds),
        "num_samples": options.samples,
        "epochs": options.epochs,
        "seeds": options.seeds,
        "before_freezing": starts,
        "variants": {name: summary(own) for name, own in runs.items()},
    }
    publish("variants", report, options, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
