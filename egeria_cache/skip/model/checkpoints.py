"""Activation checkpointing around the boundary: does backward run the skipped modules again?"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Region", "checkpointed_around"]


@dataclass(frozen=True, slots=True)
class Region:
    """A call of `torch.utils.checkpoint.checkpoint` that was open when the boundary was called."""

    frame: Any
    """What PyTorch notes about it, in the kind that is not reentrant; else None."""

    def runs_again(self) -> bool:
        """Whether backward may ask for it; to be asked after the forward.

        It runs again for the sake of tensors that autograd saved in it. A region in which nothing
        was trained, because it ends at the boundary, has saved none.
        """
        return bool(getattr(self.frame, "weak_holders", True))


def checkpointed_around(boundary: nn.Module) -> list[Region]:
    """Return the regions that hold more than the call of the boundary, which is being made."""
    regions = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            region = frame.f_locals.get("function", frame.f_locals.get("run_function"))
            if region is not None and not _is_call_of(region, boundary):
                generator = getattr(frame.f_locals.get("gen"), "gi_frame", None)
                inside = {} if generator is None else generator.f_locals
                regions.append(Region(inside.get("new_frame")))
        frame = frame.f_back  # type: ignore[assignment]
    return regions


def _is_call_of(function: Any, module: nn.Module) -> bool:
    """Whether calling `function` calls `module` and nothing else."""
    while isinstance(function, functools.partial):
        function = function.func
    return function is module or (
        getattr(function, "__self__", None) is module
        and getattr(function, "__name__", "") in ("__call__", "_wrapped_call_impl", "forward")
    )
