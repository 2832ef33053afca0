"""Run a model's code in float64, where rounding cannot be taken for a dependence, or hide one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Imprecise", "doubled", "in_float64"]

_COARSE = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Imprecise(Exception):  # noqa: N818
    """Something was computed in fewer digits all the same."""


def doubled(tensor: Tensor) -> Tensor:
    """Return what stands for a tensor of the model, or of its inputs."""
    if not tensor.is_floating_point():
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().double(), tensor.requires_grad)
    return tensor.double()


class _Float64(TorchFunctionMode):
    """Reads every request for fewer digits as one for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _CASTS:
            func = Tensor.double
            args, kwargs = args[:1], {}
        args = [_wider(arg) for arg in args]
        result = func(*args, **{key: _wider(arg) for key, arg in (kwargs or {}).items()})
        if isinstance(result, Tensor) and result.dtype in _COARSE:
            raise Imprecise
        return result


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _COARSE else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute with as many digits inside the block.

    Raises:
        Imprecise: Inside the block, where something does not follow.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)
