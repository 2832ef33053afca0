"""What the demo trains: three acts, each once with plain PyTorch and once with Egeria.

`Side.epoch` is an ordinary training loop; the lines that Egeria adds to a script are marked `# +`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from digits import Digits, ResNet
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, Subset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_core import FreezeController

__all__ = ["ACTS", "Act", "Record", "Side", "pretrained"]

OLD, NEW = range(5), range(5, 10)
"""The digits that the backbone was pre-trained on, and those that it is fine-tuned for."""
WIDTH, BLOCKS = 16, 5
TRAINED = (f"layer3.{BLOCKS - 1}", "head")
"""What fine-tuning trains; all that lies in front of it is frozen."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """One comparison."""

    name: str
    title: str
    about: str
    epochs: int
    lr: float
    size: int
    """Images are size x size."""
    batch_size: int = 64
    is_finetuning: bool = False
    """Train the last block and a new head on a frozen, pre-trained front; else all from scratch."""
    augments: bool = True
    """Shift and turn each image at random."""


ACTS = (
    Act(
        name="finetune",
        title="Fine-tuning over a frozen front",
        about="A ResNet-32 that knows the digits 0-4 learns 5-9: its last block and a new head are "
        "trained. Egeria stores what crosses the boundary in the first epoch, and reads it after.",
        epochs=24, lr=0.05, size=24, is_finetuning=True, augments=False,
    ),
    Act(
        name="augmented",
        title="The same, with random augmentation",
        about="Each image is shifted and turned at random. PyTorch draws anew in every epoch; "
        "Egeria uses a draw for four epochs, so that three quarters of each batch skip the front.",
        epochs=24, lr=0.03, size=24, batch_size=32, is_finetuning=True,
    ),
    Act(
        name="scratch",
        title="From scratch, frozen as it converges",
        about="Nothing is frozen by hand. The controller freezes front layers once it predicts "
        "that this costs the loss next to nothing.",
        epochs=18, lr=0.1, size=16, batch_size=72,
    ),
)  # fmt: skip


@dataclass
class Record:
    """What one run measured, epoch by epoch."""

    name: str
    losses: list[float] = field(default_factory=list)
    """Per step."""
    test_losses: list[float] = field(default_factory=list)
    """Cross-entropy on the held-out images, in nats, per epoch."""
    accuracies: list[float] = field(default_factory=list)
    """On the held-out images, per epoch."""
    seconds: list[float] = field(default_factory=list)
    """Training time at the end of each epoch; evaluation is not in it."""
    samples: int = 0
    """Trained on so far."""
    hits: int = 0
    """Samples that came from the cache."""
    hit_rates: list[float] = field(default_factory=list)
    """Part of each epoch's samples that came from the cache."""
    bytes_on_disk: int = 0
    moves: list[dict[str, Any]] = field(default_factory=list)
    """What the controller froze, and when."""
    predicted: float = 0.0
    """By how much that raises the final loss, as the controller predicted it, in nats."""


class Side:
    """One training run that can be put away after each epoch.

    Args:
        act: Data, model and schedule.
        folder: The run's state and the caches live here.
        seed: Of weights and order.
        egeria: With Egeria, or plain PyTorch.
        weights: Of the pre-trained model, for fine-tuning.
    """

    def __init__(
        self, act: Act, folder: Path, seed: int, weights: dict[str, Any], *, egeria: bool
    ) -> None:
        self.act, self.seed, self.egeria = act, seed, egeria
        self.record = Record("Egeria" if egeria else "plain PyTorch")
        self._path = folder / f"{act.name}-{'egeria' if egeria else 'plain'}.pt"
        self._resources = contextlib.ExitStack()
        self._cache: ActivationCache | None = None
        self._controller: FreezeController | None = None
        started = time.perf_counter()
        torch.manual_seed(seed)
        self.model = _large() if act.is_finetuning else ResNet()
        train_set, self._test = _images(act)
        if act.is_finetuning:
            self.model.load_state_dict(weights)
            self.model.head = nn.Linear(self.model.head.in_features, len(NEW))
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.startswith(TRAINED))
        active = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(active, act.lr, momentum=0.9, weight_decay=5e-4)
        self._order = torch.Generator().manual_seed(seed)
        loading: dict[str, Any] = {
            "batch_size": act.batch_size, "shuffle": True, "generator": self._order,
        }  # fmt: skip
        self._loader: Any
        if egeria:
            where = folder / f"cache-{act.name}"
            boundary = "auto" if act.is_finetuning else None
            self._cache = ActivationCache(self.model, where, boundary, limit="1GB")  # +
            self._resources.callback(self._cache.close)
            self._loader = EgeriaLoader(train_set, cache=self._cache, **loading)  # +
        else:
            self._loader = DataLoader(train_set, **loading)
        total = act.epochs * len(self._loader)
        self._schedule = CosineAnnealingLR(self._optimizer, total)
        if egeria and not act.is_finetuning:
            self._controller = FreezeController(  # +
                self.model, self._optimizer, self._cache,
                lr_scheduler=self._schedule, total_steps=total,
            )  # fmt: skip
            self._resources.callback(self._controller.close)
        self._spent = time.perf_counter() - started

    def epoch(self, advance: Callable[[int, float], None]) -> None:
        """Train one epoch and evaluate; `advance(samples, seconds)` is called after each step."""
        record, number = self.record, len(self.record.seconds)
        torch.manual_seed(1000 * self.seed + number)  # of the augmentation
        before = record.seconds[-1] if record.seconds else 0.0
        started = time.perf_counter() - self._spent
        self._spent = 0.0
        self._train_mode()
        for images, targets in self._loader:
            loss = F.cross_entropy(self.model(images), targets)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            if self._controller is not None:
                self._controller.step(loss)  # +
            record.losses.append(loss.item())
            record.samples += len(targets)
            advance(len(targets), before + time.perf_counter() - started)
        if self._cache is not None:
            self._cache.flush()  # what is still being written belongs to this epoch
        record.seconds.append(before + time.perf_counter() - started)
        self._evaluate()
        self._look()

    def _train_mode(self) -> None:
        self.model.train()
        if self.act.is_finetuning and not self.egeria:
            # As one writes it by hand: BatchNorm of a frozen front keeps its statistics.
            for name, module in self.model.named_modules():
                if name and not name.startswith(("layer3", "head")):
                    module.eval()
            for block in list(self.model.layer3)[:-1]:
                block.eval()

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.model.eval()
        images, targets = self._test
        output = torch.cat([self.model(part) for part in images.split(256)])
        self.record.test_losses.append(float(F.cross_entropy(output, targets)))
        self.record.accuracies.append(float((output.argmax(1) == targets).float().mean()))

    def _look(self) -> None:
        if self._cache is not None:
            stats, before = self._cache.stats(), self.record.hits
            self.record.hits = self._past_hits + stats.hits
            rate = (self.record.hits - before) / len(self._loader.dataset)
            self.record.hit_rates.append(rate)
            self.record.bytes_on_disk = stats.bytes_on_disk
        if self._controller is not None:
            self.record.moves = self._controller.history.of("boundary")
            self.record.predicted = float(getattr(self._controller.policy, "spent", 0.0))

    _past_hits = 0

    def save(self) -> None:
        """Put the run away, so that it can go on from this epoch."""
        state = {
            "record": asdict(self.record),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "order": self._order.get_state(),
            "loader": self._loader.state_dict() if self.egeria else None,
            "controller": self._controller.state_dict() if self._controller else None,
        }
        temporary = self._path.with_suffix(f".{os.getpid()}")
        torch.save(state, temporary)
        temporary.replace(self._path)

    def resume(self) -> bool:
        """Go on from what was put away; return whether there was anything."""
        if not self._path.exists():
            return False
        state = torch.load(self._path, weights_only=True)
        self.record = Record(**state["record"])
        self._past_hits = self.record.hits
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._order.set_state(state["order"])
        if self.egeria:
            self._loader.load_state_dict(state["loader"])
        if self._controller is not None:
            self._controller.load_state_dict(state["controller"])
        return True

    def close(self) -> None:
        """Let go of cache and controller."""
        self._resources.close()


def pretrained(path: Path, epochs: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Return the weights of a model that knows the digits 0-4; trained once per folder."""
    if path.exists():
        weights: dict[str, Any] = torch.load(path, weights_only=True)
        return weights
    torch.manual_seed(1234)
    model = _large()
    data = _of(Digits(train=True, size=24), OLD)
    loader = DataLoader(data, 64, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs * len(loader))
    for _ in range(epochs):
        for images, targets in loader:
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        advance()
    temporary = path.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), temporary)
    temporary.replace(path)
    return model.state_dict()


def _large() -> ResNet:
    return ResNet(BLOCKS, WIDTH)


class _Shifted(Dataset[tuple[torch.Tensor, int]]):
    """The same samples, their classes counted from 0."""

    def __init__(self, data: Digits, indices: list[int], first: int) -> None:
        self._data, self._first = Subset(data, indices), first

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, target = self._data[index]
        return image, target - self._first


def _of(data: Digits, classes: range) -> _Shifted:
    chosen = [i for i, target in enumerate(data.targets) if target in classes]
    return _Shifted(data, chosen, classes.start)


def _images(act: Act) -> tuple[Dataset[Any], tuple[torch.Tensor, torch.Tensor]]:
    """Return the training set, and the held-out images and classes as two tensors."""
    train = Digits(train=True, size=act.size, augment=act.augments)
    test: Any = Digits(train=False, size=act.size)
    if act.is_finetuning:
        train_set: Dataset[Any] = _of(train, NEW)
        test = _of(test, NEW)
    else:
        train_set = train
    images, targets = zip(*(test[i] for i in range(len(test))), strict=True)
    return train_set, (torch.stack(images), torch.tensor(targets))
