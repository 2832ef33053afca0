"""Real data and a model of the paper's family, small enough for two CPU cores.

The handwritten digits that scikit-learn ships (1,797 images of 8x8 pixels, UCI ML repository), and
a CIFAR-style ResNet: a stem, three stages of basic blocks with BatchNorm, a linear head (He et al.
2016, section 4.2).
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

__all__ = ["Digits", "ResNet"]

NUM_TEST = 360


class Digits(Dataset[tuple[Tensor, int]]):
    """Digit images, float32 of shape (1, size, size), and their classes 0-9.

    Args:
        train: The training part, or the held-out part.
        size: Images are scaled to size x size.
        augment: Shift and rotate each image at random. None: the training part only.
    """

    def __init__(self, *, train: bool, size: int = 16, augment: bool | None = None) -> None:
        digits = load_digits()
        order = torch.randperm(
            len(digits.target), generator=torch.Generator().manual_seed(0)
        ).tolist()
        chosen = order[NUM_TEST:] if train else order[:NUM_TEST]
        images = torch.from_numpy(digits.images[chosen]).float().unsqueeze(1)
        scaled = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
        self.images = (scaled - 4.88) / 6.02
        self.targets: list[int] = digits.target[chosen].tolist()
        self.augment = train if augment is None else augment

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return (_augment(image) if self.augment else image), self.targets[index]


def _augment(image: Tensor) -> Tensor:
    """Shift by up to a pixel of the original, rotate by up to 12 degrees, at random."""
    angle, dx, dy = (torch.rand(3) * 2 - 1).tolist()
    turn = torch.tensor(angle * 0.21)
    sin, cos = turn.sin().item(), turn.cos().item()
    theta = torch.tensor([[[cos, -sin, dx * 0.12], [sin, cos, dy * 0.12]]])
    grid = F.affine_grid(theta, [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)[0]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
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
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR-style ResNet of depth 6 n + 2 for images of shape (B, 1, H, W).

    Args:
        num_blocks: Basic blocks in each of the three stages (n).
        width: Channels of the first stage; doubled by each of the others.
        num_classes: Size of the output, (B, num_classes).
    """

    def __init__(self, num_blocks: int = 3, width: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, num_blocks, 1)
        self.layer2 = _stage(width, 2 * width, num_blocks, 2)
        self.layer3 = _stage(2 * width, 4 * width, num_blocks, 2)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def _stage(num_in: int, num_out: int, num_blocks: int, stride: int) -> nn.Sequential:
    blocks = [BasicBlock(num_in, num_out, stride)]
    blocks += [BasicBlock(num_out, num_out, 1) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)
