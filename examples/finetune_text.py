"""Fine-tune a frozen encoder on text, each batch padded to its longest sample: with and without.

A small encoder first learns to tell half of the packages of the standard library by their
docstrings. Then its first four blocks are frozen, and the rest learns the other packages: once
plainly, once with the cache, with the same seeds and the same order. The losses are the same; from
the second epoch on the frozen blocks are not run any more.

Run `python examples/finetune_text.py [--cache DIR]`.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from docstrings import PACKAGES, Docstrings, Encoder, pad
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from egeria_cache import ActivationCache, EgeriaLoader

NUM_FROZEN = 4
"""Blocks, of six."""
BATCH_SIZE = 32


@dataclass
class Run:
    """What one way to train gave."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)


def pretrain(model: Encoder, data: Any) -> None:
    """Train the whole model for two epochs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for words, labels in DataLoader(data, BATCH_SIZE, shuffle=True, collate_fn=pad):
            loss = F.cross_entropy(model(words), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def freeze(model: Encoder) -> None:
    """Freeze what comes first; the boundary finds itself from that."""
    for part in (model.words, model.positions, *model.blocks[:NUM_FROZEN]):
        part.requires_grad_(False)
        for parameter in part.parameters():
            parameter.grad = None


def train(model: nn.Module, loader: Any, bar: Any) -> Iterator[list[float]]:
    """Yield the losses of one epoch after the other."""
    active = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(active, lr=5e-4)
    while True:
        losses: list[Tensor] = []
        for words, labels in loader:
            loss = F.cross_entropy(model(words), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            bar()
        yield torch.stack(losses).tolist()


def run(model: nn.Module, loader: Any, epochs: int, bar: Any, cache: Any = None) -> Run:
    """Train for some epochs."""
    torch.manual_seed(1)  # of the order
    found, before = Run(), 0
    trained = train(model, loader, bar)
    for _ in range(epochs):
        started = time.perf_counter()
        found.losses += next(trained)
        found.seconds.append(time.perf_counter() - started)
        hits = 0 if cache is None else cache.stats().hits
        found.hits.append(hits - before)
        before = hits
    return found


def plainly(model: Encoder, data: Any, epochs: int, bar: Any) -> Run:
    """Train as ever."""
    loader = EgeriaLoader(data, BATCH_SIZE, shuffle=True, collate_fn=pad)
    return run(model, loader, epochs, bar)


def cached(model: Encoder, data: Any, epochs: int, bar: Any, directory: str) -> tuple[Run, Any]:
    """Train with the cache: two lines, and its directory; so short a run would else be computed."""
    with ActivationCache(model, directory, "auto", gate="always") as cache:  # +
        loader = EgeriaLoader(data, BATCH_SIZE, shuffle=True, collate_fn=pad, cache=cache)  # +
        found = run(model, loader, epochs, bar, cache)
        cache.flush()
        return found, cache.stats()


def show(console: Console, plain: Run, served: Run, num_samples: int) -> None:
    """Print both runs, epoch by epoch."""
    table = Table("epoch", "plain", "Egeria", "hits", "loss, plain", "loss, Egeria")
    num_batches = len(plain.losses) // len(plain.seconds)
    for epoch, (a, b) in enumerate(zip(plain.seconds, served.seconds, strict=True)):
        part = slice(epoch * num_batches, (epoch + 1) * num_batches)
        means = [sum(one.losses[part]) / num_batches for one in (plain, served)]
        hits = f"{served.hits[epoch]} of {num_samples}"
        table.add_row(str(epoch), f"{a:.2f} s", f"{b:.2f} s", hits, *(f"{m:.6f}" for m in means))
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Pre-train, freeze, train twice; return 1 if the losses differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", default=None, help="directory of the cache (default: temporary)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512, help="of each half of the packages")
    args = parser.parse_args(argv)

    console = Console(highlight=False)
    first, second = (_some(Docstrings(half), args.samples) for half in (PACKAGES[:5], PACKAGES[5:]))
    torch.manual_seed(0)
    model = Encoder(num_classes=5)
    pretrain(model, first)
    model.head = nn.Linear(model.head.in_features, 5)
    freeze(model)
    other = copy.deepcopy(model)

    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    num_steps = args.epochs * -(-len(second) // BATCH_SIZE)
    with progress, tempfile.TemporaryDirectory() as scratch:
        tasks = [progress.add_task(name, total=num_steps) for name in ("plain", "Egeria")]
        plain = plainly(model, second, args.epochs, lambda: progress.advance(tasks[0]))
        served, stats = cached(
            other, second, args.epochs, lambda: progress.advance(tasks[1]), args.cache or scratch
        )
    show(console, plain, served, len(second))

    worst = max(abs(a - b) for a, b in zip(plain.losses, served.losses, strict=True))
    console.print(f"the largest difference of two losses is {worst:.1e}")
    lengths = [len(words) for words, _ in second]
    own = stats.stored_bytes / max(stats.num_samples, 1)
    rest = own * max(lengths) * len(lengths) / sum(lengths)
    console.print(
        f"{own / 1e3:.1f} kB a sample are stored; padded to the longest they would be about "
        f"{rest / 1e3:.1f} kB, {rest / own:.1f} times as many"
    )
    if stats.why_not:
        console.print(f"not everything was cached: {stats.why_not}")
    return int(worst > 1e-5)


def _some(data: Docstrings, count: int) -> Any:
    """Return samples at equal distances."""
    return Subset(data, [int(i) for i in torch.linspace(0, len(data) - 1, min(count, len(data)))])


if __name__ == "__main__":
    raise SystemExit(main())
