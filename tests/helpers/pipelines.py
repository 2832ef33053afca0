"""Pipelines on several gloo processes, and the same training in one process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import BatchSampler, Dataset

from egeria_cache import EgeriaLoader, ShardAffineSampler
from egeria_core import StaticPolicy
from egeria_core.pipeline import ElasticPipeline, PipelineController
from tests.helpers.gloo import run_ranks
from tests.helpers.steps import take_step

WIDTH, NUM_BLOCKS, NUM_SAMPLES = 8, 8, 60
GLOBAL_BATCH, MICROBATCHES = 16, 8
STEPS_PER_EPOCH = 4
"""Three whole batches, and one that leaves micro-batches half full and empty."""
TIMEOUT_S = 60.0
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    # It does not let grow what rounding changes, in runs whose boundary is not known beforehand.
    "calm": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3),
}


@dataclass(frozen=True)
class Case:
    """One training."""

    schedule: str = "GPipe"
    on_freeze: str = "repartition"
    optimizer: str = "adamw"
    has_cache: bool = True
    moves: tuple[tuple[int, str | None], ...] = ((0, None), (4, "1"), (12, "3"), (20, None))
    epochs: int = 6
    policy: Callable[[], Any] | None = None
    """In place of the moves."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the controller."""
    stop_at: int | None = None
    """Save everything after so many steps, and go on with new objects."""

    def __str__(self) -> str:
        kept = "" if self.has_cache else "-uncached"
        return f"{self.schedule}-{self.on_freeze}-{self.optimizer}{kept}-{self.stop_at}"


class Points(Dataset[tuple[Tensor, int]]):
    """Counts what is loaded."""

    fingerprint = "points"
    """So that no sample is read again to see whether the data set is what it was, ever so often."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.loaded.append(index)
        return self.rows[index], index % WIDTH


class Block(nn.Module):
    """A linear layer with a norm, and a buffer that a forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(self.norm(rows))) * self.scale + rows
        return result


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(NUM_BLOCKS)]


def alone(case: Case, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train in this process on the batches that the ranks bring together."""
    model, data = nn.Sequential(*make_blocks()), Points()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.8)
    samplers = [ShardAffineSampler(data, world, rank) for rank in range(world)]
    losses: list[float] = []
    moves = dict(case.moves)
    for epoch in range(case.epochs):
        parts: list[Iterator[list[int]]] = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            parts.append(iter(BatchSampler(sampler, GLOBAL_BATCH // world, drop_last=False)))
        for batches in zip(*parts, strict=True):
            if len(losses) in moves:
                name = moves[len(losses)]
                for index, block in enumerate(model):
                    block.requires_grad_(name is None or index > int(name))
                optimizer.zero_grad()
            pairs = [data[index] for index in chain.from_iterable(batches)]
            loss = F.cross_entropy(
                model(torch.stack([row for row, _ in pairs])),
                torch.tensor([target for _, target in pairs]),
            )
            losses.append(take_step(loss, optimizer).item())
            scheduler.step()
    return losses, dict(model.state_dict())


class Run:
    """One rank's objects."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        rank, world = dist.get_rank(), dist.get_world_size()
        self.blocks, self.data = make_blocks(), Points()
        self.optimizer = OPTIMIZERS[case.optimizer](
            [p for block in self.blocks for p in block.parameters()]
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 6, 0.8)
        self.pipeline = ElasticPipeline(
            self.blocks, self.optimizer, F.cross_entropy, microbatches=MICROBATCHES,
            schedule=case.schedule, on_freeze=case.on_freeze,  # type: ignore[arg-type]
            cache=directory if case.has_cache else None,
        )  # fmt: skip
        self.sampler = ShardAffineSampler(self.data, world, rank)
        self.loader = EgeriaLoader(
            self.data,
            GLOBAL_BATCH // world,
            sampler=self.sampler,
            cache=self.pipeline.cache,
            reuse=None,
        )
        policy = StaticPolicy(dict(case.moves)) if case.policy is None else case.policy()
        self.controller = PipelineController(self.pipeline, policy, **case.options)

    def state(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline.state_dict(), "controller": self.controller.state_dict(),
            "scheduler": self.scheduler.state_dict(), "loader": self.loader.state_dict(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.pipeline.load_state_dict(state["pipeline"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.controller.load_state_dict(state["controller"])
        self.loader.load_state_dict(state["loader"])

    def close(self) -> None:
        self.controller.close()
        self.pipeline.close()


def train(case: Case, directory: Path) -> dict[str, Any]:
    """Train as one rank; return what the test looks at."""
    run = Run(case, directory)
    found: dict[str, Any] = {"losses": [], "loaded": [], "hits": [], "misses": [], "audited": []}
    found["stages"], found["states"] = [], []
    found["messages"] = messages = []
    original = PipelineStage.get_bwd_send_ops

    def counting(stage: Any, chunk: int) -> Any:
        ops = original(stage, chunk)
        messages.extend((len(found["losses"]), stage.stage_index) for _ in ops)
        return ops

    PipelineStage.get_bwd_send_ops = counting  # type: ignore[method-assign]
    try:
        epoch = 0
        while epoch < case.epochs:
            run.sampler.set_epoch(epoch)
            cache, loaded = run.pipeline.cache, len(run.data.loaded)
            stats = None if cache is None else cache.stats()
            stopped = False
            for rows, targets in run.loader:
                plan = run.pipeline.plan
                found["stages"].append((plan.stages, plan.front))
                loss = run.pipeline.step(rows, targets)
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
                found["losses"].append(float(loss))
                run.controller.step(loss)
                if len(found["losses"]) == case.stop_at:
                    stopped = True
                    break
            if cache is not None:
                cache.flush()
            if stopped:
                path = directory.parent / f"{directory.name}-state-{dist.get_rank()}.pt"
                torch.save(run.state(), path)
                moved = run.pipeline.bytes_moved
                run.close()
                dist.barrier()
                run = Run(case, directory)
                run.load(torch.load(path, weights_only=True))
                run.pipeline.bytes_moved += moved
                continue
            if cache is not None and stats is not None:
                now = cache.stats()
                found["hits"].append(now.hits - stats.hits)
                found["misses"].append(now.misses - stats.misses)
                found["audited"].append(now.audited - stats.audited)
            found["loaded"].append(len(run.data.loaded) - loaded)
            epoch += 1
        found["weights"] = run.pipeline.full_state_dict()
        found["moved"] = run.pipeline.bytes_moved
        found["schedule"] = run.controller.schedule()
        found["history"] = list(run.controller.history)
    finally:
        PipelineStage.get_bwd_send_ops = original  # type: ignore[method-assign]
        run.close()
    return found


def _worker(rank: int, directory: Path, work: Any, cases: Any) -> list[Any]:
    found = []
    for number, case in enumerate(cases):
        found.append(work(case, directory / f"cache-{number}"))
        dist.barrier()
    return found


def spawn(
    world: int, directory: Path, cases: Sequence[Any], work: Callable[..., Any] = train
) -> list[list[Any]]:
    """Run all cases in one set of processes; return what each rank found, by case."""
    ranks = run_ranks(
        _worker, world, directory / "ranks", directory, work, list(cases),
        timeout_s=TIMEOUT_S * len(cases),
    )  # fmt: skip
    return [list(found) for found in zip(*ranks, strict=True)]
