"""Reads the front layer against its reference: what an evaluator does, wherever it lives.

A layer gets the reference that was asked for, or one in full precision where that cannot be had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from egeria_cache.device import Event
from egeria_core.config import ReferenceKind
from egeria_core.errors import EvaluatorError
from egeria_core.history import Verdict
from egeria_core.plasticity import sp_loss
from egeria_core.reference.int8 import DynamicInt8Reference, StaticInt8Reference, quantization
from egeria_core.reference.references import Reference, run_layer
from egeria_core.reference.snapshot import Weights, load_weights
from egeria_core.reference.tap import Probe

INT8_PAYS_ABOVE = 2e9
"""Floating-point operations of the layer's forward on the probe, some 20 ms of a CPU. An int8 build
takes 0.1-3 s, which W such forwards must win back. Counted, not timed: runs must take the same."""
MAX_NOISE = 1e-3
"""SP between the reference and fp32 with the same weights, at any plasticity: past it the
quantised layer is another layer (seen in working ones: 6e-8 to 6e-6)."""
NOISE_SHARE = 0.1
"""The noise must stay below this part of the plasticity that is read with it."""


class ReferenceChain:
    """The reference of one layer, and what to fall back on. Not thread-safe.

    Args:
        kind: What was asked for.
    """

    def __init__(self, kind: ReferenceKind) -> None:
        self._kind = kind
        self.reference: Reference | None = None
        """In use; None: not yet built."""
        self.noise = 0.0
        """SP between the reference and full precision with the same weights, at the last build."""
        self.plasticity = math.inf
        """What was read with it last, which its noise must not drown."""

    def refresh(self, modules: Sequence[nn.Module], probe: Probe) -> list[str]:
        """Rebuild from the modules' present weights; return a line where it has fallen back.

        Raises:
            Exception: The layer cannot be run.
        """
        notes: list[str] = []
        if self.reference is None:
            self.reference = self._choose(modules, probe)
            run_layer(modules, probe)  # a layer that cannot run here shows it now
        if self.reference.costly:
            try:
                self._check(self.reference, modules, probe)
            except Exception as error:  # quantisation tools fail in their own ways
                why = f"{type(error).__name__}: {error}"
                notes.append(f"{self.reference.name} reference not used: {why}")
                self.reference, self.noise = Reference(), 0.0
        if not self.reference.costly:
            self.reference.build(modules, probe)
        return notes

    def _check(self, reference: Reference, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Build a reference and compare it with the layer."""
        reference.build(modules, probe)
        self.noise = float(sp_loss(run_layer(modules, probe), reference.run(probe)))
        if not self.noise <= min(MAX_NOISE, NOISE_SHARE * self.plasticity):
            raise ValueError(
                f"self-check: SP to fp32 with the same weights is {self.noise:.2g}, the plasticity "
                f"{self.plasticity:.2g}"
            )

    def _choose(self, modules: Sequence[nn.Module], probe: Probe) -> Reference:
        """Return a reference of the kind that was asked for and suits the layer."""
        cheap = self._kind == "auto" and _arithmetic(modules, probe) < INT8_PAYS_ABOVE
        if self._kind == "fp32" or cheap:
            return Reference()
        inner = [m for module in modules for m in module.modules()]
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in inner)
        return StaticInt8Reference() if convolves else DynamicInt8Reference()


def _arithmetic(modules: Sequence[nn.Module], probe: Probe) -> int:
    """Return the floating-point operations of a forward; that of a fused layer is taken apart."""
    with quantization(), FlopCounterMode(display=False) as counted:
        run_layer(modules, probe)
    return int(counted.get_total_flops())


@dataclass(slots=True)
class InputItem:
    """What the frontmost active layer was called with, and its weights after the step."""

    step: int
    layer: int
    probe: Probe
    judge: bool
    """Whether there is a reference to read against."""
    refresh: bool
    """Whether `weights` become the reference after this reading."""
    weights: Weights
    modules: list[nn.Module] | None = None
    """Structure of the layer; sent once, when the layer becomes the front."""
    distance: Callable[[Tensor, Tensor], Tensor] = sp_loss
    """Of the layer's activation and its reference's."""
    ready: Event | None = None
    """When what was copied from the device has arrived; None: it has."""

    def arrive(self) -> None:
        """Wait until all that was copied from the device is there."""
        ready, self.ready = self.ready, None
        if ready is not None:
            ready.synchronize()


class ReferenceRunner:
    """Owns the reference of one layer at a time. Not thread-safe.

    Args:
        kind: What was asked for.
    """

    def __init__(self, kind: ReferenceKind) -> None:
        self._kind = kind
        self._chain = ReferenceChain(kind)
        self._modules: list[nn.Module] = []
        self._layer: int | None = None

    def run(self, item: InputItem) -> Verdict:
        """Run layer and reference on the probe, then refresh the reference if it is time.

        Raises:
            EvaluatorError: The layer's structure never arrived.
            Exception: Whatever the layer's own code raises.
        """
        start = time.perf_counter()
        if item.modules is not None:
            self._modules, self._layer = item.modules, item.layer
            self._chain = ReferenceChain(self._kind)
        if item.layer != self._layer:
            raise EvaluatorError(f"no structure was sent for layer {item.layer}")
        load_weights(self._modules, item.weights)
        verdict = Verdict(item.step, item.layer, None)
        if item.judge:
            reference = self._chain.reference
            if reference is None:
                raise EvaluatorError(f"layer {item.layer} has no reference yet")
            theirs = reference.run(item.probe)
            verdict.value = float(item.distance(run_layer(self._modules, item.probe), theirs))
            verdict.reference, verdict.noise = reference.name, self._chain.noise
            self._chain.plasticity = verdict.value
        if item.refresh:
            verdict.notes += self._chain.refresh(self._modules, item.probe)
        verdict.costly = self._chain.reference is not None and self._chain.reference.costly
        verdict.seconds = time.perf_counter() - start
        return verdict
