"""Tasks of the evidence: data, model, optimizer, schedule, and which half each run belongs to.

The halves were fixed before the first run: whoever sets a threshold looks at `tuning` alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from benchmarks.time_to_accuracy.images import ResNet, digits
from benchmarks.time_to_accuracy.tasks import PRETRAINING_SOURCE, VALIDATION_SOURCE
from benchmarks.time_to_accuracy.text import VOCABULARY, Transformer, read_source, windows

from .models import ConvText, Muon, VisionTransformer, pad_and_crop

__all__ = ["RUNS", "TASKS", "Data", "Task", "make_data", "make_model", "make_optimizer"]


@dataclass
class Data:
    """Tensors of one kind of data; inputs and targets of the training part and of the other."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def batches(self, size: int, seed: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end, from batch `start` on; batch n depends on n alone."""
        inputs, targets = self.train
        per_epoch = len(inputs) // size
        step = start
        while True:
            epoch, place = divmod(step, per_epoch)
            order = torch.randperm(
                len(inputs), generator=torch.Generator().manual_seed(1000 * seed + epoch)
            )
            chosen = order[place * size : (place + 1) * size]
            x = inputs[chosen]
            if self.augment is not None:
                generator = torch.Generator().manual_seed(10**6 * (seed + 1) + step)
                x = self.augment(x, generator)
            yield x, targets[chosen]
            step += 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """One way to train."""

    name: str
    data: str
    model: str
    optimizer: str
    schedule: str
    lr: float
    steps: int
    batch_size: int
    weight_decay: float = 0.0
    accumulate: int = 1
    clip: float | None = None
    depths: tuple[int, ...] = field(default=(1, 3, 5))
    """How many front layers the branches freeze."""

    def fingerprint(self) -> str:
        """Return a short hash of the settings: runs under other settings are other runs."""
        text = json.dumps(asdict(self) | {"torch": torch.__version__}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Return the schedule, stepped after each optimizer step."""
        steps = self.steps
        warm = max(1, steps // 20)
        if self.schedule == "cosine":
            rise = LinearLR(optimizer, 0.1, total_iters=warm)
            fall = CosineAnnealingLR(optimizer, steps - warm)
            return SequentialLR(optimizer, [rise, fall], [warm])
        if self.schedule == "step":
            return MultiStepLR(optimizer, [int(0.6 * steps), int(0.85 * steps)], 0.1)
        if self.schedule == "onecycle":
            return OneCycleLR(optimizer, self.lr, steps)
        if self.schedule == "trapezoid":
            down = int(0.7 * steps)
            return LambdaLR(optimizer, lambda n: min(1.0, max(0.0, (steps - n) / (steps - down))))
        if self.schedule == "linear":
            return LambdaLR(optimizer, lambda n: max(0.0, 1 - n / steps))
        if self.schedule == "constant":
            return ConstantLR(optimizer, 1.0, 1)
        raise ValueError(f"unknown schedule {self.schedule!r}")


def make_data(name: str) -> Data:
    """Return one of the kinds of data."""
    if name == "digits":
        return Data(_digits(train=True), _digits(train=False), pad_and_crop)
    if name == "source":
        train, valid = _language(PRETRAINING_SOURCE, 4096), _language(VALIDATION_SOURCE, 256)
        return Data(train, valid)
    if name == "modules":
        inputs, targets = _modules()
        return Data((inputs[::2], targets[::2]), (inputs[1::4], targets[1::4]))
    raise ValueError(f"unknown data {name!r}")


def _digits(*, train: bool) -> tuple[Tensor, Tensor]:
    return digits(16, range(10), train=train)


def _language(source: tuple[str, ...], count: int) -> tuple[Tensor, Tensor]:
    text = windows(read_source(source), 49, count)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


MODULES = ("argparse", "ast", "datetime", "difflib", "inspect", "mailbox", "pydoc", "tarfile")


def _modules() -> tuple[Tensor, Tensor]:
    """Return windows of 96 characters, and which module each is from."""
    parts = [windows(read_source((name,)), 96, 480) for name in MODULES]
    targets = torch.arange(len(parts)).repeat_interleave(480)
    return torch.cat(parts), targets


def make_model(task: Task) -> nn.Module:
    """Return the task's model, fresh."""
    if task.model == "resnet":
        return ResNet(num_blocks=3, width=8)
    if task.model == "vit":
        return VisionTransformer(6, 48)
    if task.model == "gpt":
        return Transformer(5, 48, 48, VOCABULARY)
    if task.model == "conv1d":
        return ConvText(48, len(MODULES))
    if task.model == "mlp":
        widths = (256, 256, 256, 256, 256, 10)
        parts: list[nn.Module] = [nn.Flatten()]
        for a, b in itertools.pairwise(widths):
            parts.append(nn.Sequential(nn.Linear(a, b), nn.ReLU() if b > 10 else nn.Identity()))
        return nn.Sequential(*parts)
    raise ValueError(f"unknown model {task.model!r}")


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Return the task's optimizer over all parameters."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, task.lr, 0.9, weight_decay=task.weight_decay),
        "adam": lambda p: torch.optim.Adam(p, task.lr, weight_decay=task.weight_decay),
        "adamw": lambda p: torch.optim.AdamW(p, task.lr, weight_decay=task.weight_decay),
        "muon": lambda p: Muon(p, task.lr),
    }
    return kinds[task.optimizer](model.parameters())


def _resnet(schedule: str, **changes: Any) -> Task:
    return Task(
        **{
            "name": f"resnet-{schedule}", "data": "digits", "model": "resnet", "optimizer": "sgd",
            "schedule": schedule, "lr": 0.1, "steps": 400, "batch_size": 64,
            "weight_decay": 5e-4, "depths": (1, 2, 4), **changes,
        }
    )  # fmt: skip


def _gpt(schedule: str, **changes: Any) -> Task:
    return Task(
        **{
            "name": f"gpt-{schedule}", "data": "source", "model": "gpt", "optimizer": "adamw",
            "schedule": schedule, "lr": 3e-3, "steps": 600, "batch_size": 8,
            "weight_decay": 0.01, "depths": (1, 3, 5), **changes,
        }
    )  # fmt: skip


def _vit(schedule: str, **changes: Any) -> Task:
    return Task(
        **{
            "name": f"vit-{schedule}", "data": "digits", "model": "vit", "optimizer": "adamw",
            "schedule": schedule, "lr": 2e-3, "steps": 600, "batch_size": 32,
            "weight_decay": 0.05, "depths": (1, 3, 5), **changes,
        }
    )  # fmt: skip


TASKS = {
    task.name: task
    for task in (
        _resnet("cosine"),
        _resnet("constant", lr=0.03),
        _resnet("step"),
        _gpt("cosine"),
        _gpt("step"),
        _gpt("constant", lr=1e-3),
        _gpt("trapezoid", name="gpt-muon-trapezoid", optimizer="muon", lr=0.02),
        _vit("onecycle"),
        _vit("step", clip=1.0),
        Task(
            name="conv1d-accumulated", data="modules", model="conv1d", optimizer="adam",
            schedule="cosine", lr=2e-3, steps=400, batch_size=32, accumulate=2, clip=1.0,
            depths=(1, 2, 4),
        ),
        Task(
            name="mlp-onecycle", data="digits", model="mlp", optimizer="sgd", schedule="onecycle",
            lr=0.1, steps=800, batch_size=64, weight_decay=1e-4, depths=(1, 2, 3),
        ),
    )
}  # fmt: skip

RUNS: tuple[tuple[str, int, str], ...] = (
    ("resnet-cosine", 0, "tuning"),
    ("gpt-cosine", 0, "tuning"),
    ("vit-onecycle", 0, "tuning"),
    ("gpt-step", 0, "tuning"),
    ("resnet-constant", 0, "tuning"),
    ("resnet-step", 0, "fresh"),
    ("gpt-constant", 0, "fresh"),
    ("gpt-muon-trapezoid", 0, "fresh"),
    ("conv1d-accumulated", 0, "fresh"),
    ("mlp-onecycle", 0, "fresh"),
    ("vit-step", 0, "fresh"),
    ("resnet-cosine", 1, "fresh"),
    ("gpt-cosine", 1, "fresh"),
    ("vit-onecycle", 1, "fresh"),
    ("gpt-step", 1, "fresh"),
    ("resnet-constant", 1, "fresh"),
)
"""(task, seed, half)."""
