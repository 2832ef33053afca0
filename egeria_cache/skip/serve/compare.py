"""How different two results of the same computation are, and how different they may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from egeria_cache.attempt import Attempt
from egeria_cache.device import autocast_kinds, fp32_precision, runs_late, without_autocast
from egeria_cache.pystate import own_dict, own_slots

# Relative to the largest value. Kernels choose their blocking by the batch size, so the same sample
# in another batch differs in its last bits; what really depends on its neighbours differs by more.
_TOLERANCE = {
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4,
    torch.float16: 1e-2, torch.bfloat16: 5e-2,
}  # fmt: skip
_COARSE = 1e-3
"""Of float32 on an accelerator, whose kernels may round what they multiply to ten bits."""


def coarseness(dtypes: Iterable[torch.dtype]) -> float:
    """Return what the coarsest of some dtypes leaves open."""
    coarser = () if fp32_precision() == "highest" else (torch.bfloat16,)  # of what is multiplied
    return max((_TOLERANCE.get(dtype, 0.0) for dtype in (*dtypes, *coarser)), default=0.0)


def tolerance(tensor: Tensor, coarsest: float = 0.0, *, as_stored: bool = False) -> float:
    """Return the largest acceptable `difference` of results; integers must be equal.

    Args:
        tensor: A result, just computed: it may be as coarse as what autocast made on the way.
        coarsest: The `coarseness` of all that it was computed with.
        as_stored: By its own dtype alone: what differs by more may be rounding, or may not.
    """
    own = _TOLERANCE.get(tensor.dtype, 0.0)
    if as_stored or not own:
        return own
    if tensor.dtype != torch.float32:
        return max(own, coarsest)
    kinds = [kind for kind in autocast_kinds() if torch.is_autocast_enabled(kind)]
    coarse = [_COARSE] if runs_late(tensor.device) else []
    return max(
        [own, coarsest, *coarse, *(_TOLERANCE[torch.get_autocast_dtype(kind)] for kind in kinds)]
    )


def difference(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|a|; infinity if shapes or non-finite values differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not runs_late(a.device) and torch.equal(a, b):
        return 0.0
    return float(gap(a, b))


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Return the `difference` of tensors of one shape and dtype, where they are: nothing waits."""
    with torch.no_grad(), without_autocast(a.device):
        if not (a.is_floating_point() or a.is_complex()):
            return torch.where(a != b, torch.inf, 0.0).sum()
        if not a.is_complex():
            a, b = a.double(), b.double()
        if not a.numel():
            return a.abs().sum()
        finite = a.isfinite() & b.isfinite()
        alike = finite | (a == b) | (a.isnan() & b.isnan())
        size, error = (x.abs().masked_fill(~finite, 0.0).max() for x in (a, a - b))
        # The floor keeps values that are zero in exact arithmetic from counting as different.
        return torch.where(alike.all(), error / size.clamp(min=1e-6), torch.inf)


def slice_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of any slice, a sample or a channel, against its own size.

    A statistic of the batch may be small beside one huge feature. Slices below a millionth of the
    largest value count as being of that size: they may be zero in exact arithmetic.

    Args:
        a: Rows, shape (N, ...), floating point.
        b: The same samples in other company, same shape.
    """
    if a.shape != b.shape or not a.is_floating_point() or torch.equal(a, b):
        return 0.0
    with torch.no_grad(), without_autocast(a.device):
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        size, error = a.abs(), (a - b).abs()
        floor = float(size.max()) * 1e-6 + 1e-300
        worst = 0.0
        for dim in range(a.dim()):
            rest = [d for d in range(a.dim()) if d != dim]
            sizes, errors = (x.amax(rest) if rest else x for x in (size, error))
            worst = max(worst, float((errors / sizes.clamp(min=floor)).max()))
    return worst


def same_content(a: Any, b: Any, *, depth: int = 8) -> bool:
    """Compare objects of any kind by what they hold; what cannot be compared is different."""
    if a is b:
        return True
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, Tensor):
        return difference(a, b) <= tolerance(a)
    if isinstance(a, list | tuple):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    elif not isinstance(a, dict) and (hasattr(a, "__dict__") or own_slots(a)):
        a, b = ({**(own_dict(one) or {}), **own_slots(one)} for one in (a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_content(a[k], b[k], depth=depth - 1) for k in a)
    with Attempt():
        return bool(a == b)
    return False
