"""Small transfers on real data: a front that was trained on other classes, and random samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from digits import ResNet
from docstrings import PACKAGES, Block, Docstrings, Encoder, pad
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from egeria_cache.augment import Crop, Dropout, Noise, Operation, Translate

__all__ = ["TASKS", "Augmented", "Task", "front_of", "photographs", "warmed_up"]

Sample = tuple[Tensor, int]
DIGIT, PATCH = 16, 24
"""Images are of so many pixels each way."""
NUM_TRAIN = 400
_CELLS, _MARGIN = (4, 6), 4
"""A photograph is divided into so many rows and columns; patches are cropped with this margin."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Classes that a front is trained on, other classes that a head is trained on behind it."""

    samples: Callable[[bool], tuple[list[Any], list[int], list[Any], list[int]]]
    """Other classes or not -> training samples and labels, and test samples and labels."""
    augment: Callable[[Any], Any]
    plain: Callable[[Any], Any] | None = None
    """What takes its place where samples are not to be random, if anything has to."""
    model: Callable[[], nn.Module]
    boundary: str
    head: str
    """The module behind the boundary whose inputs may be augmented instead."""
    operations: Sequence[Operation]
    collate: Callable[[list[Any]], Any] = default_collate
    lr: float = 0.02
    """Of the head: SGD with momentum."""
    warm_up_epochs: int = 12


class Augmented(Dataset[Sample]):
    """Samples, drawn at random each time if there is something that draws."""

    def __init__(
        self, samples: list[Any], labels: list[int], augment: Callable[[Any], Any] | None
    ) -> None:
        self.samples, self.labels, self.augment = samples, labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        return (sample if self.augment is None else self.augment(sample)), self.labels[index]


def warmed_up(task: Task, seed: int) -> nn.Module:
    """Return a model whose front was trained on the other classes, and is frozen; the rest new."""
    torch.manual_seed(seed)
    model, fresh = task.model(), task.model()
    samples, labels, _, _ = task.samples(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    if isinstance(model, Encoder | Patches):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # type: ignore[assignment]
    loader = DataLoader(
        Augmented(samples, labels, task.augment), 32, shuffle=True, collate_fn=task.collate
    )
    for _ in range(task.warm_up_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    front = front_of(model, task.boundary)
    fresh.load_state_dict(
        {name: model.state_dict()[name] if _is_in(name, front) else value
         for name, value in fresh.state_dict().items()}
    )  # fmt: skip
    for name, parameter in fresh.named_parameters():
        parameter.requires_grad_(not _is_in(name, front))
    return fresh


def front_of(model: nn.Module, boundary: str) -> list[str]:
    """Return the modules up to the boundary: those without children, as they were made."""
    names = [name for name, module in model.named_modules() if not any(module.children())]
    last = max(at for at, name in enumerate(names) if f"{name}.".startswith(f"{boundary}."))
    return names[: last + 1]


def _is_in(name: str, front: list[str]) -> bool:
    return name.rpartition(".")[0] in front


# ---- handwritten digits -----------------------------------------------------------------------


@cache
def digits(others: bool) -> tuple[list[Tensor], list[int], list[Tensor], list[int]]:
    """Five digits, or the other five; 8x8 pixels, scaled up."""
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None]
    images = F.interpolate(images, size=(DIGIT, DIGIT), mode="bilinear", align_corners=False)
    images = (images - 4.88) / 6.02
    chosen = [i for i, label in enumerate(found.target.tolist()) if (label >= 5) == others]
    return _divided([images[i] for i in chosen], [int(found.target[i]) % 5 for i in chosen], others)


def shifted(image: Tensor) -> Tensor:
    """Shift by up to two pixels, make brighter or darker, and add noise."""
    down, right = torch.randint(-2, 3, (2,)).tolist()
    image = image.roll((down, right), (1, 2)) * (0.7 + 0.6 * torch.rand(()))
    return image + 0.3 * torch.randn_like(image)


# ---- photographs ------------------------------------------------------------------------------


@cache
def photographs() -> list[Tensor]:
    """The two photographs that scikit-learn ships, float32 of shape (3, 427, 640)."""
    return [
        torch.from_numpy(np.array(one)).permute(2, 0, 1).float() / 127.5 - 1
        for one in load_sample_images().images
    ]


@cache
def patches(others: bool) -> tuple[list[Tensor], list[int], list[Tensor], list[int]]:
    """Patches, to be told from which of twelve parts of a photograph they are."""
    photograph = photographs()[int(others)]
    side, generator = PATCH + 2 * _MARGIN, torch.Generator().manual_seed(0)
    height, width = (
        length // number for length, number in zip(photograph.shape[1:], _CELLS, strict=True)
    )
    samples, labels = [], []
    for cell in range(0, _CELLS[0] * _CELLS[1], 2):
        top, left = cell // _CELLS[1] * height, cell % _CELLS[1] * width
        for _ in range(60):
            down = top + int(torch.randint(height - side, (), generator=generator))
            right = left + int(torch.randint(width - side, (), generator=generator))
            samples.append(photograph[:, down : down + side, right : right + side])
            labels.append(cell // 2)
    return _divided(samples, labels, others)


def centre(image: Tensor) -> Tensor:
    """Return the middle of a patch."""
    return image[:, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN]


def cropped(image: Tensor) -> Tensor:
    """Crop, mirror, and change brightness and contrast, all at random."""
    top, left = torch.randint(2 * _MARGIN + 1, (2,)).tolist()
    image = image[:, top : top + PATCH, left : left + PATCH]
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
    brightness, contrast = (0.8 * torch.rand(2) - 0.4).tolist()
    mean = image.mean()
    changed: Tensor = (image - mean) * (1 + contrast) + mean + brightness
    return changed


# ---- docstrings -------------------------------------------------------------------------------


@cache
def texts(others: bool) -> tuple[list[Tensor], list[int], list[Tensor], list[int]]:
    """Docstrings of the standard library, to be told from which of five packages they are."""
    data = Docstrings(PACKAGES[5:] if others else PACKAGES[:5], max_length=32)
    samples, labels = zip(*(data[i] for i in range(len(data))), strict=True)
    return _divided(list(samples), list(labels), others)


def thinned(words: Tensor) -> Tensor:
    """Drop one word in five at random, but never the mark of the beginning."""
    kept = torch.rand(len(words)) >= 0.2
    kept[0] = True
    return words[kept]


def _divided(
    samples: list[Any], labels: list[int], others: bool
) -> tuple[list[Any], list[int], list[Any], list[int]]:
    """Return `NUM_TRAIN` samples, more to warm up with, and up to 400 that are held out."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1)).tolist()
    size = min(600 if others else NUM_TRAIN, len(order) - 200)
    train, test = order[:size], order[size : size + 400]
    return (
        [samples[i] for i in train], [labels[i] for i in train],
        [samples[i] for i in test], [labels[i] for i in test],
    )  # fmt: skip


# ---- models -----------------------------------------------------------------------------------


class Patches(nn.Module):
    """A small vision transformer: patches of 4x4 pixels, six blocks; (B, 3, H, W) to (B, C)."""

    def __init__(self, num_classes: int, num_blocks: int = 6, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Embedding((PATCH // 4) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = x + self.positions(torch.arange(x.shape[1]))
        mask = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


TASKS = {
    "digits, convolutions": Task(
        samples=digits, augment=shifted, boundary="layer3.1",
        model=lambda: ResNet(num_blocks=3, width=16, num_classes=5),
        head="layer3.2",
        operations=(Translate(1), Noise(0.2), Dropout(0.1)),
    ),
    "photographs, attention": Task(
        samples=patches, augment=cropped, plain=centre, boundary="blocks.5",
        model=lambda: Patches(12),
        head="norm",
        operations=(Noise(0.2), Dropout(0.1), Crop(0.8)), lr=0.1, warm_up_epochs=20,
    ),
    "docstrings, attention": Task(
        samples=texts, augment=thinned, boundary="blocks.4", model=lambda: Encoder(5, 6, 64, 32),
        head="blocks.5",
        operations=(Noise(0.2), Dropout(0.1)), collate=pad, warm_up_epochs=15,
    ),
}  # fmt: skip
