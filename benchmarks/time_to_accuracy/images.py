"""Handwritten digits with the augmentation that is usual for small images: pad and crop."""

from __future__ import annotations

import torch
from digits import Digits, ResNet
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

__all__ = ["Crops", "ResNet", "digits"]


class Crops(Dataset[tuple[Tensor, int]]):
    """Images of shape (1, H, W), float32, each time cropped at random from its padded self.

    Args:
        images: Shape (N, 1, H, W).
        targets: Shape (N,), int64.
        padding: Pixels added on each side, by repeating the border; the crop has H x W again.
    """

    def __init__(self, images: Tensor, targets: Tensor, padding: int) -> None:
        self.size = images.shape[-1]
        self.room = 2 * padding + 1
        self.padded = F.pad(images, (padding,) * 4, mode="replicate")
        self.targets: list[int] = targets.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        y, x = torch.randint(self.room, (2,)).tolist()
        image = self.padded[index, :, y : y + self.size, x : x + self.size]
        return image, self.targets[index]


def digits(size: int, classes: range, *, train: bool) -> tuple[Tensor, Tensor]:
    """Return the images of some classes, (N, 1, size, size), and their classes from 0, (N,)."""
    data = Digits(train=train, size=size)
    targets = torch.tensor(data.targets)
    chosen = (targets >= classes.start) & (targets < classes.stop)
    return data.images[chosen], targets[chosen] - classes.start
