"""A pipeline that follows its frozen front: a small vision transformer on digits, on four ranks.

`torchrun --nproc-per-node 4 examples/pipeline.py` trains it, freezes its front in two steps, moves
the blocks that are left, serves the front from the cache, and unfreezes. Then one process trains
the same blocks on the same batches, and the losses are compared.

Each rank loads a quarter of every batch. `--schedule 1F1B`, `--on-freeze stay`
and `--policy plasticity` (any policy known by name) change what happens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from digits import Digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, TensorDataset

from egeria_cache import EgeriaLoader, ShardAffineSampler
from egeria_core import StaticPolicy
from egeria_core.pipeline import ElasticPipeline, PipelineController

PATCH, WIDTH, MICROBATCHES = 4, 64, 8


class Stem(nn.Module):
    """Cuts images (B, 1, 16, 16) into 16 patches, and embeds them: (B, 16, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.embed(images).flatten(2).transpose(1, 2)
        return tokens + self.positions


class Head(nn.Module):
    """From the mean of all tokens to the scores of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.norm(tokens.mean(1)))
        return scores


def make_blocks() -> nn.Sequential:
    """Return the model in eight blocks, the same on every rank."""
    torch.manual_seed(0)
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem())
    for number in range(1, 7):
        blocks[f"block{number}"] = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
    blocks["head"] = Head()
    return nn.Sequential(blocks)


def make_optimizer(blocks: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over all blocks."""
    return torch.optim.AdamW(blocks.parameters(), lr=3e-3)


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def on_all_ranks(*numbers: float) -> list[float]:
    """Return the sums over all ranks."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return list(total.tolist())


def train(
    args: argparse.Namespace, data: TensorDataset, directory: str
) -> tuple[list[float], list[tuple[int, str | None]], dict[str, Tensor]]:
    """Train on all ranks; return the losses, the moves and the weights."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    blocks = make_blocks()
    optimizer = make_optimizer(blocks)
    pipeline = ElasticPipeline(
        blocks, optimizer, F.cross_entropy, microbatches=MICROBATCHES, schedule=args.schedule,
        on_freeze=args.on_freeze, cache=directory,
    )  # fmt: skip
    sampler = ShardAffineSampler(data, ranks, rank, drop_last=True)
    loader = EgeriaLoader(data, args.batch_size // ranks, sampler=sampler, cache=pipeline.cache)
    steps = len(loader)
    if args.policy == "schedule":
        policy: Any = StaticPolicy(
            {
                steps * (args.epochs // 4): "block1",
                steps * (args.epochs // 2): "block3",
                steps * (args.epochs - 1): None,
            }
        )
    else:
        policy = args.policy
    moved = 0.0

    def follow(event: Any) -> None:
        nonlocal moved
        before = moved
        (moved,) = on_all_ranks(pipeline.bytes_moved)
        plan = pipeline.plan
        say(
            f"  step {event.step}: frozen up to {event.boundary}; stages {plan.stages}; "
            f"{moved - before:,.0f} bytes moved"
        )

    controller = PipelineController(
        pipeline, policy, listeners=[follow], total_steps=args.epochs * steps
    )
    losses: list[float] = []
    say(f"{args.schedule}, {ranks} ranks, {len(blocks)} blocks, on_freeze={args.on_freeze}")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start, hits = time.perf_counter(), _hits(pipeline)
        for images, targets in loader:
            loss = pipeline.step(images, targets)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            controller.step(loss)
        seconds = time.perf_counter() - start
        (served,) = on_all_ranks(_hits(pipeline) - hits)
        say(
            f"epoch {epoch}: loss {sum(losses[-steps:]) / steps:.4f}, {seconds:5.2f} s, "
            f"{served:4.0f} of {len(sampler) * ranks} samples from the cache; by the plan a batch "
            f"takes {pipeline.plan.time():.3g} forwards of a block"
        )
        if pipeline.cache is not None:
            pipeline.cache.flush()
    weights = pipeline.full_state_dict()
    controller.close()
    pipeline.close()
    return losses, controller.schedule(), weights


def _hits(pipeline: ElasticPipeline) -> int:
    return 0 if pipeline.cache is None else pipeline.cache.stats().hits


def train_alone(
    args: argparse.Namespace, data: TensorDataset, moves: Sequence[tuple[int, str | None]]
) -> tuple[list[float], nn.Sequential]:
    """Train in one process on the same batches, frozen at the same steps."""
    model, ranks = make_blocks(), dist.get_world_size()
    optimizer = make_optimizer(model)
    names, frozen = [name for name, _ in model.named_children()], dict(moves)
    losses: list[float] = []
    for epoch in range(args.epochs):
        parts: list[Iterator[list[int]]] = []
        for rank in range(ranks):
            sampler = ShardAffineSampler(data, ranks, rank, drop_last=True)
            sampler.set_epoch(epoch)
            parts.append(iter(BatchSampler(sampler, args.batch_size // ranks, drop_last=False)))
        for batches in zip(*parts, strict=True):
            if len(losses) in frozen:
                boundary = frozen[len(losses)]
                first = 0 if boundary is None else names.index(boundary) + 1
                for number, block in enumerate(model):
                    block.requires_grad_(number >= first)
            images, targets = data[list(chain.from_iterable(batches))]
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the part of the held-out digits that is classified right."""
    test = Digits(train=False)
    return float(
        (model(test.images.double()).argmax(1) == torch.tensor(test.targets)).float().mean()
    )


def main(argv: list[str] | None = None) -> int:
    """Train on all ranks, then in one process, and compare; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--on-freeze", default="repartition")
    parser.add_argument("--policy", default="schedule")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=96, help="of all ranks together")
    parser.add_argument("--samples", type=int, default=1437)
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    # Adam magnifies rounding: in single precision two orders of the same sums drift apart by 1e-2
    # within 120 steps. In double precision what is left is what the pipeline does.
    torch.set_default_dtype(torch.float64)
    digits = Digits(train=True)
    targets = torch.tensor(digits.targets)
    data = TensorDataset(digits.images[: args.samples].double(), targets[: args.samples])
    # One directory for all ranks of this host; each rank stores the samples of its own shard.
    with tempfile.TemporaryDirectory() as scratch:
        shared = [scratch]
        dist.broadcast_object_list(shared)
        start = time.perf_counter()
        losses, moves, weights = train(args, data, shared[0])
        seconds = time.perf_counter() - start
        dist.barrier()
    equal = True
    if dist.get_rank() == 0:
        start = time.perf_counter()
        expected, model = train_alone(args, data, moves)
        alone = time.perf_counter() - start
        own = model.state_dict()
        loss_off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        weight_off = max(float((weights[name] - own[name]).abs().max()) for name in own)
        equal = loss_off < 1e-5 and weight_off < 1e-5
        print(
            f"{len(losses)} steps, last loss {losses[-1]:.6f}; one process {expected[-1]:.6f}\n"
            f"largest difference: {loss_off:.1e} of the losses, {weight_off:.1e} of the weights\n"
            f"held-out accuracy {accuracy(model):.3f}; {seconds:.0f} s, one process {alone:.0f} s"
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
