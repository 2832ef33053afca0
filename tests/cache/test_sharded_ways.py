"""Every way to call `fully_shard`, with a cache: the same losses as one process, and hits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, EgeriaLoader, ShardAffineSampler
from egeria_cache.events import BoundaryMoved
from tests.helpers.gloo import run_ranks
from tests.helpers.sharded import Block, Blocks, dataset, freeze, shard, train

WAYS = ("grouped", "root alone", "not resharded", "prefetched", "offloaded", "checkpointed")


def made(way: str) -> Blocks:
    model = Blocks()
    if way == "grouped":
        fully_shard([model.blocks[0], model.blocks[1]])
        fully_shard([model.blocks[2], model.blocks[3]])
        return fully_shard(model)
    if way == "root alone":
        return fully_shard(model)
    if way == "not resharded":
        return shard(model, reshard_after_forward=False)
    if way == "offloaded":
        return shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if way == "hybrid":
        mesh = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards")
        )
        return shard(model, mesh=mesh)
    if way == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    if way == "compiled":
        for block in model.blocks:
            block.compile(backend="eager")
    shard(model)
    if way == "prefetched":
        blocks: Any = list(model.blocks)
        model.set_modules_to_forward_prefetch([blocks[0]])  # type: ignore[operator]
        for here, following in itertools.pairwise(blocks):
            here.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([here])
    return model


def run(model: Blocks, loader: Any, sampler: Any, cache: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses: list[float] = []
    for epoch in range(7):
        if epoch in (1, 4, 5):
            boundary = None if epoch == 4 else "blocks.1"
            freeze(model, 2 if boundary else 0)
            if cache is not None:
                cache.on_boundary_moved(BoundaryMoved(8 * epoch, boundary, None, "as planned"))
        sampler.set_epoch(epoch)
        losses += train(model, optimizer, loader)
        if cache is not None:
            cache.flush()
    return losses


def worker(rank: int, directory: Path, ways: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    world = dist.get_world_size()
    for way in ways:
        model = made(way)
        with ActivationCache(model, directory / way, gate="always", audit_rate=0) as cache:
            sampler = ShardAffineSampler(dataset(), world, rank, num_shards=4, seed=1)
            loader = EgeriaLoader(
                dataset(), batch_size=8 // world, sampler=sampler, cache=cache, seed=0
            )
            losses = run(model, loader, sampler, cache)
            stats = cache.stats()
            found[way] = {"losses": losses, "hits": stats.hits, "why_not": stats.why_not}
    return found


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [
        pytest.param(2, WAYS, marks=pytest.mark.long),
        pytest.param(4, ("hybrid",), marks=pytest.mark.long),
        (2, ("grouped", "compiled")),
    ],
    ids=str,
)
def test_losses_equal_one_process(tmp_path: Path, num_ranks: int, ways: tuple[str, ...]) -> None:
    ranks = run_ranks(worker, num_ranks, tmp_path / "ranks", tmp_path, ways)
    sampler = ShardAffineSampler(dataset(), 1, 0, num_shards=4, seed=1)
    expected = run(Blocks(), DataLoader(dataset(), 8, sampler=sampler), sampler)
    for way in ways:
        found = torch.tensor([rank[way]["losses"] for rank in ranks]).mean(0)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        for rank in ranks:
            if way == "compiled":  # refused, with the reason
                assert rank[way]["hits"] == 0
                assert "compiled and cut by fully_shard" in rank[way]["why_not"]
            else:
                assert rank[way]["hits"] == 3 * 32 // num_ranks
