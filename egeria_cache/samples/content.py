"""Whether leaves and rows of batches hold the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of any dtype hold the same, NaNs included."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(_as_bytes(left), _as_bytes(right))
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_values(left: Any, right: Any) -> bool:
    """Whether two leaves are equal, to the bit where they are tensors."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return same_bytes(left, right)
    return type(left) is type(right) and bool(left == right)
