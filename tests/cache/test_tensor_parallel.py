"""Tensor parallelism behind a frozen front is served; in the front it is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader
from tests.helpers.gloo import run_ranks
from tests.helpers.steps import take_step

NUM_SAMPLES, NUM_HEADS = 24, 4


class Block(nn.Module):
    """Counts its heads, or takes as many as there are."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.ModuleList(), nn.Linear(16, 16)
        self.qkv.extend(nn.Linear(16, 16) for _ in range(3))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.heads = NUM_HEADS if counts else -1

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        normed = self.norm(x)
        q, k, v = (m(normed).view(b, t, self.heads, 4).transpose(1, 2) for m in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(counts) for _ in range(3))
        self.head = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm(x))


def in_sequence(mesh: Any) -> nn.Module:
    """Cut behind its front by tokens, of which ranks have different numbers, or none."""
    embed, blocks = nn.Embedding(20, 16), nn.ModuleList([nn.Linear(16, 16), Residual()])
    model = nn.Sequential()
    model.embed, model.blocks, model.norm, model.head = (
        embed, blocks, nn.LayerNorm(16), nn.Linear(16, 20)
    )  # fmt: skip
    model.forward = lambda x: model.head(model.norm(blocks[1](blocks[0](embed(x)))))
    by_token, whole = (Shard(1),), (Replicate(),)
    parallelize_module(model, mesh, {
        "blocks.1": PrepareModuleInput(
            input_layouts=whole, desired_input_layouts=by_token, use_local_output=False),
        "blocks.1.norm": SequenceParallel(),
        "blocks.1.ff": PrepareModuleInput(
            input_layouts=by_token, desired_input_layouts=whole, use_local_output=False),
        "blocks.1.ff.0": ColwiseParallel(),
        "blocks.1.ff.1": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })  # fmt: skip
    return model


def build(num_ranks: int, how: str, first_cut: int) -> nn.Module:
    torch.manual_seed(0)
    if "sequence" in how:
        model = in_sequence(init_device_mesh("cpu", (num_ranks,)))
        for front in (model.embed, model.blocks[0]):
            front.requires_grad_(False)
        return model
    model = Net("counts" in how)
    shape = (2, num_ranks // 2) if "sharded" in how else (1, num_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    plan: dict[str, Any] = {f"qkv.{i}": ColwiseParallel() for i in range(3)}
    plan |= {"out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks[first_cut:]:
        block.heads //= mesh["tensor"].size() if "counts" in how else 1
        parallelize_module(block, mesh["tensor"], plan)
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel(output_layouts=Replicate())})
    for front in (model.embed, model.blocks[0]):
        front.requires_grad_(False)
    if "sharded" in how:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["data"])
    return model


def run(rank: int, directory: Path, num_ranks: int, how: str, gate: str, first_cut: int = 1) -> Any:
    model = build(num_ranks, how, first_cut)
    data = torch.randint(20, (NUM_SAMPLES, 5), generator=torch.Generator().manual_seed(1))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, foreach=False)
    boundary = "auto" if "auto" in how else "blocks.0"
    losses = []
    with ActivationCache(model, directory / f"{gate}-{rank}", boundary, gate=gate) as cache:
        order = torch.Generator().manual_seed(2)
        loader = EgeriaLoader(data, 6, shuffle=True, generator=order, cache=cache, seed=3)
        for _ in range(3):
            for tokens in loader:
                loss = take_step(
                    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), optimizer
                )
                losses.append(loss.item())
                cache.flush()
        return losses, cache.stats().hits, cache.stats().why_not


def compared(rank: int, directory: Path, num_ranks: int, how: str) -> Any:
    return [run(rank, directory, num_ranks, how, gate) for gate in ("never", "always")]


def refusal(rank: int, directory: Path, num_ranks: int, how: str) -> str:
    with pytest.raises(BoundaryError) as caught:
        run(rank, directory, num_ranks, how, "always", first_cut=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [(2, "heads as they come"), (2, "counts heads"), (2, "counts heads, auto"),
     pytest.param(4, "counts heads, sharded", marks=pytest.mark.long),
     pytest.param(2, "sequence", marks=pytest.mark.long),
     pytest.param(4, "sequence", marks=pytest.mark.long)],
)  # fmt: skip
def test_behind_a_frozen_front_it_is_served(tmp_path, num_ranks, how):
    for plain, cached in run_ranks(compared, num_ranks, tmp_path / "r", tmp_path, num_ranks, how):
        assert cached == (plain[0], 2 * NUM_SAMPLES, None)


def test_in_the_front_it_is_refused_by_name(tmp_path):
    for message in run_ranks(refusal, 2, tmp_path / "r", tmp_path, 2, "heads as they come"):
        assert "'blocks.0.qkv.0.weight' in it is cut by tensor parallelism" in message
