"""References in 8-bit integers, by post-training quantisation (section 4.1.3).

`torch.ao.quantization` is deprecated but present and the fastest to build; everything that touches
it is in this file, and its deprecation warnings are silenced here alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from egeria_core.errors import EvaluatorError
from egeria_core.reference.references import Reference, cast, run_layer
from egeria_core.reference.tap import Call, Probe

_ENGINES = ("onednn", "x86", "fbgemm", "qnnpack")
"""The fastest first; where the processor does not add products of 8 bits in 32, its sums overflow,
and the others leave a bit of room."""


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


class DynamicInt8Reference(Reference):
    """Linear layers in int8 per channel, activations quantised as they come: for transformers."""

    name = "int8-dynamic"
    costly = True

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Quantise copies of the modules.

        Raises:
            EvaluatorError: There is nothing in them to quantise.
        """
        with quantization(), torch.no_grad():
            self._modules = self._quantised(copy.deepcopy(list(modules)), probe)
        inner = (m for module in self._modules for m in module.modules())
        if not any("quantized" in type(module).__module__ for module in inner):
            raise EvaluatorError("nothing in the layer could be quantised")

    def _quantised(self, modules: list[nn.Module], probe: Probe) -> list[nn.Module]:
        """Return copies, or one module that does what they do one after another."""
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

        root = nn.ModuleList(modules)
        quantize_dynamic(root, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
        return list(root)

    def run(self, probe: Probe) -> Tensor:
        """Run the quantised copies."""
        with quantization():
            return run_layer(self._modules, replace(probe, calls=probe.calls[: len(self._modules)]))


class StaticInt8Reference(DynamicInt8Reference):
    """Weights and activations in int8, traced by FX and calibrated on the probe: for CNNs."""

    name = "int8-static"

    def _quantised(self, modules: list[nn.Module], probe: Probe) -> list[nn.Module]:
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        if not all(_is_sequential(number, call) for number, call in enumerate(probe.calls)):
            raise EvaluatorError("its modules hand on more than one tensor to each other")
        inputs = cast(probe).calls[0].args
        mapping = get_default_qconfig_mapping(torch.backends.quantized.engine)
        prepared = prepare_fx(nn.Sequential(*modules), mapping, inputs)
        # The probe's rows are what the reference will be asked about: more data bring nothing.
        prepared(*inputs)
        return [convert_fx(prepared)]


def _is_sequential(number: int, call: Call) -> bool:
    """Whether a call gets one tensor alone, that which the call before has returned."""
    wires = {0: (number - 1, ())} if number else {}
    return call.wires == wires and len(call.args) == 1 and not call.kwargs
