"""How well an operation on features stands for one on the front's inputs: measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.augment import Operation
from egeria_cache.errors import EgeriaError

Call = Callable[..., Any]


class _Returned(BaseException):
    """Leaves the model once the boundary has returned."""


def commutes(
    call: Call, boundary: nn.Module, inputs: Tensor, before: Operation, after: Operation, seed: int
) -> float:
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
    plain = _features(call, boundary, inputs)
    early = _features(call, boundary, before(inputs, torch.Generator().manual_seed(seed)))
    late = after(plain, torch.Generator().manual_seed(seed))
    if early.shape != late.shape:
        shapes = f"{tuple(early.shape)} and {tuple(late.shape)}"
        raise EgeriaError(f"augmenting before and after the front gives features of {shapes}")
    apart = _distance(plain, plain.roll(1, 0))
    return _distance(early, late) / max(apart, 1e-12)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().flatten(1).norm(dim=1).mean())


def _features(call: Call, boundary: nn.Module, inputs: Tensor) -> Tensor:
    found: list[Any] = []

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        found.append(output)
        raise _Returned

    handle = boundary.register_forward_hook(leave)
    try:
        with torch.no_grad():
            call(inputs)
    except _Returned:
        pass
    finally:
        handle.remove()
    if not found or not isinstance(found[0], Tensor) or len(found[0]) != len(inputs):
        raise EgeriaError("the boundary does not return one tensor with a row for each sample")
    return found[0]
