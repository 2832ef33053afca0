"""A model that tensor parallelism cuts trains as without a cache, and says so, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.gloo import run_ranks
from tests.helpers.steps import take_step


def build(num_ranks: int, sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    shape = (2, num_ranks // 2) if sharded else (1, num_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    model[0].requires_grad_(False)
    if sharded:
        fully_shard(model, mesh=mesh["data"])
    return model


def run(rank: int, directory: Path, num_ranks: int, sharded: bool, boundary: str | None) -> Any:
    model = build(num_ranks, sharded)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 8, generator=draw), torch.arange(16) % 4)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, foreach=False)
    path = directory / f"{boundary}-{rank}"
    with ActivationCache(model, path, boundary, gate="always") as cache:
        loader = EgeriaLoader(data, 4, cache=cache, seed=3)
        losses = [
            take_step(F.cross_entropy(model(x), y), optimizer).item()
            for _ in range(2)
            for x, y in loader
        ]
        return losses, cache.stats().hits, cache.stats().why_not


def told(rank: int, directory: Path, num_ranks: int, sharded: bool) -> Any:
    ways = (None, "auto", "0")
    plain, *found = (run(rank, directory, num_ranks, sharded, name) for name in ways)
    assert [each[:2] for each in found] == [(plain[0], 0)] * 2
    return [each[2] for each in found]


@pytest.mark.parametrize(
    ("num_ranks", "sharded"), [(2, False), pytest.param(4, True, marks=pytest.mark.long)]
)
def test_it_is_computed_and_told_by_name(tmp_path, num_ranks, sharded):
    for messages in run_ranks(told, num_ranks, tmp_path / "r", tmp_path, num_ranks, sharded):
        for message in messages:
            assert "'1.weight' is cut by tensor parallelism" in message
            assert "FrozenFront" in message
