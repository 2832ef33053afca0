"""Two small models whose rest can be run alone, from any block on."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ResNet", "Transformer"]


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
