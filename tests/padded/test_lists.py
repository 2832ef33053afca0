"""Batches with lists of one item per sample, as detection and segmentation have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.padded.test_loops import Run, assert_same


class Scenes(Dataset[Any]):
    """Images of one size, or of several, each with some boxes."""

    def __init__(self, num_samples: int, *, sizes: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        self.scenes = []
        for i in range(num_samples):
            height, width = torch.randint(8, 16, (2,), generator=draw).tolist()
            shape = (1, height, width) if sizes else (1, 12, 12)
            boxes = torch.rand(int(torch.randint(0, 5, (), generator=draw)), 4, generator=draw)
            target = {"boxes": boxes, "labels": torch.arange(len(boxes)) % 3, "image_id": i}
            self.scenes.append((torch.rand(shape, generator=draw), target))

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Any:
        image, target = self.scenes[index]
        return image.clone(), {k: v.clone() if isinstance(v, Tensor) else v
                               for k, v in target.items()}  # fmt: skip


class Detector(nn.Module):
    """A convolutional front, a head, and a loss over all boxes if it is given any."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, images: Tensor, targets: Any = None, mask: Tensor | None = None) -> Tensor:
        hidden = self.front(images)
        if mask is None:
            boxes = self.head(hidden.mean((2, 3)))
        else:
            weights = mask[:, None].to(hidden.dtype)
            boxes = self.head((hidden * weights).sum((2, 3)) / weights.sum((2, 3)))
        return boxes if targets is None else loss_of(boxes, targets)


def loss_of(boxes: Tensor, targets: Any) -> Tensor:
    pairs = zip(boxes, targets, strict=True)
    return sum((F.l1_loss(b.expand_as(t["boxes"]), t["boxes"], reduction="sum") for b, t in pairs),
               boxes.sum() * 0)  # fmt: skip


def stacked(samples: Any) -> Any:
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), targets


def as_dict(samples: Any) -> Any:
    images, targets = zip(*samples, strict=True)
    boxes = [target["boxes"] for target in targets]
    return {"images": torch.stack(images), "boxes": boxes, "ids": [t["image_id"] for t in targets]}


def padded(samples: Any) -> Any:
    """Pad images to the largest height and width of the batch, with a mask."""
    images, targets = zip(*samples, strict=True)
    height, width = (max(image.shape[i] for image in images) for i in (1, 2))
    room = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    rows = [F.pad(image, pad) for image, pad in zip(images, room, strict=True)]
    ones = [torch.ones(image.shape[1:], dtype=torch.bool) for image in images]
    masks = [F.pad(one, pad) for one, pad in zip(ones, room, strict=True)]
    return torch.stack(rows), torch.stack(masks), list(targets)


def in_the_loop(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    return loss_of(model(images), targets)


def in_the_model(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    return model(images, list(targets))


def from_a_dict(model: nn.Module, batch: Any) -> Tensor:
    assert type(batch["boxes"]) is list
    assert type(batch["ids"]) is list
    targets = [{"boxes": boxes} for boxes in batch["boxes"]]
    return loss_of(model(batch["images"]), targets)


def with_a_mask(model: nn.Module, batch: Any) -> Tensor:
    images, mask, targets = batch
    return loss_of(model(images, mask=mask), targets)


def scaling(model: nn.Module, batch: Any) -> Tensor:
    """Writes to a list of the batch, which is stored as it was."""
    for target in batch[1]:
        target["boxes"] *= 0.5
    return in_the_loop(model, batch)


def run(data: Any, collate: Any, step: Any, directory: Any, size: int = 8, **options: Any) -> Any:
    """Return the run, and the batches that its loop was given."""
    seen: list[Any] = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch)
        return step(model, batch)

    draw = torch.Generator().manual_seed(1)
    batches = {"batch_size": size, "shuffle": True, "generator": draw}
    ran = Run(Detector, data, collate, directory, front=("front",), step=noting, batches=batches,
              **options)  # fmt: skip
    ran.epochs(3)
    if ran.cache is not None:
        ran.cache.close()
    return ran, seen


# A batch of two: a tuple of two, and one of them a tuple of two, is not taken for a list.
CASES = {
    "targets for the loop": (Scenes(40), stacked, in_the_loop, 8),
    "targets for the model": (Scenes(40), stacked, in_the_model, 8),
    "lists in a dict": (Scenes(40), as_dict, from_a_dict, 8),
    "images padded in two directions": (Scenes(40, sizes=True), padded, with_a_mask, 8),
    "as many samples as parts": (Scenes(40), stacked, in_the_loop, 2),
    "a list that the loop writes to": (Scenes(40), stacked, scaling, 8),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_served_as_computed(directory, name, workers):
    data, collate, step, size = CASES[name]
    plain, batches = run(data, collate, step, None, size, workers=workers)
    served, given = run(data, collate, step, directory, size, workers=workers)
    assert_same(plain, served)
    assert served.hits == [0, 40, 40]
    for theirs, ours in zip(batches, given, strict=True):
        assert_alike(theirs, ours)


def test_images_in_a_list_are_given_as_they_are(directory):
    """The model is called with a list, whose tensors do not know their samples."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        images, targets = batch
        return loss_of(torch.cat([model(image[None]) for image in images]), targets)

    def collate(samples: Any) -> Any:
        return tuple(zip(*samples, strict=True))

    data = Scenes(24, sizes=True)
    plain, served = (run(data, collate, step, place)[0] for place in (None, directory))
    assert served.losses == plain.losses
    assert served.hits == [0, 0, 0]


def assert_alike(theirs: Any, ours: Any) -> None:
    """The same structure and values; an image without data has its shape."""
    if isinstance(theirs, Tensor):
        assert theirs.shape == ours.shape
        if theirs.dim() < 3:
            assert torch.equal(theirs, torch.as_tensor(ours))
    elif isinstance(theirs, dict):
        assert theirs.keys() == ours.keys()
        for key in theirs:
            assert_alike(theirs[key], ours[key])
    elif isinstance(theirs, list | tuple):
        assert type(theirs) is type(ours)
        assert len(theirs) == len(ours)
        for pair in zip(theirs, ours, strict=True):
            assert_alike(*pair)
    else:
        assert theirs == ours
