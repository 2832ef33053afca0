"""What is done with a loader: its batches are drawn, or a small network is trained on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["frozen_net", "load", "train"]


class Net(nn.Module):
    """Eight convolutions and a head; the first six are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(*map(_conv, (3, *[32] * 5), [32] * 6, (2, 1, 1, 1, 1, 2)))
        self.back = nn.Sequential(_conv(32, 32, 1), _conv(32, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to logits (B, 10)."""
        logits: Tensor = self.head(self.back(self.front(x)).mean((2, 3)))
        return logits


def _conv(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1), nn.ReLU())


def frozen_net() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    model.front.requires_grad_(False)
    active = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(active, lr=0.01)


def load(loader: Any) -> None:
    for _ in loader:
        pass


def train(loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for images, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
