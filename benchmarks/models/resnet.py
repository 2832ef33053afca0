"""ResNet-50 for ImageNet and ResNet-56 for CIFAR-10 (He et al. 2016, tables 1 and 6)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .staged import Staged, init_convolutions


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a shortcut; the stride is on the 3x3, as in torchvision."""

    def __init__(self, num_in: int, width: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        num_out = 4 * width
        self.conv1 = nn.Conv2d(num_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, num_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_out)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_in, H, W) to (B, 4 width, H / stride, W / stride)."""
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = F.relu(self.bn2(self.conv2(h)), inplace=True)
        return F.relu(self.bn3(self.conv3(h)) + self.downsample(x), inplace=True)


class ResNet50(Staged):
    """Sixteen bottleneck blocks in four stages; 25.6 M parameters with 1,000 classes.

    Args:
        num_classes: Of the classifier; 0: none, the network is a backbone.
        depths: Blocks per stage.
        dilate_last: Whether the last stage keeps its resolution and dilates instead.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        depths: tuple[int, ...] = (3, 4, 6, 3),
        dilate_last: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.front = ["conv1", "bn1"]
        num_in, self.layers = 64, list[str]()
        for stage, depth in enumerate(depths):
            width = 64 << stage
            stride = 1 if stage == 0 else 2
            dilation = 1
            if dilate_last and stage == len(depths) - 1:
                stride, dilation = 1, 2
            blocks = nn.Sequential()
            for number in range(depth):
                first = number == 0
                # As torchvision has it: the first block of a dilated stage is not dilated yet.
                blocks.append(
                    Bottleneck(num_in, width, stride if first else 1, 1 if first else dilation)
                )
                num_in = 4 * width
                self.layers.append(f"layer{stage + 1}.{number}")
            self.add_module(f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(num_in, num_classes) if num_classes else nn.Identity()
        init_convolutions(self)

    def enter(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) to (B, 64, H / 4, W / 4)."""
        return F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)

    def advance(self, state: Tensor, number: int, layer: nn.Module) -> Tensor:
        """Run one block."""
        result: Tensor = layer(state)
        return result

    def leave(self, state: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        logits: Tensor = self.fc(state.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the shortcut has no parameters (option A)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.stride, self.missing = stride, num_out - num_in

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_in, H, W) to (B, num_out, H / stride, W / stride)."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.missing:
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, self.missing // 2, self.missing - self.missing // 2))
        return F.relu(h + x)


class CifarResNet(Staged):
    """ResNet of 6n + 2 layers for 32x32 images; n = 9 is ResNet-56, 0.86 M parameters."""

    def __init__(self, n: int = 9, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.front = ["conv1", "bn1"]
        num_in, self.layers = 16, list[str]()
        for stage, width in enumerate((16, 32, 64)):
            blocks = nn.Sequential()
            for number in range(n):
                blocks.append(BasicBlock(num_in, width, 2 if stage and not number else 1))
                num_in = width
                self.layers.append(f"layer{stage + 1}.{number}")
            self.add_module(f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(64, num_classes)
        init_convolutions(self)

    def enter(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) to (B, 16, H, W)."""
        return F.relu(self.bn1(self.conv1(x)))

    def advance(self, state: Tensor, number: int, layer: nn.Module) -> Tensor:
        """Run one block."""
        result: Tensor = layer(state)
        return result

    def leave(self, state: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        logits: Tensor = self.fc(state.mean((2, 3)))
        return logits
