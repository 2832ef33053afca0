"""Augmentation behind the boundary: drawn anew in every step, whatever is served.

An operation takes features, (B, C, H, W) maps or (B, T, W) tokens, and a generator, None for
torch's default one, and returns features: those here, or any function. `FeatureAugment` applies
some of them while the model is in training mode, on hits and misses alike, since it stands where
nothing is skipped.
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
        return torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), x.flip(-1), x)


@dataclass(slots=True)
class Noise:
    """Add normal noise of `scale` standard deviations of the features: noise of the input."""

    scale: float = 0.1

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the features and noise."""
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        return x + self.scale * x.detach().std() * noise


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
        # torch's Beta takes no generator.
        seed = int(torch.randint(1 << 62, (), generator=generator))
        weight = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        self.weight = max(weight, 1 - weight)
        self.order = torch.randperm(len(x), generator=generator).to(x.device)
        return torch.lerp(x[self.order], x, self.weight)

    def loss(self, criterion: Loss, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss against the targets of both; against the sample's own in evaluation."""
        if self.order is None:
            return criterion(output, target)
        order, self.order = self.order, None
        own, other = criterion(output, target), criterion(output, target[order])
        return self.weight * own + (1 - self.weight) * other


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


class _Returned(BaseException):
    """Leaves the model once the boundary has returned."""


def commutes(
    call: Callable[..., Any],
    boundary: nn.Module,
    inputs: Tensor,
    before: Operation,
    after: Operation,
    seed: int,
) -> float:  # fmt: skip
    """Return how far augmenting before and after the front are apart, in units of the distance
    between two samples' features: 0 where they are the same.

    Args:
        call: Calls the model with inputs (B, ...).
        boundary: The last frozen module.
        inputs: Of at least two samples.
        before: On the inputs.
        after: On the features.
        seed: Both draw the same.

    Raises:
        EgeriaError: The boundary does not return one batch of features of one shape.
    """
    found: list[Any] = []

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        found.append(output)
        raise _Returned

    handle = boundary.register_forward_hook(leave)
    try:
        for given in (inputs, before(inputs, torch.Generator().manual_seed(seed))):
            with suppress(_Returned), torch.no_grad():
                call(given)
    finally:
        handle.remove()
    if [len(one) for one in found if isinstance(one, Tensor)] != 2 * [len(inputs)]:
        raise EgeriaError("the boundary does not return one tensor with a row for each sample")
    plain, early = found
    late = after(plain, torch.Generator().manual_seed(seed))
    if early.shape != late.shape:
        shapes = f"{tuple(early.shape)} and {tuple(late.shape)}"
        raise EgeriaError(f"augmenting before and after the front gives features of {shapes}")
    return _distance(early, late) / max(_distance(plain, plain.roll(1, 0)), 1e-12)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().flatten(1).norm(dim=1).mean())
