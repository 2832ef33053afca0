"""How many rows of a tensor belong to one sample: several views of a picture, say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor


class Fold(NamedTuple):
    """A tensor has `outer` blocks of the batch, and in each of them `inner` rows of a sample."""

    outer: int = 1
    inner: int = 1

    def mask(self, mask: np.ndarray) -> np.ndarray:
        """Return which rows a bool mask of samples, shape (B,), means."""
        return mask if self == Fold() else np.tile(np.repeat(mask, self.inner), self.outer)

    def apart(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return shape (B, ..., outer * inner, ...): what is one sample's, the samples first."""
        split = tensor.unflatten(dim, (self.outer, -1, self.inner)).movedim(dim + 1, 0)
        rows: Tensor = split.flatten(dim + 1, dim + 2)
        return rows

    def together(self, samples: Tensor, dim: int = 0) -> Tensor:
        """Return what `apart` was made from."""
        split = samples.unflatten(dim + 1, (self.outer, self.inner)).movedim(0, dim + 1)
        tensor: Tensor = split.flatten(dim, dim + 2)
        return tensor
