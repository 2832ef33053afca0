"""The real task that the controller's benchmarks train: digits, a small ResNet, step decay."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from digits import Digits, ResNet
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Outcome", "ResNet", "Task", "load", "train"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One schedule, shared by every run of a benchmark."""

    epochs: int = 30
    batch_size: int = 72
    lr: float = 0.1
    num_blocks: int = 3
    width: int = 8
    size: int = 12
    """Images are size x size."""

    @property
    def drops(self) -> tuple[int, int]:
        """Epochs at which the learning rate falls to a tenth."""
        return int(self.epochs * 0.6), int(self.epochs * 0.85)


@dataclass
class Outcome:
    """What one run came to."""

    accuracy: float
    seconds: float
    controller_seconds: float
    mean_active: float
    """Mean over the steps of the trainable part of the parameters."""
    schedule: list[tuple[int, str | None]] = field(default_factory=list)
    controller: Any = None


def load(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and targets, then the test set's."""
    train_set, test_set = Digits(train=True, size=size), Digits(train=False, size=size)
    return (
        train_set.images,
        torch.tensor(train_set.targets),
        test_set.images,
        torch.tensor(test_set.targets),
    )


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift the whole batch by up to a pixel each way: cheap, so that the model is what costs."""
    dx, dy = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return torch.roll(images, (dx, dy), (2, 3))


def train(
    task: Task,
    seed: int,
    make_controller: Callable[[nn.Module, torch.optim.Optimizer, int], Any] | None = None,
    on_epoch: Callable[[int, nn.Module], None] | None = None,
) -> Outcome:
    """Train once; `make_controller(model, optimizer, total_steps)` may return None.

    `on_epoch(epoch, model)` is called before each epoch and once after the last; its time does
    not count.
    """
    torch.manual_seed(seed)
    images, targets, test_images, test_targets = load(task.size)
    model = ResNet(task.num_blocks, task.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(task.drops), 0.1)
    steps_per_epoch = len(images) // task.batch_size
    total = task.epochs * steps_per_epoch
    controller = None if make_controller is None else make_controller(model, optimizer, total)
    generator = torch.Generator().manual_seed(seed)
    num_parameters = sum(p.numel() for p in model.parameters())
    seconds = controller_seconds = active = 0.0
    for epoch in range(task.epochs):
        if on_epoch is not None:
            on_epoch(epoch, model)
        start = time.perf_counter()
        model.train()
        order = torch.randperm(len(images), generator=generator)
        for step in range(steps_per_epoch):
            rows = order[step * task.batch_size : (step + 1) * task.batch_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(augment(images[rows], generator)), targets[rows])
            loss.backward()
            optimizer.step()
            if controller is not None:
                before = time.perf_counter()
                controller.step(loss)
                controller_seconds += time.perf_counter() - before
            active += sum(p.numel() for p in model.parameters() if p.requires_grad)
        scheduler.step()
        seconds += time.perf_counter() - start
    if on_epoch is not None:
        on_epoch(task.epochs, model)
    model.eval()
    with torch.no_grad():
        accuracy = float((model(test_images).argmax(1) == test_targets).float().mean())
    if controller is not None:
        controller.close()
    return Outcome(
        accuracy=accuracy,
        seconds=seconds,
        controller_seconds=controller_seconds,
        mean_active=active / total / num_parameters,
        schedule=[] if controller is None else controller.schedule(),
        controller=controller,
    )
