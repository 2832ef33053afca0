"""Small models of the families that the controller must work on, and a training loop."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Basic residual block."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR-style ResNet of depth 6n + 2; `width` 16 is the paper's."""

    def __init__(self, n: int = 2, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(n, width, width, 1)
        self.layer2 = self._stage(n, width, 2 * width, 2)
        self.layer3 = self._stage(n, 2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, 10)

    @staticmethod
    def _stage(n: int, num_in: int, num_out: int, stride: int) -> nn.Sequential:
        first = Block(num_in, num_out, stride)
        return nn.Sequential(first, *(Block(num_out, num_out) for _ in range(n - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def mlp(*widths: int) -> nn.Sequential:
    """Linear and ReLU alternating; no randomness, no buffers."""
    layers: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(widths):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, size: int = 8, shape: tuple[int, ...] = (1, 8, 8)) -> tuple[Tensor, Tensor]:
    """The batch of one training step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, *shape, generator=generator)
    return x, torch.randint(0, 10, (size,), generator=generator)
