"""References in 8-bit integers, by post-training quantisation (section 4.1.3).

`torch.ao.quantization` is deprecated but present and the fastest to build; everything that touches
it is in this file, and its deprecation warnings are silenced here alone.
"""

from __future__ import annotations

import copy
import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from egeria_core.errors import EvaluatorError
from egeria_core.reference.references import activation_of, cast, run_layer
from egeria_core.reference.tap import Probe, Wire

_ENGINES = ("onednn", "x86", "fbgemm", "qnnpack")
"""The fastest first."""


def _has_vnni() -> bool:
    """Whether the processor adds products of 8 bits in 32. Without, oneDNN's sums overflow 16 bits;
    the others leave a bit of room.
    """
    return bool(torch.cpu._is_vnni_supported())


@contextmanager
def quantization() -> Iterator[None]:
    """Select the fastest engine that this build of PyTorch has, quietly, and put it back."""
    before = torch.backends.quantized.engine
    engines = torch.backends.quantized.supported_engines
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for engine in _ENGINES if _has_vnni() else _ENGINES[1:]:
                if engine in engines:
                    torch.backends.quantized.engine = engine
                    break
            # The fast path of nn.TransformerEncoder reads float weights that are packed away.
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.quantized.engine = before
            torch.backends.mha.set_fastpath_enabled(fastpath)


class DynamicInt8Reference:
    """Linear layers in int8 per channel, activations quantised as they come: for transformers."""

    name = "int8-dynamic"
    costly = True

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Quantise copies of the modules."""
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

        root = nn.ModuleList(copy.deepcopy(list(modules)))
        with quantization():
            quantize_dynamic(root, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
        self._modules = list(root)
        if not any("quantized" in type(m).__module__ for m in root.modules()):
            raise EvaluatorError("no linear layer to quantise")

    def run(self, probe: Probe) -> Tensor:
        """Run the quantised copies."""
        with quantization():
            return run_layer(self._modules, probe)


class StaticInt8Reference:
    """Weights and activations in int8, traced by FX and calibrated on the probe: for CNNs."""

    name = "int8-static"
    costly = True

    def __init__(self) -> None:
        self._graph: fx.GraphModule | None = None

    def build(self, modules: Sequence[nn.Module], probe: Probe) -> None:
        """Trace, observe, convert."""
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        chain = _as_graph(copy.deepcopy(list(modules)), probe)
        inputs = tuple(_tensor_inputs(probe))
        with quantization(), torch.no_grad():
            mapping = get_default_qconfig_mapping(torch.backends.quantized.engine)
            prepared = prepare_fx(chain, mapping, inputs)
            # The probe's rows are what the reference will be asked about: more data bring nothing.
            prepared(*inputs)
            self._graph = convert_fx(prepared)
        if not any("quantized" in type(m).__module__ for m in self._graph.modules()):
            raise EvaluatorError("nothing in the layer could be quantised")

    def run(self, probe: Probe) -> Tensor:
        """Run the converted graph."""
        if self._graph is None:
            raise EvaluatorError("run before build")
        with quantization(), torch.no_grad():
            output: Any = self._graph(*_tensor_inputs(probe))
        return activation_of(output, probe)


def _tensor_inputs(probe: Probe) -> list[Tensor]:
    leaves = tree_flatten([(call.args, call.kwargs) for call in cast(probe).calls])[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _as_graph(modules: Sequence[nn.Module], probe: Probe) -> fx.GraphModule:
    """Write the recorded calls down as one FX graph: tensors are inputs, the rest is constant.

    Tracing needs one module with named tensor arguments; the layer is a few modules called with
    whatever the model calls them with.
    """
    graph = fx.Graph()
    root = nn.ModuleDict({f"m{i}": module for i, module in enumerate(modules)})
    results: list[fx.Node] = []
    flat = [tree_flatten((call.args, call.kwargs)) for call in probe.calls]
    numbers = itertools.count()
    values = [
        [
            graph.placeholder(f"x{next(numbers)}") if isinstance(leaf, Tensor) else leaf
            for leaf in own
        ]
        for own, _ in flat
    ]
    for i, (own, (_, spec)) in enumerate(zip(values, flat, strict=True)):
        row = [_wired(graph, results, leaf) if isinstance(leaf, Wire) else leaf for leaf in own]
        args, kwargs = tree_unflatten(row, spec)
        results.append(graph.call_module(f"m{i}", tuple(args), dict(kwargs)))
    graph.output(results[-1])
    return fx.GraphModule(root, graph)


def _wired(graph: fx.Graph, results: list[fx.Node], wire: Wire) -> fx.Node:
    """Return the node of an earlier output's leaf; the path may be empty."""
    source = results[wire.call]
    for key in wire.path:
        source = graph.call_function(operator.getitem, (source, key))
    return source
