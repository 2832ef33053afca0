"""The paper's seven tasks: model, synthetic samples of the real shape, loss, size of the data set.

Weights are random; BatchNorm's statistics are calibrated on the samples first, as a network with
untouched statistics would blow up in inference mode. Images are noise in octaves whose amplitude
falls as 1/f, as it does in photographs: white noise would compress like nothing real. Texts are
random tokens with Zipf's frequencies, of varying length, padded to a fixed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import (
    Bert,
    CifarResNet,
    DeepLab,
    MobileNetV2,
    ResNet50,
    Staged,
    Transformer,
)

Sample = tuple[Tensor, ...]
IGNORED = 255
"""VOC's label for borders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How large the inputs are."""

    batch_size: int
    size: int
    """Pixels along a side, or tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One of the paper's seven."""

    name: str
    build: Callable[[], Staged]
    tiny: Callable[[], Staged]
    """The same kind of network, small: for tests."""
    sample: Callable[[int, torch.Generator], Sample]
    """(size, generator) -> the model's inputs, then what the loss needs."""
    num_inputs: int
    loss: Callable[..., Tensor]
    """(output, *what the loss needs)."""
    cpu: Shape
    accelerator: Shape
    data_set: str
    num_samples: int
    """Of the real training set."""
    source: str
    """Where that number comes from."""
    language: bool = False
    """Trained by AdamW; the others by SGD with momentum."""
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Which part of the layers lies before a boundary."""
    rounds: int = 11

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of all that is not frozen."""
        active = [p for p in model.parameters() if p.requires_grad]
        if self.language:
            return torch.optim.AdamW(active, lr=1e-5, fused=True)
        return torch.optim.SGD(active, lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def boundaries(self, model: Staged) -> dict[str, int]:
        """Return the module name at each share, and how many layers lie before it."""
        layers = model.layers
        stops = [max(1, math.floor(share * len(layers) + 0.5)) for share in self.shares]
        return {layers[stop - 1]: stop for stop in stops}


def smooth_image(size: int, generator: torch.Generator) -> Tensor:
    """Return noise in octaves, (3, size, size): mean 0, variance about 1."""
    image = torch.zeros(1, 3, size, size)
    side, amplitude = 4, 1.0
    while side < 2 * size:
        octave = torch.randn(1, 3, min(side, size), min(side, size), generator=generator)
        image += amplitude * F.interpolate(octave, (size, size), mode="bicubic")
        side, amplitude = 2 * side, amplitude / 2
    return image[0]


def tokens(length: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return token numbers, (length,): Zipf's law, a random length, zeros behind it."""
    uniform = torch.rand(length, generator=generator)
    ids = (vocabulary**uniform).long().clamp(1, vocabulary - 1)
    used = int(torch.randint(length // 2, length + 1, (), generator=generator))
    return torch.where(torch.arange(length) < used, ids, 0)


def image_and_class(num_classes: int) -> Callable[[int, torch.Generator], Sample]:
    def sample(size: int, generator: torch.Generator) -> Sample:
        return smooth_image(size, generator), torch.randint(num_classes, (), generator=generator)

    return sample


def image_and_map(size: int, generator: torch.Generator) -> Sample:
    coarse = torch.randint(21, (1, 1, 5, 5), generator=generator).float()
    labels = F.interpolate(coarse, (size, size))[0, 0].long()
    labels[:2] = IGNORED
    return smooth_image(size, generator), labels


def sentences(size: int, generator: torch.Generator) -> Sample:
    source, target = (tokens(size + i, 37_000, generator) for i in range(2))
    return source, target[:-1], target[1:]


def question(size: int, generator: torch.Generator) -> Sample:
    ids = tokens(size, 30_522, generator)
    segments = (torch.arange(size) > 16).long() * (ids != 0)
    return ids, segments, ids != 0, torch.randint(17, size // 2, (2,), generator=generator)


def map_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    main, aux = (F.cross_entropy(logits, labels, ignore_index=IGNORED) for logits in output)
    return main + 0.5 * aux


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=0, label_smoothing=0.1)


def span_loss(logits: Tensor, span: Tensor) -> Tensor:
    return F.cross_entropy(logits, span)


IMAGENET = {
    "data_set": "ImageNet", "num_samples": 1_281_167,
    "source": "ILSVRC 2012 training set (Russakovsky et al. 2015)",
}  # fmt: skip
WMT16 = {
    "data_set": "WMT16 En-De", "num_samples": 4_500_000,
    "source": "about 4.5 M sentence pairs (Vaswani et al. 2017)",
}  # fmt: skip
ALL: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="ResNet-50",
            build=ResNet50,
            tiny=lambda: ResNet50(10, (1, 1, 1, 1)),
            sample=image_and_class(10),
            num_inputs=1,
            loss=F.cross_entropy,
            cpu=Shape(batch_size=4, size=224),
            accelerator=Shape(batch_size=128, size=224),
            rounds=7,
            **IMAGENET,  # type: ignore[arg-type]
        ),
        Task(
            name="MobileNetV2",
            build=MobileNetV2,
            tiny=lambda: MobileNetV2(10, ((1, 8, 1, 1), (6, 12, 3, 2))),
            sample=image_and_class(10),
            num_inputs=1,
            loss=F.cross_entropy,
            cpu=Shape(batch_size=8, size=224),
            accelerator=Shape(batch_size=128, size=224),
            rounds=7,
            **IMAGENET,  # type: ignore[arg-type]
        ),
        Task(
            name="ResNet-56",
            build=CifarResNet,
            tiny=lambda: CifarResNet(1),
            sample=image_and_class(10),
            num_inputs=1,
            loss=F.cross_entropy,
            cpu=Shape(batch_size=128, size=32),
            accelerator=Shape(batch_size=128, size=32),
            data_set="CIFAR-10",
            num_samples=50_000,
            source="training set (Krizhevsky 2009)",
        ),
        Task(
            name="DeepLabv3",
            build=DeepLab,
            tiny=lambda: DeepLab(21, (1, 1, 1, 1)),
            sample=image_and_map,
            num_inputs=1,
            loss=map_loss,
            # 321 is the crop of DeepLab (2015) and DeepLabv2, 513 that of DeepLabv3.
            cpu=Shape(batch_size=2, size=321),
            accelerator=Shape(batch_size=16, size=513),
            data_set="VOC 2012, augmented",
            num_samples=10_582,
            source="trainaug: VOC 2012 with the masks of Hariharan et al. 2011, as DeepLabv3 uses",
            # The last one in the fourth stage: two tensors cross, as the auxiliary head reads
            # the third.
            shares=(0.25, 0.5, 0.82),
            rounds=7,
        ),
        Task(
            name="Transformer-Base",
            build=Transformer,
            tiny=lambda: Transformer(2, 16, 2, 16),
            sample=sentences,
            num_inputs=2,
            loss=text_loss,
            cpu=Shape(batch_size=4, size=64),
            accelerator=Shape(batch_size=128, size=64),
            language=True,
            **WMT16,  # type: ignore[arg-type]
        ),
        Task(
            name="Transformer-Tiny",
            build=Transformer.tiny,
            tiny=lambda: Transformer(2, 16, 2, 16),
            sample=sentences,
            num_inputs=2,
            loss=text_loss,
            cpu=Shape(batch_size=16, size=64),
            accelerator=Shape(batch_size=512, size=64),
            language=True,
            **WMT16,  # type: ignore[arg-type]
        ),
        Task(
            name="BERT-Base",
            build=Bert,
            tiny=lambda: Bert(4, 16, 2, 16),
            sample=question,
            num_inputs=3,
            loss=span_loss,
            cpu=Shape(batch_size=1, size=384),
            accelerator=Shape(batch_size=32, size=384),
            data_set="SQuAD 1.1",
            num_samples=88_000,
            source="87,599 questions (Rajpurkar et al. 2016), about 88,000 windows of 384 tokens",
            language=True,
            rounds=7,
        ),
    )
}
