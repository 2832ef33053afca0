"""A reference in single precision; those in 8-bit integers are made of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egeria_core.errors import EvaluatorError
from egeria_core.reference.tap import Probe, first_activation, run_calls


def cast(probe: Probe) -> Probe:
    """Return a copy with floating-point tensors in single precision.

    Always a copy: the layer may begin with an in-place operation, and calls are run again.
    """

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(torch.float32 if leaf.is_floating_point() else leaf.dtype, copy=True)

    return probe.mapped(convert)


@torch.no_grad()
def run_layer(modules: Sequence[nn.Module], probe: Probe) -> Tensor:
    """Run the layer on the probe's inputs; return its activation, in single precision.

    Raises:
        EvaluatorError: The layer returned no floating-point tensor.
    """
    activation = first_activation(run_calls(modules, cast(probe).calls), probe.num_rows)
    if activation is None:
        names = ", ".join(call.module for call in probe.calls)
        raise EvaluatorError(f"{names}: no floating-point output with a batch dimension")
    return activation.float()


class Reference:
    """One layer, frozen in time: a copy of its modules. Not thread-safe."""

    name = "fp32"
    """As it appears in the history. Only `fp32` returns what the layer itself returns."""
    costly = False
    """Whether a refresh is much dearer than copying weights."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Take the weights of `modules` (inference mode, full precision) as they are now.

        Args:
            modules: Those that `probe.calls` names, in order. They stay the caller's: later
                changes of their weights must not show.
            probe: Calibration data.

        Raises:
            Exception: Of any kind, where this kind of reference cannot represent the layer.
        """
        self._modules = copy.deepcopy(list(modules))

    def run(self, probe: Probe) -> Tensor:
        """Return the layer's activation for the probe's rows."""
        return run_layer(self._modules, probe)
