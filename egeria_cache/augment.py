"""Augmentation behind the boundary: drawn anew in every step, whatever is served.

An operation takes features, (B, C, H, W) maps or (B, T, W) tokens, and a generator, None for
torch's default one, and returns features. `FeatureAugment` applies some of them while the model is
in training mode, on hits and misses alike, since it stands where nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria_cache.errors import EgeriaError

Operation = Callable[[Tensor, torch.Generator | None], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Flip:
    """Mirror some of the maps (or images) from left to right."""

    p: float = 0.5

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the maps, some of them mirrored."""
        chosen = torch.rand(len(x), generator=generator).to(x.device) < self.p
        return torch.where(_over(chosen, x), x.flip(-1), x)


@dataclass(slots=True)
class Translate:
    """Shift maps (or images) by up to `most` places each way, all of a batch alike; zeros enter.

    One place of a map is as many pixels as its front's strides multiply to.
    """

    most: int = 1

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the maps, shifted."""
        down, right = torch.randint(-self.most, self.most + 1, (2,), generator=generator).tolist()
        padded = nn.functional.pad(x, (self.most,) * 4)
        rows, columns = self.most - down, self.most - right
        return padded[..., rows : rows + x.shape[-2], columns : columns + x.shape[-1]]


@dataclass(slots=True)
class Crop:
    """Keep a random window of the tokens, or of both dimensions of maps: what follows must take
    fewer of them, as pooling and attention do."""

    keep: float = 0.9

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the window."""
        for dim in (1,) if x.dim() == 3 else (-2, -1):
            size = max(1, round(self.keep * x.shape[dim]))
            first = int(torch.randint(x.shape[dim] - size + 1, (), generator=generator))
            x = x.narrow(dim, first, size)
        return x


@dataclass(slots=True)
class Dropout:
    """Drop whole channels of maps, or single features of tokens: parts of what is seen missing."""

    p: float = 0.1

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the features, some of them zero."""
        shape = x.shape[:2] if x.dim() == 4 else x.shape
        kept = torch.rand(shape, generator=generator).to(x.device) >= self.p
        return x * _over(kept, x) / (1 - self.p)


@dataclass(slots=True)
class Noise:
    """Add normal noise of `scale` standard deviations of the features: noise of the input."""

    scale: float = 0.1

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the features and noise."""
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        return x + self.scale * x.detach().std() * noise


@dataclass(slots=True)
class Jitter:
    """Scale each channel of each sample by 1 - `scale` to 1 + `scale`: brightness and colour."""

    scale: float = 0.2

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the features, their channels scaled."""
        shape = x.shape[:2] if x.dim() == 4 else (len(x), 1, x.shape[-1])
        factor = 1 + self.scale * (2 * torch.rand(shape, generator=generator) - 1).to(x.device)
        return x * _over(factor, x)


@dataclass(slots=True)
class Mixup:
    """Blend each sample with another (Zhang et al. 2018), in feature space (manifold mixup)."""

    alpha: float = 0.2
    order: Tensor | None = field(default=None, init=False, repr=False)
    """With which sample each was blended last."""
    weight: float = field(default=1.0, init=False, repr=False)
    """The part of each that was its own."""

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the blended features."""
        self.weight, self.order = self._drawn(x, generator)
        return torch.lerp(x[self.order], x, self.weight)

    def _drawn(self, x: Tensor, generator: torch.Generator | None) -> tuple[float, Tensor]:
        # torch's Beta takes no generator.
        seed = int(torch.randint(1 << 62, (), generator=generator))
        weight = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        return max(weight, 1 - weight), torch.randperm(len(x), generator=generator).to(x.device)

    def loss(self, criterion: Loss, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss against the targets of both; against the sample's own in evaluation."""
        if self.order is None:
            return criterion(output, target)
        order, self.order = self.order, None
        own, other = criterion(output, target), criterion(output, target[order])
        return self.weight * own + (1 - self.weight) * other


@dataclass(slots=True)
class CutMix(Mixup):
    """Put a window of another sample's map into each (Yun et al. 2019), in feature space."""

    alpha: float = 1.0

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the maps, each with a window of another."""
        weight, self.order = self._drawn(x, generator)
        height, width = (round(size * (1 - weight) ** 0.5) for size in x.shape[-2:])
        top = int(torch.randint(x.shape[-2] - height + 1, (), generator=generator))
        left = int(torch.randint(x.shape[-1] - width + 1, (), generator=generator))
        inside = torch.zeros(x.shape[-2:], dtype=torch.bool, device=x.device)
        inside[top : top + height, left : left + width] = True
        self.weight = 1 - height * width / (x.shape[-2] * x.shape[-1])
        return torch.where(inside, x[self.order], x)


class FeatureAugment(nn.Module):
    """Applies operations one after the other in training mode; as it stands in evaluation.

    Place it behind the frozen front, or in front of a module there: `before(model.layer4)`.
    """

    def __init__(self, *operations: Operation) -> None:
        super().__init__()
        self.operations = operations

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the batch, augmented in training mode."""
        return self._applied(x) if self.training else x

    def before(self, module: nn.Module) -> RemovableHandle:
        """Augment what `module` is called with, while that is in training mode.

        Raises:
            TypeError: In a call: its first argument is no batch of features.
        """

        def augment(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            return (self._applied(args[0]), *args[1:]) if module.training else None

        return module.register_forward_pre_hook(augment)

    def _applied(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
            what = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"features are maps (B, C, H, W) or tokens (B, T, W), got {what}; augment them "
                "before another module"
            )
        for operation in self.operations:
            x = operation(x, None)
        return x

    def extra_repr(self) -> str:
        """Name the operations."""
        return ", ".join(map(repr, self.operations))


def _over(values: Tensor, x: Tensor) -> Tensor:
    """Give what belongs to samples, or to their channels, the dimensions of the features."""
    values = values if values.dtype == torch.bool else values.to(x.dtype)
    return values.reshape(*values.shape, *[1] * (x.dim() - values.dim()))


class _Returned(BaseException):
    """Leaves the model once the boundary has returned."""


def features(boundary: nn.Module, call: Callable[[], Any], count: int) -> Tensor:
    """Return what `boundary` gives for so many samples when the model is called, and no more of it.

    Raises:
        EgeriaError: It does not return one batch of features.
    """
    found: list[Any] = []

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        found.append(output)
        raise _Returned

    with boundary.register_forward_hook(leave), suppress(_Returned), torch.no_grad():
        call()
    if not found or not isinstance(found[0], Tensor) or len(found[0]) != count:
        raise EgeriaError("the boundary does not return one tensor with a row for each sample")
    return found[0]


def distance(a: Tensor, b: Tensor) -> float:
    """Return how far two batches of features are apart, in the mean of the samples."""
    return float((a - b).float().flatten(1).norm(dim=1).mean())
