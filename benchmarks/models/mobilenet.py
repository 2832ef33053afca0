"""MobileNetV2 for ImageNet (Sandler et al. 2018, table 2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .staged import Staged, init_convolutions

SETTINGS = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip
"""Expansion, channels, blocks, stride of the first block."""


def conv_bn(num_in: int, num_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project without a non-linearity."""

    def __init__(self, num_in: int, num_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = expansion * num_in
        expand = [conv_bn(num_in, width, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *expand,
            conv_bn(width, width, 3, stride, groups=width),
            nn.Conv2d(width, num_out, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.adds = stride == 1 and num_in == num_out

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_in, H, W) to (B, num_out, H / stride, W / stride)."""
        h: Tensor = self.conv(x)
        return x + h if self.adds else h


class MobileNetV2(Staged):
    """Seventeen inverted residuals; 3.5 M parameters with 1,000 classes."""

    def __init__(
        self, num_classes: int = 1000, settings: Sequence[tuple[int, int, int, int]] = SETTINGS
    ) -> None:
        super().__init__()
        parts, num_in = [conv_bn(3, 32, 3, 2)], 32
        for expansion, width, count, first_stride in settings:
            for number in range(count):
                stride = first_stride if number == 0 else 1
                parts.append(InvertedResidual(num_in, width, stride, expansion))
                num_in = width
        self.features = nn.Sequential(*parts)
        self.front = ["features.0"]
        self.layers = [f"features.{number}" for number in range(1, len(parts))]
        self.last = conv_bn(num_in, 1280, 1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))
        init_convolutions(self)

    def enter(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) to (B, 32, H / 2, W / 2)."""
        result: Tensor = self.features[0](x)
        return result

    def advance(self, state: Tensor, number: int, layer: nn.Module) -> Tensor:
        """Run one block."""
        result: Tensor = layer(state)
        return result

    def leave(self, state: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        logits: Tensor = self.classifier(self.last(state).mean((2, 3)))
        return logits
