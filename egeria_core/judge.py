"""Runs the reference and compares: what the evaluator does, wherever it lives.

Two halves, as in the paper's Figure 6. `ReferenceRunner` turns an item of the input queue into an
item of the reference-output queue; `compare` joins that with the training-output queue's item into
a verdict. Neither knows of training, threads or processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from egeria_cache.device import Event
from egeria_core.config import ReferenceKind
from egeria_core.errors import EvaluatorError
from egeria_core.hooks import Probe
from egeria_core.plasticity import sp_loss
from egeria_core.policies.base import Measure
from egeria_core.reference import RandomNumbersApart, ReferenceChain, run_layer
from egeria_core.snapshot import Weights, copy_between, copy_modules, load_weights

__all__ = [
    "InputItem",
    "OutputItem",
    "ReferenceItem",
    "ReferenceRunner",
    "Verdict",
    "compare",
]


@dataclass(slots=True)
class InputItem:
    """Input queue: what the frontmost active layer was called with, and its weights if needed."""

    step: int
    layer: int
    probe: Probe
    judge: bool
    """Whether there is a reference to read against."""
    refresh: bool
    """Whether `weights` become the reference after this reading."""
    inference: bool
    """Whether the layer's own side is `weights` in inference mode, not the captured output."""
    weights: Weights | None = None
    modules: list[nn.Module] | None = None
    """Structure of the layer; sent once, when the layer becomes the front."""
    ready: Event | None = None
    """When what was copied from the device has arrived; None: it has."""

    def arrive(self) -> None:
        """Wait until all that was copied from the device is there, the training output as well."""
        ready, self.ready = self.ready, None
        if ready is not None:
            ready.synchronize()


@dataclass(slots=True)
class OutputItem:
    """Training-output queue: what the layer returned in training."""

    step: int
    measure: Measure
    output: Tensor | None


@dataclass(slots=True)
class ReferenceItem:
    """Reference-output queue: what the reference returned for the same rows."""

    step: int
    layer: int
    theirs: Tensor | None
    ours: Tensor | None
    reference: str
    noise: float
    costly: bool
    seconds: float
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What came of one evaluation. `value` is None where there was nothing to read against."""

    step: int
    layer: int
    value: float | None
    values: tuple[float | None, ...] | None = None
    reference: str = "none"
    noise: float = 0.0
    costly: bool = False
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    dropped: str | None = None
    """Why the evaluator did not evaluate, where it did not."""


class ReferenceRunner:
    """Owns the reference of one layer at a time. Not thread-safe.

    Args:
        kind: What was asked for.
        device: Training device, for the reference that lives there.
        beside_training: Whether the training thread runs modules meanwhile, in the same process.
    """

    def __init__(
        self,
        kind: ReferenceKind,
        device: torch.device | str = "cpu",
        *,
        beside_training: bool = False,
    ) -> None:
        self._device = torch.device(device if kind == "device" else "cpu")
        self._make_chain = partial(
            ReferenceChain, kind, self._device, beside_training=beside_training
        )
        self._chain = self._make_chain()
        self._present: list[nn.Module] = []
        self._past: list[nn.Module] = []
        self._layer: int | None = None
        self._apart = RandomNumbersApart()

    def run(self, item: InputItem) -> ReferenceItem:
        """Run the reference on the probe, then refresh it if it is time.

        Raises:
            EvaluatorError: The layer's structure never arrived.
            Exception: Whatever the layer's own code raises.
        """
        item.arrive()
        with self._apart:
            return self._run(item)

    def _run(self, item: InputItem) -> ReferenceItem:
        start = time.perf_counter()
        if item.modules is not None:
            self._present = item.modules
            self._past = copy_modules(item.modules)
            self._chain = self._make_chain()
            self._layer = item.layer
        if item.layer != self._layer:
            raise EvaluatorError(f"no structure was sent for layer {item.layer}")
        if item.weights is not None:
            load_weights(self._present, item.weights)
        ours = theirs = None
        if item.judge:
            theirs = self._chain.run(item.probe)
            if item.inference:
                ours = run_layer(self._present, item.probe, self._device)
        notes: list[str] = []
        if item.refresh:
            copy_between(self._present, self._past)
            notes = self._chain.refresh(self._past, item.probe)
        return ReferenceItem(
            item.step,
            item.layer,
            theirs,
            ours,
            self._chain.name,
            self._chain.noise,
            self._chain.costly,
            time.perf_counter() - start,
            notes,
        )

    def heed(self, verdict: Verdict) -> None:
        """Let a reading tell whether the reference is precise enough for it."""
        if verdict.value is not None and verdict.layer == self._layer:
            with self._apart:
                note = self._chain.heed(verdict.value)
            if note is not None:
                verdict.notes.append(note)


def compare(reference: ReferenceItem, training: OutputItem) -> Verdict:
    """Join the two sides of one evaluation.

    Raises:
        EvaluatorError: They are not of the same step, or carry no activation.
    """
    if reference.step != training.step:
        raise EvaluatorError(
            f"the queues are out of step: reference {reference.step}, training {training.step}"
        )
    verdict = Verdict(
        reference.step,
        reference.layer,
        None,
        reference=reference.reference,
        noise=reference.noise,
        costly=reference.costly,
        notes=list(reference.notes),
    )
    start = time.perf_counter()
    if reference.theirs is not None:
        ours = training.output if reference.ours is None else reference.ours
        if ours is None:
            raise EvaluatorError(f"step {training.step} carries no activation of the layer")
        if training.measure == "activation_norm":
            difference = ours.float() - reference.theirs.to(ours.device)
            verdict.value = float(difference.abs().mean())
        else:
            verdict.value = float(sp_loss(ours, reference.theirs.to(ours.device)))
    verdict.seconds = reference.seconds + time.perf_counter() - start
    return verdict
