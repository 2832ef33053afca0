"""Runs the reference and compares: what the evaluator does, wherever it lives.

Knows nothing of training, threads or processes: one message in, at most one verdict out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from egeria_core.errors import EvaluatorError
from egeria_core.hooks import Probe, first_activation, run_calls
from egeria_core.plasticity import sp_loss
from egeria_core.policies.base import Measure
from egeria_core.snapshot import Weights, copy_modules, load_weights

__all__ = ["Evaluation", "Judge", "Verdict"]


@dataclass(slots=True)
class Evaluation:
    """One look at the frontmost active layer, sent by the training side."""

    step: int
    layer: int
    measure: Measure
    probe: Probe
    weights: Weights | None
    """The layer's weights now; None where they are not needed."""
    refresh: bool
    """Whether these weights become the reference after this reading."""
    judge: bool
    """Whether there is a reference to read against."""
    modules: list[nn.Module] | None = None
    """Structure of the layer; sent once when the layer becomes the front."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one evaluation."""

    step: int
    layer: int
    value: float | None
    seconds: float
    note: str | None = None
    """One line for the user: a fallback and its reason."""


class Judge:
    """Owns the reference of one layer at a time. Not thread-safe."""

    def __init__(self) -> None:
        self._current: list[nn.Module] = []
        self._reference: list[nn.Module] = []
        self._names: list[str] = []
        self._layer: int | None = None

    def handle(self, job: Evaluation) -> Verdict:
        """Read the layer against its reference, then refresh the reference if it is time."""
        start = time.perf_counter()
        if job.modules is not None:
            self._current = job.modules
            self._reference = copy_modules(job.modules)
            self._layer = job.layer
        if job.layer != self._layer:
            raise EvaluatorError(f"no reference for layer {job.layer}: it was never sent")
        value = self._measure(job) if job.judge else None
        if job.refresh and job.weights is not None:
            load_weights(self._reference, job.weights)
        return Verdict(job.step, job.layer, value, time.perf_counter() - start)

    @torch.no_grad()
    def _measure(self, job: Evaluation) -> float:
        probe = job.probe
        if job.weights is not None:
            load_weights(self._current, job.weights)
            ours = self._run(self._current, probe)
        elif probe.output is not None:
            ours = probe.output
        else:
            raise EvaluatorError(f"the evaluation of step {job.step} carries no activation")
        theirs = self._run(self._reference, probe)
        if job.measure == "activation_norm":
            return float((ours.float() - theirs.float()).abs().mean())
        return float(sp_loss(ours, theirs))

    def _run(self, modules: list[nn.Module], probe: Probe) -> Tensor:
        calls = [tree_map_call(call) for call in probe.calls]
        output = first_activation(run_calls(modules[-len(calls) :], calls))
        if output is None:
            raise EvaluatorError("the layer returned no floating-point activation")
        return output


def tree_map_call(call: Any) -> Any:
    """Return the call with its floating-point tensors on the CPU in single precision."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.to("cpu")
        # Clone: the layer may begin with an in-place operation, and the call is run twice.
        return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf.clone()

    return type(call)(call.module, tree_map(convert, call.args), tree_map(convert, call.kwargs))
