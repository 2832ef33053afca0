"""Semantic segmentation: Pascal VOC with DeepLabv3 (Chen et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from data import VocSegmentation
from data.voc import IGNORED
from torch import Tensor, nn
from torch.nn import functional as F
from training.settings import Settings

from tasks.base import Batches, Task

__all__ = ["Segmentation"]


class Segmentation(Task):
    """DeepLabv3 with its auxiliary head, SGD, a polynomial learning rate; mean IoU."""

    metric = "mean IoU"
    lr = 0.01

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        size = settings.size or 256
        self.train_set = VocSegmentation(settings.data, split="train", size=size, augment=True)
        self.test_set = VocSegmentation(settings.data, split="val", size=size, augment=False)

    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return DeepLabv3 on a backbone of 14 or of 50 layers."""
        from benchmarks.models import DeepLab

        return {"small": lambda: DeepLab(depths=(1, 1, 1, 1)), "deeplabv3": DeepLab}

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)

    def rate(self, step: int, total: int) -> float:
        """Fall as (1 - t)^0.9."""
        factor: float = max(0.0, 1 - step / total) ** 0.9
        return factor

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the pixels' cross entropy, and 0.4 of the auxiliary head's."""
        images, classes = batch
        logits, auxiliary = model(images)
        main = F.cross_entropy(logits, classes, ignore_index=IGNORED)
        return main + 0.4 * F.cross_entropy(auxiliary, classes, ignore_index=IGNORED)

    def score(self, model: nn.Module, batches: Batches) -> float:
        """Return intersection over union, the mean over the classes that occur."""
        num = VocSegmentation.num_classes
        counts = torch.zeros(num, num, dtype=torch.int64)
        for images, classes in batches:
            said = model(images)[0].argmax(1).flatten().cpu()
            true = torch.as_tensor(classes).flatten().cpu()
            counted = true != IGNORED
            pairs = true[counted] * num + said[counted]
            counts += torch.bincount(pairs, minlength=num * num).view(num, num)
        both = counts.diagonal()
        either = counts.sum(0) + counts.sum(1) - both
        return float((both[either > 0] / either[either > 0]).mean())
