"""Random numbers apart from the training's: what a reference draws must not move its generators.

Building a quantised layer initialises weights that are then overwritten, and a layer's own code may
draw. On a thread beside training, saving and restoring the default generator would be a race; so
draws are given a generator of their own, by a mode that holds in the calling thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["RandomNumbersApart"]

_IN_PLACE = frozenset(
    {
        Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_,
        Tensor.log_normal_, Tensor.normal_, Tensor.random_, Tensor.uniform_,
    }
)  # fmt: skip
_INITIALISERS = frozenset(
    function
    for name, function in vars(nn.init).items()
    if name.endswith("_") and callable(function) and "generator" in signature(function).parameters
)
"""Inside one, the mode is off: they say themselves that they can be overridden."""
_DRAWS = _IN_PLACE | _INITIALISERS | {
    Tensor.bernoulli, Tensor.multinomial, torch.bernoulli, torch.multinomial, torch.normal,
    torch.rand, torch.randint, torch.randn, torch.randperm,
}  # fmt: skip


class RandomNumbersApart(TorchFunctionMode):
    """Inside, operators that take a generator get one of ours, unless they were given one."""

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operator."""
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator(args, kwargs)}
        return func(*args, **kwargs)

    def _generator(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
        first = next((value for value in args if isinstance(value, Tensor)), None)
        where = kwargs.get("device") if first is None else first.device
        device = torch.get_default_device() if where is None else torch.device(where)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]
