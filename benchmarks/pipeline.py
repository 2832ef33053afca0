"""Units that a real pipeline takes when its front freezes, against those on paper.

Four ranks, eight blocks that sleep for half a unit in forward and in backward, six micro-batches,
the first half frozen. Sleeping blocks take no CPU, so that the schedule is measured and not the
machine. `paper` is what `count_bubbles` says; everything above it is messages and bookkeeping.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.harness import environment, parser, publish, tell
from benchmarks.schedules import Layout, count_bubbles
from egeria_cache import EgeriaLoader, ShardAffineSampler
from egeria_core.pipeline import ElasticPipeline, OnFreeze

RANKS, BLOCKS, FROZEN, MICROBATCHES, ROWS, WIDTH = 4, 8, 4, 6, 24, 16
STEPS = 3
"""Batches in an epoch."""
WARM_UP = 2
"""Epochs before: in the first, blocks freeze after one batch; then all of the cache is filled."""
TARGET = 0.10
"""How far what is measured may be from paper."""
LAYOUTS: tuple[tuple[str, Layout | None, OnFreeze, bool], ...] = (
    ("nothing frozen", None, "stay", False),
    ("frozen, schedule kept", "kept", "stay", False),
    ("frozen, stages built anew", "rebuilt", "stay", False),
    ("front cached, two ranks left", "cached", "stay", True),
    ("front cached, active blocks on four ranks", "repartition", "repartition", True),
)
"""Name, layout on paper, and what the pipeline is told; whether it has a cache."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return rows * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(0), None


class Sleeper(nn.Module):
    """Takes the same time in forward and, if anything is trained at or before it, in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows times the weight, late."""
        result: Tensor = _Sleep.apply(rows, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return result


def measure(
    schedule: str,
    layout: tuple[str, Layout | None, OnFreeze, bool],
    unit_s: float,
    epochs: int,
    directory: Path,
) -> dict[str, Any]:
    """Train as one rank; return what a batch takes, in units."""
    name, on_paper, on_freeze, has_cache = layout
    blocks = [Sleeper(unit_s * RANKS / BLOCKS) for _ in range(BLOCKS)]
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], lr=1e-3)
    pipeline = ElasticPipeline(
        blocks, optimizer, F.cross_entropy, microbatches=MICROBATCHES, schedule=schedule,
        on_freeze=on_freeze, cache=directory if has_cache else None,
    )  # fmt: skip
    rows = torch.randn(ROWS * STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, torch.arange(len(rows)) % WIDTH)
    sampler = ShardAffineSampler(data, RANKS, dist.get_rank())
    loader = EgeriaLoader(data, ROWS // RANKS, sampler=sampler, cache=pipeline.cache)
    times: list[float] = []
    before = 0
    frozen = 0 if on_paper is None else FROZEN
    for epoch in range(WARM_UP + epochs):
        sampler.set_epoch(epoch)
        if epoch == WARM_UP and pipeline.cache is not None:
            before = pipeline.cache.stats().hits
        for number, (inputs, targets) in enumerate(loader):
            if frozen and (epoch, number) == (0, 1):
                for block in blocks[:frozen]:
                    block.requires_grad_(False)
                    block.weight.grad = None
                if on_paper != "kept":
                    pipeline.freeze_to(frozen)
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(inputs, targets)
            dist.barrier()
            if epoch >= WARM_UP:
                times.append((time.perf_counter() - start) / unit_s)
            optimizer.step()
            optimizer.zero_grad()
        if pipeline.cache is not None:
            pipeline.cache.flush()
    hits = None if pipeline.cache is None else pipeline.cache.stats().hits - before
    pipeline.close()
    paper = count_bubbles(
        schedule, RANKS, MICROBATCHES, frozen * RANKS // BLOCKS, layout=on_paper or "kept"
    )
    median = statistics.median(times)
    return {
        "layout": name,
        "paper": paper.time,
        "measured": round(median, 2),
        "off": round(median / paper.time - 1, 4),
        "worst": round(max(times), 2),
        "bubbles": paper.bubbles,
        "all_idle": paper.idle,
        "hit_rate": None if hits is None else hits / (epochs * len(data) // RANKS),
    }


def _worker(rank: int, port: int, unit_s: float, epochs: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found: dict[str, list[dict[str, Any]]] = {}
    for schedule in ("GPipe", "1F1B"):
        found[schedule] = []
        for number, layout in enumerate(LAYOUTS):
            if rank == 0:
                tell(f"{schedule}: {layout[0]}")
            path = Path(directory) / f"{schedule}-{number}"
            found[schedule].append(measure(schedule, layout, unit_s, epochs, path))
    if rank == 0:
        torch.save(found, Path(directory) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Measure every layout under both schedules; return 1 if one is too far from paper."""
    made = parser(__doc__)
    made.add_argument("--unit", type=float, default=0.2, help="seconds of one unit")
    made.add_argument("--epochs", type=int, default=2, help="measured, of three batches each")
    options = made.parse_args(argv)
    unit_s, epochs = (0.06, 1) if options.quick else (options.unit, options.epochs)
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(_worker, args=(port, unit_s, epochs, directory), nprocs=RANKS)
        found = torch.load(Path(directory) / "found.pt", weights_only=True)
    furthest = max(abs(row["off"]) for rows in found.values() for row in rows)
    report = {
        "environment": environment(),
        "unit_s": unit_s,
        "batches": epochs * STEPS,
        "units": found,
        "furthest_from_paper": furthest,
        "target": TARGET,
        "met": furthest <= TARGET,
    }
    publish("pipeline", report, options)
    return 0 if options.quick or furthest <= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
