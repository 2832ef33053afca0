"""The whole chain on real data: train with and without Egeria, and compare.

A ResNet on handwritten digits, trained three times from the same seeds with the same schedule:

1. plain PyTorch: DataLoader, nothing frozen;
2. Egeria: layers are frozen as they converge, and the frozen front is read from the cache;
3. the frozen schedule of run 2 again, with every activation computed: its losses must be those of
   run 2, step by step.

Run `make demo`, or `python examples/demo.py --help`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_report import print_table, save_figure
from digits import Digits, ResNet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_core import FreezeController, StaticPolicy


@dataclass
class Settings:
    """One schedule for all runs."""

    epochs: int = 40
    batch_size: int = 72
    lr: float = 0.1
    drops: tuple[int, ...] = (24, 34)
    """Epochs at which the learning rate falls to a tenth."""
    seed: int = 0
    target: float = 0.97
    """Test accuracy whose time is reported."""
    evaluate_every: int = 4
    """Steps between two looks at the front layer."""
    blocks: int = 3
    size: int = 16


@dataclass
class Run:
    """What one training run measured."""

    name: str
    losses: list[float] = field(default_factory=list)
    """Per step."""
    accuracies: list[float] = field(default_factory=list)
    """On the held-out test split, per epoch."""
    seconds: list[float] = field(default_factory=list)
    """Training time (without the evaluation of the test split) at the end of each epoch."""
    frozen: list[float] = field(default_factory=list)
    """Fraction of the parameters frozen at the end of each epoch."""
    boundaries: list[str | None] = field(default_factory=list)
    """The frozen boundary at the end of each epoch."""

    def time_to(self, accuracy: float) -> float | None:
        """Return the training time at the first epoch that reached an accuracy, in seconds."""
        return next(
            (s for s, a in zip(self.seconds, self.accuracies, strict=True) if a >= accuracy), None
        )


def train(
    run: Run,
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loaders: tuple[Any, Any],
    progress: Progress,
    controller: FreezeController | None = None,
) -> Run:
    """An ordinary training loop; Egeria adds the one line marked below."""
    train_loader, test_loader = loaders
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(settings.drops), gamma=0.1)
    steps = settings.epochs * len(train_loader)
    task = progress.add_task(f"{run.name:<22}", total=steps, accuracy="")
    spent = 0.0
    for _ in range(settings.epochs):
        start = time.perf_counter()
        model.train()
        for images, targets in train_loader:
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if controller is not None:
                controller.step(loss)  # +
            run.losses.append(loss.item())
            progress.advance(task)
        schedule.step()
        spent += time.perf_counter() - start
        run.seconds.append(spent)
        run.accuracies.append(evaluate(model, test_loader))
        run.frozen.append(_frozen_fraction(model))
        run.boundaries.append(controller.boundary if controller is not None else None)
        progress.update(task, accuracy=f"accuracy {run.accuracies[-1]:.3f}")
    return run


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any) -> float:
    """Return the accuracy on a loader's samples."""
    model.eval()
    right = sum(int((model(images).argmax(1) == targets).sum()) for images, targets in loader)
    return right / len(loader.dataset)


def _frozen_fraction(model: nn.Module) -> float:
    total = sum(p.numel() for p in model.parameters())
    return sum(p.numel() for p in model.parameters() if not p.requires_grad) / total


def _setup(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Digits, Digits]:
    torch.manual_seed(settings.seed)
    model = ResNet(settings.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9, weight_decay=5e-4)
    data = Digits(train=True, size=settings.size), Digits(train=False, size=settings.size)
    return model, optimizer, *data


def run_plain(settings: Settings, progress: Progress) -> Run:
    """Plain PyTorch."""
    model, optimizer, train_set, test_set = _setup(settings)
    loaders = (
        DataLoader(train_set, settings.batch_size, shuffle=True),
        DataLoader(test_set, settings.batch_size),
    )
    return train(Run("plain PyTorch"), settings, model, optimizer, loaders, progress)


def run_egeria(
    settings: Settings,
    progress: Progress,
    directory: Path,
    *,
    replay: list[tuple[int, str | None]] | None = None,
) -> tuple[Run, FreezeController, dict[str, Any]]:
    """Egeria; with `replay`, a given freezing schedule with every activation computed."""
    model, optimizer, train_set, test_set = _setup(settings)
    name = "Egeria" if replay is None else "Egeria, cache unused"
    policy: Any = "plasticity" if replay is None else StaticPolicy(replay)
    gate = "always" if replay is None else "never"
    with (
        ActivationCache(model, directory, limit="1GB", gate=gate) as cache,
        FreezeController(
            model,
            optimizer,
            cache,
            policy,
            evaluate_every=settings.evaluate_every,
            evaluator="inline",  # freezes at the same steps in every run
        ) as controller,
    ):
        loaders = (
            EgeriaLoader(train_set, settings.batch_size, shuffle=True, cache=cache),
            EgeriaLoader(test_set, settings.batch_size, cache=cache, name="test"),
        )
        run = train(Run(name), settings, model, optimizer, loaders, progress, controller)
        cache.flush()
        stats = asdict(cache.stats()) | {"compression_ratio": cache.stats().compression_ratio}
    return run, controller, stats


def main(argv: list[str] | None = None) -> int:
    """Run the demo and write `demo.json` and `demo.png`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    args = parser.parse_args(argv)
    scale = args.epochs / Settings.epochs
    settings = Settings(
        epochs=args.epochs,
        seed=args.seed,
        drops=tuple(max(1, round(epoch * scale)) for epoch in Settings.drops),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[accuracy]}"),
    )  # fmt: skip
    with (
        Progress(*columns, console=console) as progress,
        tempfile.TemporaryDirectory(dir=args.out, prefix="cache-") as directory,
    ):
        plain = run_plain(settings, progress)
        egeria, controller, stats = run_egeria(settings, progress, Path(directory))
        uncached, _, _ = run_egeria(
            settings, progress, Path(directory), replay=controller.schedule()
        )
    differences = [abs(a - b) for a, b in zip(egeria.losses, uncached.losses, strict=True)]
    result = {
        "settings": asdict(settings),
        "runs": [asdict(run) for run in (plain, egeria, uncached)],
        "cache": stats,
        "largest_loss_difference": max(differences),
        "first_step_that_differs": next((i for i, d in enumerate(differences) if d), None),
        "schedule": controller.schedule(),
        "readings": controller.history.of("reading"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print_table(console, result, plain, egeria, uncached, settings.target)
    save_figure(args.out / "demo.png", result, plain, egeria)
    (args.out / "demo.json").write_text(json.dumps(result, indent=1))
    console.print(f"figure: {args.out / 'demo.png'}   numbers: {args.out / 'demo.json'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
