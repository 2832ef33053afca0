"""The tasks: real data, a model, one schedule for all methods, and how each method is set for it.

What a method's options are is chosen here once per task, the same for all seeds (the paper chooses
n, W and T per task too).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from egeria_cache.samples import DEFAULT_REUSE

from .images import Crops, ResNet, digits
from .text import VOCABULARY, Transformer, read_source, windows

__all__ = ["TASKS", "Problem", "Task", "loss_of", "make_optimizer", "make_schedule", "quick"]

PRETRAINING_SOURCE = (
    "argparse", "ast", "configparser", "datetime", "difflib", "doctest", "ftplib", "inspect",
    "mailbox", "optparse", "pathlib", "pdb", "pickle", "platform", "pydoc", "shutil", "smtplib",
    "statistics", "subprocess", "tarfile", "threading", "typing", "uuid", "zipfile",
)  # fmt: skip
VALIDATION_SOURCE = ("dataclasses", "functools", "imaplib", "plistlib", "socket", "tempfile")
DOCUMENTATION = ("pydoc_data/topics",)
"""Python's reference manual, English prose."""


@dataclass
class Problem:
    """One task, instantiated for one seed."""

    model: nn.Module
    train: Dataset[Any]
    inputs: Tensor
    """Of the validation set."""
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class Task:
    """A schedule, shared by all methods, and the methods' options."""

    name: str
    title: str
    about: str
    """What the model is, where the static boundary lies, and why there."""
    make: Callable[[Task, int, Path], Problem]
    """Takes the task, a seed, and a directory that keeps pre-trained weights between runs."""
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float = 5e-4
    optimizer: str = "sgd"
    schedule: str = "step"
    """`step`: to a tenth at 60 % and 85 %; `cosine`: to zero, after a warm-up over 5 %."""
    metric: str = "accuracy"
    """`accuracy`, or `loss`: cross-entropy in bits."""
    evaluations: int = 1
    """Per epoch."""
    samples: int | None = None
    """Training samples; None: all there are."""
    pretrain_epochs: int = 0
    layers: str | None = None
    """The controller's layers, as a regular expression; None: its own balanced parse."""
    static_boundary: str = ""
    """Empty: the one that `suggest_boundary` proposes."""
    suggest_steps: int = 0
    """Of each trial of that probe."""
    static_start: float = 0.0
    """Part of the schedule after which the static method freezes."""
    variants: int = 1
    """Augmented versions of each sample that the cache keeps."""
    reuse: int | None = DEFAULT_REUSE
    """For how many epochs it uses each of them."""
    plasticity: dict[str, Any] = field(default_factory=dict)
    """`FreezeController`'s options for Egeria and Skip-Conv; n, W and T among them. On a short
    schedule few, large layers: each move makes a cache prove a new cut and fill anew."""
    shortened_to: str = "egeria"
    """The method into whose time plain's whole schedule is fitted by `shortened`."""
    relaxed: float = 0.01
    """The relaxed target: the metric may be worse by this (absolute accuracy, relative loss)."""

    @property
    def higher_is_better(self) -> bool:
        """Whether the metric grows as the model learns."""
        return self.metric == "accuracy"

    def settings(self) -> dict[str, Any]:
        """Return everything that decides what a run computes, as JSON."""
        words = {"make", "title", "about", "relaxed", "shortened_to"}
        return {key: value for key, value in asdict(self).items() if key not in words}

    def fingerprint(self) -> str:
        """Return a short hash of the settings: runs under other settings are other runs."""
        text = json.dumps(self.settings() | {"torch": torch.__version__}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (..., C) and classes (...), in nats."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Return the task's optimizer over all parameters."""
    if task.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), task.lr, weight_decay=task.weight_decay)
    return torch.optim.SGD(
        model.parameters(), task.lr, momentum=0.9, weight_decay=task.weight_decay
    )


def make_schedule(
    task: Task, optimizer: torch.optim.Optimizer, total: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule, stepped after each optimizer step."""

    def step_decay(step: int) -> float:
        return 0.1 ** sum(step >= total * part for part in (0.6, 0.85))

    def cosine(step: int) -> float:
        warm = max(1, total // 20)
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))

    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, cosine if task.schedule == "cosine" else step_decay
    )


def _digits_scratch(task: Task, seed: int, directory: Path) -> Problem:
    images, targets = digits(16, range(10), train=True)
    torch.manual_seed(seed)
    model = ResNet(num_blocks=3, width=16)
    train = Crops(images[: task.samples], targets[: task.samples], padding=1)
    return Problem(model, train, *digits(16, range(10), train=False))


def _digits_finetune(task: Task, seed: int, directory: Path) -> Problem:
    images, targets = digits(24, range(5), train=True)
    source = Crops(images[: task.samples], targets[: task.samples], padding=3)
    model = _pretrained(
        task, directory, lambda: ResNet(num_blocks=3, width=16, num_classes=5), source
    )
    torch.manual_seed(seed)
    model.head = nn.Linear(64, 5)
    images, targets = digits(24, range(5, 10), train=True)
    train = Crops(images[: task.samples], targets[: task.samples], padding=3)
    return Problem(model, train, *digits(24, range(5, 10), train=False))


def _language(source: tuple[str, ...], count: int, length: int) -> tuple[Tensor, Tensor]:
    text = windows(read_source(source), length + 1, count)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _source_model(task: Task, seed: int, directory: Path) -> Problem:
    torch.manual_seed(seed)
    model = Transformer(num_blocks=6, width=64, length=64, num_outputs=VOCABULARY)
    train = TensorDataset(*_language(PRETRAINING_SOURCE, task.samples or 1536, 64))
    return Problem(model, train, *_language(VALIDATION_SOURCE, 256, 64))


def _source_finetune(task: Task, seed: int, directory: Path) -> Problem:
    text = TensorDataset(*_language(PRETRAINING_SOURCE, 16 * (task.samples or 512), 64))
    model = _pretrained(task, directory, lambda: Transformer(6, 64, 64, VOCABULARY), text)
    torch.manual_seed(seed)
    inputs, targets = _language(DOCUMENTATION, 2 * (task.samples or 512), 64)
    return Problem(model, TensorDataset(inputs[::2], targets[::2]), inputs[1::4], targets[1::4])


def _pretrained(task: Task, directory: Path, build: Callable[[], Any], data: Dataset[Any]) -> Any:
    """Return a model trained on `data`; once per directory, the same for all seeds and methods."""
    words = (task.about, task.pretrain_epochs, task.samples, torch.__version__)
    path = directory / f"pretrained-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}.pt"
    torch.manual_seed(1234)
    model = build()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    optimizer = make_optimizer(replace(task, lr=0.05 if task.optimizer == "sgd" else 2e-3), model)
    generator = torch.Generator().manual_seed(1234)
    loader = DataLoader(data, 64 if task.optimizer == "sgd" else 16, True, generator=generator)
    schedule = make_schedule(task, optimizer, task.pretrain_epochs * len(loader))
    for _ in range(task.pretrain_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), temporary)
    temporary.replace(path)
    return model


TASKS = {
    task.name: task
    for task in (
        Task(
            name="digits",
            title="digits, ResNet-20 from scratch",
            about="ResNet-20 of width 16 on 16x16 digits, pad and crop by a pixel; static: half of "
            "the schedule, then everything up to the end of stage 2 (two thirds of the compute, "
            "a quarter of the weights). The rate falls by a cosine: where it falls in steps, the "
            "paper's rule unfreezes everything at each, and 342 steps are too few to freeze anew.",
            make=_digits_scratch,
            epochs=18,
            batch_size=72,
            lr=0.1,
            schedule="cosine",
            static_boundary="layer2.2",
            static_start=0.5,
            variants=3,
            plasticity={
                "evaluate_every": 2,
                "window": 10,
                "tolerance": 0.2,
                "unfreeze_rule": "warm_restart",
            },
        ),
        Task(
            name="source",
            title="Python source, transformer from scratch",
            about="GPT of 6 blocks of width 64 on windows of 64 characters of the standard "
            "library's source; static: half of the schedule, then embeddings and 3 blocks.",
            make=_source_model,
            epochs=4,
            batch_size=8,
            lr=3e-3,
            weight_decay=0.01,
            optimizer="adamw",
            schedule="cosine",
            metric="loss",
            evaluations=4,
            samples=1536,
            static_boundary="blocks.2",
            static_start=0.5,
            plasticity={
                "evaluate_every": 6,
                "window": 10,
                "tolerance": 0.2,
                "unfreeze_rule": "warm_restart",
            },
        ),
        Task(
            name="digits-finetune",
            title="digits 5-9, ResNet-20 pre-trained on 0-4",
            about="ResNet-20 of width 16 on 24x24 digits, pad and crop by three pixels, with a new "
            "head for other classes. Static: what suggest_boundary proposes, from the start.",
            make=_digits_finetune,
            epochs=10,
            batch_size=64,
            lr=0.02,
            schedule="cosine",
            pretrain_epochs=12,
            evaluations=2,
            suggest_steps=110,
            shortened_to="static+cache",
            variants=1,
            plasticity={
                "num_layers": 3,
                "evaluate_every": 2,
                "window": 4,
                "tolerance": 0.4,
                "bootstrap": None,
                "unfreeze_rule": "warm_restart",
            },
        ),
        Task(
            name="source-finetune",
            title="English documentation, GPT pre-trained on source",
            about="GPT of 6 blocks of width 64, pre-trained on Python source, fine-tuned on the "
            "English text of Python's manual, which lies in pydoc_data. Static: what "
            "suggest_boundary proposes, from the start; 16 KB cross it for 64 characters.",
            make=_source_finetune,
            epochs=10,
            batch_size=16,
            lr=1e-3,
            weight_decay=0.01,
            optimizer="adamw",
            schedule="cosine",
            metric="loss",
            evaluations=2,
            samples=512,
            pretrain_epochs=2,
            suggest_steps=320,
            shortened_to="static+cache",
            plasticity={
                "num_layers": 4,
                "evaluate_every": 2,
                "window": 6,
                "tolerance": 0.3,
                "bootstrap": None,
                "unfreeze_rule": "warm_restart",
            },
        ),
    )
}


def quick(task: Task) -> Task:
    """Return a version of a few seconds: it shows that everything works, its figures are none."""
    small = {"digits": (3, 288), "source": (2, 128), "digits-finetune": (4, 128)}
    epochs, samples = small.get(task.name, (2, 128))
    few = min(1, task.pretrain_epochs)
    probe = min(8, task.suggest_steps)
    return replace(task, epochs=epochs, samples=samples, pretrain_epochs=few, suggest_steps=probe)
