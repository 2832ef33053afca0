"""DeepLabv3 with a ResNet-50 backbone and an auxiliary head (Chen et al. 2017), for VOC.

Output stride 16 and crops of 513x513, as the DeepLabv3 paper trains it; torchvision's recipe has
output stride 8 and crops of 480. The parameters are torchvision's in number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .resnet import ResNet50
from .staged import Staged, init_convolutions


class State(NamedTuple):
    """What goes from layer to layer."""

    x: Tensor
    third: Tensor | None
    """Output of the third stage, which the auxiliary head reads."""
    size: tuple[int, int]
    """Of the input."""


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling and the classifier."""

    def __init__(self, num_in: int, num_classes: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [_conv(num_in, 256, 1), *(_conv(num_in, 256, 3, rate) for rate in rates)]
        )
        self.pooled = _conv(num_in, 256, 1)
        self.project = nn.Sequential(_conv(256 * (len(rates) + 2), 256, 1), nn.Dropout(0.5))
        self.classifier = nn.Sequential(_conv(256, 256, 3, 1), nn.Conv2d(256, num_classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_in, h, w) to logits (B, classes, h, w)."""
        pooled = self.pooled(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        parts = [*(branch(x) for branch in self.branches), pooled]
        logits: Tensor = self.classifier(self.project(torch.cat(parts, 1)))
        return logits


class DeepLab(Staged):
    """Sixteen blocks and the head; 42.0 M parameters with the auxiliary head and 21 classes."""

    def __init__(
        self,
        num_classes: int = 21,
        depths: tuple[int, ...] = (3, 4, 6, 3),
        rates: tuple[int, ...] = (6, 12, 18),
    ) -> None:
        super().__init__()
        self.backbone = ResNet50(0, depths, dilate_last=True)
        self.front = [f"backbone.{name}" for name in self.backbone.front]
        self.layers = [*(f"backbone.{name}" for name in self.backbone.layers), "head"]
        self._last_of_third = sum(depths[:-1]) - 1
        width = 64 << len(depths) + 1
        self.head = Pyramid(width, num_classes, rates)
        self.aux = nn.Sequential(
            _conv(width // 2, width // 8, 3, 1), nn.Dropout(0.1),
            nn.Conv2d(width // 8, num_classes, 1),
        )  # fmt: skip
        init_convolutions(self)

    def enter(self, x: Tensor) -> State:
        """Images (B, 3, H, W) to (B, 64, H / 4, W / 4)."""
        return State(self.backbone.enter(x), None, (x.shape[-2], x.shape[-1]))

    def advance(self, state: State, number: int, layer: nn.Module) -> State:
        """Run one block, or the head."""
        x = layer(state.x)
        return State(x, x if number == self._last_of_third else state.third, state.size)

    def leave(self, state: State) -> tuple[Tensor, Tensor]:
        """Return logits and auxiliary logits, (B, classes, H, W)."""
        assert state.third is not None
        return _resize(state.x, state.size), _resize(self.aux(state.third), state.size)


def _conv(num_in: int, num_out: int, kernel: int, rate: int = 1) -> nn.Module:
    padding = rate * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, kernel, 1, padding, rate, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(inplace=True),
    )


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)
