"""Operations on features in the place of those on images, beside `egeria_cache.augment`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


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
        kept = torch.rand(shape, generator=generator) >= self.p
        kept = kept.reshape(*shape, *[1] * (x.dim() - kept.dim()))
        return x * kept.to(x) / (1 - self.p)
