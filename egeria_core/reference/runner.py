"""Reads the front layer against its reference: what an evaluator does, wherever it lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
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
        device: Training device, for the reference that lives there.
    """

    def __init__(self, kind: ReferenceKind, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device if kind == "device" else "cpu")
        self._make_chain = partial(ReferenceChain, kind, self._device)
        self._chain = self._make_chain()
        self._present: list[nn.Module] = []
        self._past: list[nn.Module] = []
        self._layer: int | None = None

    def run(self, item: InputItem) -> tuple[Verdict, Tensor | None]:
        """Run layer and reference on the probe, then refresh the reference if it is time.

        Returns:
            The verdict, and its value, for `finish`: a device may be computing it still.

        Raises:
            EvaluatorError: The layer's structure never arrived.
            Exception: Whatever the layer's own code raises.
        """
        item.arrive()
        start = time.perf_counter()
        if item.modules is not None:
            self._present, self._past = item.modules, copy_modules(item.modules)
            self._chain, self._layer = self._make_chain(), item.layer
        if item.layer != self._layer:
            raise EvaluatorError(f"no structure was sent for layer {item.layer}")
        load_weights(self._present, item.weights)
        verdict, value = Verdict(item.step, item.layer, None), None
        if item.judge:
            theirs = self._chain.run(item.probe)
            ours = run_layer(self._present, item.probe, self._device)
            value = item.distance(ours, theirs.to(ours.device))
            verdict.reference, verdict.noise = self._chain.name, self._chain.noise
        if item.refresh:
            copy_between(self._present, self._past)
            verdict.notes = self._chain.refresh(self._past, item.probe)
        verdict.costly, verdict.seconds = self._chain.costly, time.perf_counter() - start
        return verdict, value

    def finish(self, verdict: Verdict, value: Tensor | None) -> Verdict:
        """Wait for the value, and let it tell whether the reference is precise enough for it."""
        if value is not None:
            verdict.value = float(value)
            note = self._chain.heed(verdict.value) if verdict.layer == self._layer else None
            verdict.notes += [] if note is None else [note]
        return verdict
