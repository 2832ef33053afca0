"""What a reference is, whatever its precision, and those in floating point."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from egeria_core.errors import EvaluatorError
from egeria_core.reference.tap import Probe, first_activation, run_calls


class Reference(Protocol):
    """One layer, frozen in time. Not thread-safe."""

    name: str
    """As it appears in the history. Only `fp32` returns what the layer itself returns."""
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


def cast(probe: Probe, dtype: torch.dtype = torch.float32) -> Probe:
    """Return a copy with floating-point tensors in `dtype`.

    Always a copy: the layer may begin with an in-place operation, and calls are run again.
    """

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

    return probe.mapped(convert)


@torch.no_grad()
def run_layer(
    modules: Sequence[nn.Module], probe: Probe, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Run the layer on the probe's inputs; return its activation, in single precision.

    Raises:
        EvaluatorError: The layer returned no floating-point tensor.
    """
    output = run_calls(modules, cast(probe, dtype).calls)
    activation = first_activation(output, probe.num_rows, probe.batch_dim)
    if activation is None:
        names = ", ".join(call.module for call in probe.calls)
        raise EvaluatorError(f"{names}: no floating-point output with a batch dimension")
    return activation.float()


class FloatReference:
    """A copy of the modules in one floating-point type.

    fp16 is not offered: on a CPU it runs several times slower than fp32.
    """

    costly = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.name = "fp32" if dtype is torch.float32 else "bf16"
        self._copies: list[nn.Module] = []

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Copy the modules."""
        self._copies = [copy.deepcopy(module).to(self._dtype) for module in modules]

    def run(self, probe: Probe) -> Tensor:
        """Run the copy."""
        return run_layer(self._copies, probe, self._dtype)
