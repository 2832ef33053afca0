"""Which reference a layer gets: what was asked for, or the next best one that can do it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from egeria_core.config import ReferenceKind
from egeria_core.plasticity import sp_loss
from egeria_core.reference.int8 import DynamicInt8Reference, StaticInt8Reference
from egeria_core.reference.references import FloatReference, Reference, run_layer
from egeria_core.reference.tap import Probe

__all__ = ["ReferenceChain"]

INT8_PAYS_ABOVE_S = 0.02
"""An int8 build takes 0.1-3 s; W forwards of the probe must cost more than that to win it back."""
MAX_NOISE = 1e-3
"""SP between the reference and fp32 with the same weights, at any plasticity: past it the
quantised layer is another layer (seen in working ones: 6e-8 to 6e-6)."""
NOISE_SHARE = 0.1
"""The noise must stay below this part of the plasticity that is read with it."""


class ReferenceChain:
    """The reference of one layer, and what to fall back on. Not thread-safe.

    Args:
        kind: What was asked for.
        candidates: In order of preference; None: by `kind` and the layer's own structure.
    """

    def __init__(
        self, kind: ReferenceKind, candidates: Sequence[Callable[[], Reference]] | None = None
    ) -> None:
        self._kind = kind
        self._candidates = None if candidates is None else list(candidates)
        self._reference: Reference | None = None
        self._distrusted = False
        self.noise = 0.0
        """SP between the reference and full precision with the same weights, at the last build."""

    @property
    def name(self) -> str:
        """Name of the reference in use."""
        return "none" if self._reference is None else self._reference.name

    @property
    def costly(self) -> bool:
        """Whether a refresh is much dearer than copying weights."""
        return self._reference is not None and self._reference.costly

    def refresh(self, modules: Sequence[nn.Module], probe: Probe) -> list[str]:
        """Rebuild from the modules' present weights; return one line for every fallback taken.

        Raises:
            Exception: Not even the last candidate can represent the layer.
        """
        notes: list[str] = []
        if self._candidates is None:
            self._candidates = self._choose(modules, probe)
        if self._distrusted and len(self._candidates) > 1:
            self._candidates.pop(0)
            self._reference = None
        self._distrusted = False
        while True:
            problem = self._try(modules, probe)
            if problem is None:
                return notes
            failed = self.name
            self._candidates.pop(0)
            if not self._candidates:
                raise problem
            self._reference = None
            notes.append(f"{failed} reference not used: {type(problem).__name__}: {problem}")

    def _try(self, modules: Sequence[nn.Module], probe: Probe) -> Exception | None:
        assert self._candidates is not None
        new = self._reference is None
        if self._reference is None:
            self._reference = self._candidates[0]()
        try:
            self._reference.build(modules, probe)
            self.noise = 0.0
            if self._reference.exact:
                if new:
                    self._reference.run(probe)  # a layer that cannot run here shows it now
            else:
                expected = run_layer(modules, probe)
                self.noise = float(sp_loss(expected, self._reference.run(probe)))
        except Exception as error:  # quantisation tools fail in their own ways
            return error
        last = len(self._candidates) == 1
        if not last and (not math.isfinite(self.noise) or self.noise > MAX_NOISE):
            return ValueError(f"self-check: SP to fp32 with the same weights is {self.noise:.2g}")
        return None

    def run(self, probe: Probe) -> Tensor:
        """Return the reference's activation."""
        assert self._reference is not None, "run before refresh"
        return self._reference.run(probe)

    def heed(self, plasticity: float) -> list[str]:
        """Take note of a reading; where the reference's noise drowns it, change at next refresh."""
        others = len(self._candidates or ()) > 1
        if self._distrusted or not others or self.noise <= NOISE_SHARE * plasticity:
            return []
        self._distrusted = True
        return [
            f"{self.name} reference given up: its noise {self.noise:.2g} is not well below the "
            f"plasticity {plasticity:.2g}"
        ]

    def _choose(self, modules: Sequence[nn.Module], probe: Probe) -> list[Callable[[], Reference]]:
        """Return the kinds to try, best first."""
        full = partial(FloatReference, torch.float32)
        half = partial(FloatReference, torch.bfloat16)
        if self._kind == "fp32":
            return [full]
        if self._kind == "bf16":
            return [half, full]
        if self._kind == "auto" and _forward_s(modules, probe) < INT8_PAYS_ABOVE_S:
            return [full]
        inner = [m for module in modules for m in module.modules()]
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in inner)
        return [StaticInt8Reference if convolves else DynamicInt8Reference, half, full]


def _forward_s(modules: Sequence[nn.Module], probe: Probe) -> float:
    run_layer(modules, probe)
    start = time.perf_counter()
    run_layer(modules, probe)
    return time.perf_counter() - start
