"""Whether leaves and rows of batches hold the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from egeria_cache.batch import unwrap


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_values(left: Any, right: Any) -> bool:
    """Whether two leaves are equal, to the bit where they are tensors, NaNs included."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        is_like = left.shape == right.shape and left.dtype == right.dtype
        return is_like and torch.equal(_as_bytes(left), _as_bytes(right))
    return type(left) is type(right) and bool(left == right)


def row_prints(leaves: Sequence[Tensor]) -> Tensor:
    """Return a print of each row of some dense tensors on the host: int64, shape (B, 1)."""
    flat = (unwrap(leaf).detach().contiguous().reshape(len(leaf), -1) for leaf in leaves)
    rows = [one.view(torch.uint8).numpy() for one in flat]
    prints = np.zeros((len(rows[0]), 1), np.uint64)
    for row in range(len(prints)):
        for leaf in rows:
            prints[row] = xxhash.xxh3_64_intdigest(leaf[row], int(prints[row, 0]))
    return torch.from_numpy(prints.view(np.int64))
