"""Reads the front layer against its reference: what an evaluator does, wherever it lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from egeria_cache.device import Event
from egeria_core.config import ReferenceKind
from egeria_core.errors import EvaluatorError
from egeria_core.plasticity import sp_loss
from egeria_core.reference.choose import ReferenceChain
from egeria_core.reference.references import run_layer
from egeria_core.reference.snapshot import Weights, copy_between, copy_modules, load_weights
from egeria_core.reference.tap import Probe
from egeria_core.verdict import Verdict

__all__ = ["InputItem", "ReferenceRunner"]


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
        self._present: list[nn.Module] = []
        self._past: list[nn.Module] = []
        self._layer: int | None = None

    def run(self, item: InputItem) -> Verdict:
        """Run layer and reference on the probe, then refresh the reference if it is time.

        Raises:
            EvaluatorError: The layer's structure never arrived.
            Exception: Whatever the layer's own code raises.
        """
        start = time.perf_counter()
        if item.modules is not None:
            self._present, self._past = item.modules, copy_modules(item.modules)
            self._chain, self._layer = ReferenceChain(self._kind), item.layer
        if item.layer != self._layer:
            raise EvaluatorError(f"no structure was sent for layer {item.layer}")
        load_weights(self._present, item.weights)
        verdict = Verdict(item.step, item.layer, None)
        if item.judge:
            theirs = self._chain.run(item.probe)
            verdict.value = float(item.distance(run_layer(self._present, item.probe), theirs))
            verdict.reference, verdict.noise = self._chain.name, self._chain.noise
            verdict.notes += self._chain.heed(verdict.value)
        if item.refresh:
            copy_between(self._present, self._past)
            verdict.notes += self._chain.refresh(self._past, item.probe)
        verdict.costly, verdict.seconds = self._chain.costly, time.perf_counter() - start
        return verdict
