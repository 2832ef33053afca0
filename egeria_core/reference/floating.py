"""References in floating point: full precision, bfloat16, or on the training device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from egeria_core.hooks import Probe
from egeria_core.reference.base import run_layer
from egeria_core.snapshot import copy_between, deep_copy

__all__ = ["FloatReference"]


class FloatReference:
    """A copy of the modules in one floating-point type.

    fp16 is not offered: on a CPU it runs several times slower than fp32.
    """

    costly = False

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self.exact = dtype is torch.float32
        self._dtype = dtype
        self._device = torch.device(device)
        if self._device.type != "cpu":
            self.name = "device"
        self._copies: list[nn.Module] = []

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Copy the weights; the structure only once."""
        if not self._copies:
            self._copies = [
                module.to(device=self._device, dtype=self._dtype)
                for module in deep_copy(list(modules))
            ]
        copy_between(modules, self._copies)

    def run(self, probe: Probe) -> Tensor:
        """Run the copy."""
        return run_layer(self._copies, probe, self._device, self._dtype)
