"""Reads the front layer against its reference: what an evaluator does, wherever it lives.

A layer gets the reference that was asked for, or one in full precision where that cannot be had.
References in 8-bit integers are had by post-training quantisation (section 4.1.3):
`torch.ao.quantization` is deprecated but present and the fastest to build; its deprecation warnings
are silenced here alone. How far a layer is from its reference, its plasticity, is `sp_loss`
(section 4.2; Tung & Mori 2019, eq. 3-4).
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from egeria_cache import EgeriaError
from egeria_cache.device import Event
from egeria_core.config import ReferenceKind
from egeria_core.history import Verdict
from egeria_core.reference.capture import Probe, Weights, first_activation, load_weights

_ENGINES = ("onednn", "x86", "fbgemm", "qnnpack")
"""The fastest first; where the processor does not add products of 8 bits in 32, its sums overflow,
and the others leave a bit of room."""
INT8_PAYS_ABOVE = 2e9
"""Floating-point operations of the layer's forward on the probe, some 20 ms of a CPU. An int8 build
takes 0.1-3 s, which W such forwards must win back. Counted, not timed: runs must take the same."""
MAX_NOISE = 1e-3
"""SP between the reference and fp32 with the same weights, at any plasticity: past it the
quantised layer is another layer (seen in working ones: 6e-8 to 6e-6)."""
NOISE_SHARE = 0.1
"""The noise must stay below this part of the plasticity that is read with it."""


class EvaluatorError(EgeriaError):
    """The reference could not be built, run or reached."""


def sp_loss(train_act: Tensor, ref_act: Tensor) -> Tensor:
    """Return the Similarity-Preserving distance of two activations (Tung & Mori 2019).

    Args:
        train_act: Training model's output, shape (B, ...), floating point.
        ref_act: Reference output for the same samples in the same order, shape (B, ...);
            trailing dims may differ from `train_act`.

    Returns:
        Scalar float32 in [0, 4/B]; 0 means identical pair-wise similarity. It depends on B (the
        same noise reads lower in a larger batch), so compare readings of one batch size only.

    Raises:
        ValueError: Batch sizes differ, or B < 2 (one sample has no pairs).
    """
    shape, other = tuple(train_act.shape), tuple(ref_act.shape)
    if shape[:1] != other[:1] or not shape or shape[0] < 2:
        raise ValueError(
            "sp_loss compares pairs of the same samples: the batch sizes must be equal, and at "
            f"least 2; got shapes {shape} and {other}"
        )
    return (_similarity(train_act) - _similarity(ref_act)).square().sum() / shape[0] ** 2


def _similarity(act: Tensor) -> Tensor:
    """Gram matrix of the flattened samples with rows of unit L2 norm, shape (B, B), float32.

    Some public copies normalise the rows by L1 (`F.normalize(G, 1)` passes p=1): not this metric.
    """
    rows = act.detach().reshape(act.shape[0], -1).to(torch.float32)
    return F.normalize(rows @ rows.T, p=2.0, dim=1)


@torch.no_grad()
def run_layer(modules: Sequence[nn.Module], probe: Probe) -> Tensor:
    """Run the layer on the probe's inputs; return its activation, in single precision.

    Raises:
        EvaluatorError: The layer returned no floating-point tensor.
    """
    outputs: list[list[Any]] = []
    for module, call in zip(modules, in_fp32(probe).calls, strict=False):
        leaves, spec = tree_flatten((call.args, call.kwargs))
        for number, (earlier, leaf) in call.wires.items():
            leaves[number] = outputs[earlier][leaf]
        args, kwargs = tree_unflatten(leaves, spec)
        outputs.append(tree_leaves(module(*args, **kwargs)))
    activation = first_activation(outputs[-1], probe.num_rows)
    if activation is None:
        names = ", ".join(call.module for call in probe.calls)
        raise EvaluatorError(f"{names}: no floating-point output with a batch dimension")
    return activation.float()


def in_fp32(probe: Probe) -> Probe:
    """Return a copy with floating-point tensors in single precision.

    Always a copy: the layer may begin with an in-place operation, and calls are run again.
    """

    def convert(leaf: Tensor) -> Tensor:
        return leaf.to(torch.float32 if leaf.is_floating_point() else leaf.dtype, copy=True)

    return probe.mapped(convert)


@contextmanager
def quantization() -> Iterator[None]:
    """Select the fastest engine that this build of PyTorch has, quietly, and put it back."""
    before = torch.backends.quantized.engine
    engines = torch.backends.quantized.supported_engines
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            known = _ENGINES if torch.cpu._is_vnni_supported() else _ENGINES[1:]
            found = next((engine for engine in known if engine in engines), before)
            torch.backends.quantized.engine = found
            # The fast path of nn.TransformerEncoder reads float weights that are packed away.
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.quantized.engine = before
            torch.backends.mha.set_fastpath_enabled(fastpath)


def _quantised(modules: list[nn.Module]) -> list[nn.Module]:
    """Have linear layers in int8 per channel, activations quantised as they come."""
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    root = nn.ModuleList(modules)
    quantize_dynamic(root, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
    return list(root)


def _calibrated(modules: list[nn.Module], probe: Probe) -> list[nn.Module]:
    """Return one module that does what they do one after another, in int8, traced by FX."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    for number, call in enumerate(probe.calls):
        wires = {0: (number - 1, 0)} if number else {}
        if call.wires != wires or len(call.args) != 1 or call.kwargs:
            raise EvaluatorError("its modules hand on more than one tensor to each other")
    inputs = in_fp32(probe).calls[0].args
    mapping = get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = prepare_fx(nn.Sequential(*modules), mapping, inputs)
    # The probe's rows are what the reference will be asked about: more data bring nothing.
    prepared(*inputs)
    return [convert_fx(prepared)]


class Reference:
    """One layer, frozen in time: a copy of its modules. Not thread-safe.

    Args:
        name: `fp32`; `int8-dynamic`, of linear layers, for transformers; `int8-static`, calibrated
            on the probe, for CNNs. Only `fp32` returns what the layer itself returns.
    """

    def __init__(self, name: str = "fp32") -> None:
        self.name = name
        self.costly = name != "fp32"
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
        self._modules = copy.deepcopy(list(modules))
        if not self.costly:
            return
        is_static = self.name == "int8-static"
        with quantization(), torch.no_grad():
            copies = self._modules
            self._modules = _calibrated(copies, probe) if is_static else _quantised(copies)
        inner = (m for module in self._modules for m in module.modules())
        if not any("quantized" in type(module).__module__ for module in inner):
            raise EvaluatorError("nothing in the layer could be quantised")

    def run(self, probe: Probe) -> Tensor:
        """Return the layer's activation for the probe's rows."""
        with quantization() if self.costly else nullcontext():
            return run_layer(self._modules, probe)


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
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None


class ReferenceRunner:
    """Owns the reference of one layer at a time. Not thread-safe.

    Args:
        kind: What was asked for.
    """

    def __init__(self, kind: ReferenceKind) -> None:
        self._kind = kind
        self._modules: list[nn.Module] = []
        self.reference: Reference | None = None
        """In use; None: not yet built."""
        self.noise = 0.0
        """SP between the reference and full precision with the same weights, at the last build."""
        self.plasticity = math.inf
        """What was read with it last, which its noise must not drown."""

    def run(self, item: InputItem) -> Verdict:
        """Run layer and reference on the probe, then refresh the reference if it is time.

        Raises:
            Exception: Whatever the layer's own code raises.
        """
        start = time.perf_counter()
        if item.modules is not None:
            self._modules = item.modules
            self.reference, self.noise, self.plasticity = None, 0.0, math.inf
        load_weights(self._modules, item.weights)
        verdict = Verdict(item.step, item.layer, None)
        if item.judge and self.reference is not None:
            theirs = self.reference.run(item.probe)
            self.plasticity = float(item.distance(run_layer(self._modules, item.probe), theirs))
            verdict.value = self.plasticity
            verdict.reference, verdict.noise = self.reference.name, self.noise
        if item.refresh:
            verdict.notes += self.refresh(self._modules, item.probe)
        verdict.costly = self.reference is not None and self.reference.costly
        verdict.seconds = time.perf_counter() - start
        return verdict

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
                self.reference.build(modules, probe)
                self.noise = float(sp_loss(run_layer(modules, probe), self.reference.run(probe)))
                if not self.noise <= min(MAX_NOISE, NOISE_SHARE * self.plasticity):
                    raise ValueError(
                        f"self-check: SP to fp32 with the same weights is {self.noise:.2g}, the "
                        f"plasticity {self.plasticity:.2g}"
                    )
            except Exception as error:  # quantisation tools fail in their own ways
                why = f"{type(error).__name__}: {error}"
                notes.append(f"{self.reference.name} reference not used: {why}")
                self.reference, self.noise = Reference(), 0.0
        if not self.reference.costly:
            self.reference.build(modules, probe)
        return notes

    def _choose(self, modules: Sequence[nn.Module], probe: Probe) -> Reference:
        """Return a reference of the kind that was asked for and suits the layer."""
        if self._kind == "auto":
            # That of a fused layer is taken apart.
            with quantization(), FlopCounterMode(display=False) as counted:
                run_layer(modules, probe)
            if counted.get_total_flops() < INT8_PAYS_ABOVE:
                return Reference()
        elif self._kind == "fp32":
            return Reference()
        inner = [m for module in modules for m in module.modules()]
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in inner)
        return Reference("int8-static" if convolves else "int8-dynamic")
