"""A model that `fully_shard` cuts over ranks, its training loop, and what its collectives carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from tests.helpers.steps import take_step

__all__ = ["Blocks", "CountBytes", "dataset", "freeze", "shard", "train"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Blocks(nn.Module):
    """Stem and head are in the root's unit, each block is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def dataset() -> TensorDataset:
    g = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(32, 6, generator=g), torch.randint(3, (32,), generator=g))


def shard(model: Blocks, **options: Any) -> Blocks:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def freeze(model: Blocks, num_blocks: int) -> None:
    """Freeze the stem and so many blocks; 0: train all."""
    model.requires_grad_(True)
    if num_blocks:
        model.stem.requires_grad_(False)
        for block in list(model.blocks)[:num_blocks]:
            block.requires_grad_(False)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    after: Callable[[Tensor], None] = lambda loss: None,
) -> list[float]:
    losses = []
    model.train()
    for x, y in batches:
        loss = take_step(F.cross_entropy(model(x), y), optimizer)
        after(loss)
        losses.append(loss.item())
    return losses


class CountBytes(CommDebugMode):  # type: ignore[misc]
    """Adds up what goes into collectives, by their names, in the forward and in the backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __enter__(self) -> CountBytes:
        return TorchDispatchMode.__enter__(self)  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().rpartition("::")[2].strip("_")
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            self.bytes[name] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return func(*args, **(kwargs or {}))
