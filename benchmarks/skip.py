"""What a hit costs beside an oracle, and what the engine costs where it has nothing to skip.

    python benchmarks/skip.py [--rounds 40] [--threads 1]

The oracle trains the active part alone, on activations already in memory: nothing can be faster.
Every figure is the median of paired steps, taken in turns in one run. Prints a table and writes
benchmarks/results/skip.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_environment import environment
from torch import Tensor, nn
from torch.nn import functional as F

from egeria_cache.batch import Batch, BatchTensor
from egeria_cache.errors import BoundaryError
from egeria_cache.skip import Cut, SkipEngine

RESULTS = Path(__file__).parent / "results"


class Block(nn.Module):
    """A basic residual block."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.shortcut = nn.Conv2d(num_in, num_out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-20 for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        widths = [16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.ModuleList(
            Block(a, b, 2 if a != b else 1) for a, b in zip([16, *widths], widths, strict=False)
        )
        self.head = nn.Linear(64, 10)

    def suffix(self, x: Tensor, start: int) -> Tensor:
        """Run from block `start` on."""
        for block in list(self.blocks)[start:]:
            x = block(x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.suffix(self.stem(x), 0)


class Transformer(nn.Module):
    """A small encoder with a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(128, 10)

    def suffix(self, x: Tensor, start: int) -> Tensor:
        """Run from block `start` on."""
        for block in list(self.blocks)[start:]:
            x = block(x)
        result: Tensor = self.head(x.mean(1))
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.suffix(self.embed(x), 0)


class MemoryEntry:
    """All rows of a batch are hits, already in memory."""

    def __init__(self, cut: Cut, rows: dict[str, Tensor], size: int) -> None:
        self.cut = cut
        self.hit = np.ones(size, bool)
        self.alive = True
        self._rows = rows

    def load(self) -> dict[str, Tensor]:
        """Return the stored rows."""
        return self._rows


class MemoryHost:
    """Keeps the last captured rows."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}

    def cut_found(self, batch: Batch, cut: Cut) -> None:
        """Nothing to open."""

    def captured(
        self, batch: Batch, cut: Cut, rows: np.ndarray | None, tensors: dict[str, Tensor]
    ) -> None:
        """Remember the rows."""
        self.rows = {name: tensor.clone() for name, tensor in tensors.items()}

    def audited(self, batch: Batch, entry: object) -> None:
        """Audit nothing."""

    def audit_leaves(self, batch: Batch, rows: np.ndarray, loaded: object) -> bool:
        """Not called: nothing is audited."""
        return True

    def audit_failed(self, batch: Batch, rows: np.ndarray, finding: str) -> None:
        """Not called: nothing is audited."""

    def prefix_changed(self, reason: str) -> None:
        """Cannot happen here."""
        raise RuntimeError(reason)

    def refused(self, error: BoundaryError) -> None:
        """Cannot happen here."""
        raise error

    def thawed(self, name: str, cut: str | None) -> None:
        """No part of the prefix is ever trained."""
        raise AssertionError(name)

    def uncached(self, reason: str) -> None:
        """Every batch knows its samples."""
        raise AssertionError(reason)

    def front_returned(self, boundary: str, seconds: float, rows: int) -> None:
        """Nothing is measured here."""

    def note(self, kind: str, seconds: float, rows: int) -> None:
        """Not measured here."""


def make_batch(x: Tensor, entry: MemoryEntry | None = None) -> BatchTensor:
    """Tag a batch; with an entry it has no data."""
    leaves: dict[str, Any] = {"x": x if entry is None else x[:0]}
    batch = Batch(
        ids=range(len(x)), variant=0, loader_name="train", leaves=leaves,
        load_rows=lambda mask: {"x": x}, entry=entry,
    )  # fmt: skip
    if entry is None:
        return BatchTensor.wrap(x, batch, "x")
    return BatchTensor.without_data(x.to("meta"), batch, "x")


def train_step(
    run: Callable[[], Tensor], y: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """Return one step: forward, loss, backward, update."""

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(run(), y).backward()
        optimizer.step()

    return step


def paired_s(steps: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Run the steps in turns, `rounds` times after a warm-up; return the seconds of each."""
    for _ in range(3):
        for step in steps:
            step()
    times: list[list[float]] = [[] for _ in steps]
    for round_ in range(rounds):
        order = list(range(len(steps)))
        for i in order if round_ % 2 else order[::-1]:
            started = time.perf_counter()
            steps[i]()
            times[i].append(time.perf_counter() - started)
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the ratio of the medians."""
    return statistics.median(times) / statistics.median(base)


def measure_hits(kind: type[Any], x: Tensor, y: Tensor, cut_at: int, rounds: int) -> dict[str, Any]:
    """A step of hits, of the oracle and of the frozen model without the cache."""
    torch.manual_seed(0)
    model = kind()
    front = model.stem if hasattr(model, "stem") else model.embed
    for module in (front, *list(model.blocks)[: cut_at + 1]):
        module.requires_grad_(False).eval()
    oracle, plain = copy.deepcopy(model), copy.deepcopy(model)
    host = MemoryHost()
    engine = SkipEngine(model, host)
    engine.attach()
    engine.set_boundary(f"blocks.{cut_at}")
    model(make_batch(x))
    assert engine.cut is not None
    rows = host.rows
    (stored,) = rows.values()
    cut = engine.cut
    active = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for m in (model, oracle, plain)
    ]

    def hit() -> Tensor:
        result: Tensor = model(make_batch(x, MemoryEntry(cut, rows, len(x))))
        return result

    times = paired_s(
        [
            train_step(hit, y, active[0]),
            train_step(lambda: oracle.suffix(stored, cut_at + 1), y, active[1]),
            train_step(lambda: plain(x), y, active[2]),
        ],
        rounds,
    )
    recipe = engine._all()[0]
    assert recipe.guard is not None
    started = time.perf_counter()
    for _ in range(200):
        recipe.guard.changed()
    guard_s = (time.perf_counter() - started) / 200
    engine.detach()
    oracle_s = statistics.median(times[1])
    return {
        "model": kind.__name__,
        "boundary": f"blocks.{cut_at}",
        "oracle_ms": round(oracle_s * 1e3, 2),
        "hit_vs_oracle": round(ratio(times[0], times[1]), 3),
        "hit_vs_uncached": round(ratio(times[0], times[2]), 3),
        "guards_us": round(guard_s * 1e6, 1),
        "guards_vs_step": round(guard_s / statistics.median(times[0]), 4),
    }


def measure_idle(kind: type[Any], x: Tensor, y: Tensor, rounds: int) -> dict[str, Any]:
    """A step with the engine attached and nothing frozen, beside the plain model."""
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    engine = SkipEngine(model, MemoryHost())
    engine.attach()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    tagged = make_batch(x)
    times = paired_s(
        [
            train_step(lambda: model(tagged), y, optimizers[0]),
            train_step(lambda: plain(x), y, optimizers[1]),
        ],
        rounds,
    )
    count = 2000
    started = time.perf_counter()
    original, engine._forward = engine._forward, lambda *args, **kwargs: None
    for _ in range(count):
        model.forward(tagged)
    engine_s = (time.perf_counter() - started) / count
    engine._forward = original
    engine.detach()
    return {
        "model": kind.__name__,
        "step_ms": round(statistics.median(times[1]) * 1e3, 2),
        "idle_vs_plain": round(ratio(times[0], times[1]), 4),
        "engine_us": round(engine_s * 1e6, 1),
        "engine_vs_step": round(engine_s / statistics.median(times[1]), 5),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images, tokens = torch.randn(64, 3, 32, 32), torch.randint(1000, (32, 64))
    y_images, y_tokens = torch.randint(10, (64,)), torch.randint(10, (32,))
    hits = [
        measure_hits(kind, x, y, cut_at, options.rounds)
        for kind, x, y, cuts in (
            (ResNet, images, y_images, (0, 2, 5, 7)),
            (Transformer, tokens, y_tokens, (0, 2, 4)),
        )
        for cut_at in cuts
    ]
    idle = [
        measure_idle(kind, x, y, options.rounds)
        for kind, x, y in ((ResNet, images, y_images), (Transformer, tokens, y_tokens))
    ]
    for table in (hits, idle):
        print("  ".join(f"{key:>15}" for key in table[0]))
        for row in table:
            print("  ".join(f"{value!s:>15}" for value in row.values()))
        print()
    RESULTS.mkdir(exist_ok=True)
    report = {
        "environment": environment(),
        "rounds": options.rounds,
        "hits": hits,
        "idle": idle,
    }
    (RESULTS / "skip.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
