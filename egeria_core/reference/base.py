"""What a reference is, whatever its precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from egeria_core.errors import EvaluatorError
from egeria_core.hooks import Call, Probe, first_activation, run_calls

__all__ = ["Reference", "cast_calls", "run_layer"]


class Reference(Protocol):
    """One layer, frozen in time. Not thread-safe."""

    name: str
    """As it appears in the history."""
    exact: bool
    """Whether it returns what the layer itself returns; nothing to check then."""
    costly: bool
    """Whether a refresh is much dearer than copying weights."""

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Take the weights of `modules` (inference mode, full precision) as they are now.

        Args:
            modules: Those that `probe.calls` names, in order. They stay the caller's: later
                changes of their weights must not show.
            probe: Calibration data.

        Raises:
            Exception: Of any kind, where this kind of reference cannot represent the layer.
        """

    def run(self, probe: Probe) -> Tensor:
        """Return the layer's activation for the probe's rows."""


def cast_calls(
    calls: Sequence[Call], device: torch.device | str, dtype: torch.dtype = torch.float32
) -> list[Call]:
    """Return copies with tensors on `device` and floating-point ones in `dtype`.

    Always copies: the layer may begin with an in-place operation, and calls are run again.
    """

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

    return [
        Call(call.module, tree_map(convert, call.args), tree_map(convert, call.kwargs))
        for call in calls
    ]


def run_layer(
    modules: Sequence[nn.Module],
    probe: Probe,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run the layer on the probe's inputs; return its activation in single precision.

    Raises:
        EvaluatorError: The layer returned no floating-point tensor.
    """
    with torch.no_grad():
        output = run_calls(modules, cast_calls(probe.calls, device, dtype))
    activation = first_activation(output, probe.num_rows, probe.batch_dim)
    if activation is None:
        names = ", ".join(call.module for call in probe.calls)
        raise EvaluatorError(f"{names}: no floating-point output with a batch dimension")
    return activation.float()
