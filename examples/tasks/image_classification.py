"""Image classification: CIFAR-10, or a folder per class (ImageNet)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from data import Cifar10, DataError, ImageFolder
from torch import Tensor, nn
from torch.nn import functional as F
from training.settings import Settings

from tasks.base import Batches, Task, falling

__all__ = ["ImageClassification"]


class ImageClassification(Task):
    """Residual networks, SGD, a learning rate that falls to a tenth twice; accuracy."""

    metric = "accuracy"
    lr = 0.1
    unfreeze_rule = "tenfold_drop"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        root = settings.data
        if (root / "train").is_dir():
            size = settings.size or 224
            self.train_set: Any = ImageFolder(root / "train", size=size, train=True)
            self.num_classes = len(self.train_set.classes)
            tests = [root / name for name in ("val", "validation", "test")]
            test = next((folder for folder in tests if folder.is_dir()), None)
            self.test_set: Any = test and ImageFolder(
                test, size=size, train=False, classes=self.train_set.classes
            )
        elif any(root.glob("data_batch_1*")) or any(root.glob("cifar-10-batches-*/data_batch_1*")):
            self.train_set, self.test_set = Cifar10(root, train=True), Cifar10(root, train=False)
            self.num_classes = Cifar10.num_classes
        else:
            raise DataError(
                f"{root} is neither CIFAR-10 (data_batch_1.bin, or data_batch_1, ...) nor a folder "
                "with train/CLASS/IMAGE.jpg (and val/CLASS/IMAGE.jpg)"
            )

    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return CIFAR-style and ImageNet-style networks."""
        from benchmarks.models import CifarResNet, MobileNetV2, ResNet50

        return {
            "small": lambda: CifarResNet(1, self.num_classes),
            "resnet56": lambda: CifarResNet(9, self.num_classes),
            "resnet50": lambda: ResNet50(self.num_classes),
            "mobilenetv2": lambda: MobileNetV2(self.num_classes),
        }

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)

    def rate(self, step: int, total: int) -> float:
        """Return 1, 0.1, 0.01."""
        return falling(step, total)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross entropy."""
        images, targets = batch
        return F.cross_entropy(model(images), targets)

    def score(self, model: nn.Module, batches: Batches) -> float:
        """Return the fraction that is classified right."""
        right = sum(int((model(images).argmax(1) == targets).sum()) for images, targets in batches)
        return right / len(self.test_set)
