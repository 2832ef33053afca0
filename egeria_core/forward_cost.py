"""How much of a forward's arithmetic lies in front of each boundary: counted, so it is repeatable.

Times would differ from run to run and from rank to rank, and with them every decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

__all__ = ["BACKWARD_SHARE", "ForwardCost", "saved_parts"]

BACKWARD_SHARE = 2 / 3
"""A backward computes two products for each one of the forward."""


class _Counter(TorchDispatchMode):
    """Adds up the floating-point operations of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=result))
        return result


class ForwardCost:
    """Counts one training forward of `model`; `close()` leaves no hook behind.

    Args:
        model: The bare model.
        candidates: Modules at whose return the count so far is noted.
    """

    def __init__(self, model: nn.Module, candidates: Iterable[str]) -> None:
        self._counter: _Counter | None = None
        self.total = 0
        self.upto: dict[str, int] = {}
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_Start(self)),
            # Called also where the forward raises: the mode must not stay.
            model.register_forward_hook(_End(self), always_call=True),
        ]
        for name in candidates:
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_hook(_Note(self, name)))

    def start(self) -> None:
        """Begin with the first forward that has gradients."""
        live = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if live and self._counter is None and not self.total:
            self._counter = _Counter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def note(self, name: str) -> None:
        """A module has returned."""
        if self._counter is not None:
            self.upto[name] = self._counter.total

    def end(self) -> None:
        """The forward is over."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.total = counter.total

    def close(self) -> None:
        """Remove every hook; idempotent."""
        self.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Start:
    """A hook; of which a copy of the model gets an inert one."""

    def __init__(self, cost: ForwardCost | None) -> None:
        self._cost = cost

    def __call__(self, *_: Any) -> None:
        if self._cost is not None:
            self._cost.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Start:
        return type(self)(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class _End(_Start):
    def __call__(self, *_: Any) -> None:
        if self._cost is not None:
            self._cost.end()


class _Note(_Start):
    def __init__(self, cost: ForwardCost | None, name: str = "") -> None:
        super().__init__(cost)
        self._name = name

    def __call__(self, *_: Any) -> None:
        if self._cost is not None:
            self._cost.note(self._name)


def saved_parts(
    boundaries: Sequence[str],
    cost: ForwardCost | None,
    num_parameters: Sequence[int],
    *,
    upto: Mapping[str, int] | None = None,
) -> tuple[float, ...]:
    """Return, for k = 0 to L - 1, the part of a step that freezing the first k layers saves.

    Their backward; a cache that spares their forward as well is not counted on. Where nothing was
    counted, arithmetic is taken to go with the number of parameters.

    Args:
        boundaries: Of all layers, front first.
        cost: A forward that was counted.
        num_parameters: Of each layer.
        upto: Instead of what `cost` noted.
    """
    noted = upto if upto is not None else (cost.upto if cost is not None else {})
    total = cost.total if cost is not None else 0
    front = boundaries[:-1]
    if total and all(name in noted for name in front):
        parts = [noted[name] / total for name in front]
    else:
        whole = max(1, sum(num_parameters))
        parts = [sum(num_parameters[: k + 1]) / whole for k in range(len(front))]
    found = [0.0]
    for part in parts:
        found.append(max(found[-1], BACKWARD_SHARE * part))
    return tuple(found)
