"""What lies in front of each boundary: resolved once, from the first training forward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor, nn

from egeria_core.layers import Layer, draws, find_layers
from egeria_core.sharded import unsharded_names
from egeria_core.trace import ForwardTrace, registration_prefix

__all__ = ["LayerMap", "Prefix"]

log = logging.getLogger("egeria")


@dataclass(frozen=True, slots=True)
class Prefix:
    """All that has run when a boundary returns."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    around: tuple[str, ...] = ()
    """Modules still running then, whose own code before that draws random numbers (dropout)."""
    drawing: tuple[str, ...] = ()
    """Modules of all these that draw in training mode, and are switched off where they freeze."""


class LayerMap:
    """The layers of a model and the prefix behind each: guessed at first, then seen.

    Args:
        model: The bare model.
        layers: Regular expression, or the names of the modules to use, or None for the parse.
        num_layers: Wanted number of layers of the parse.
    """

    def __init__(
        self, model: nn.Module, layers: str | Sequence[str] | None, num_layers: int
    ) -> None:
        self._model = model
        self._pattern = _pattern_of(layers)
        self._num_layers = num_layers
        self.layers: list[Layer] = find_layers(model, self._pattern, num_layers=num_layers)
        self.prefixes: dict[str, Prefix] = {}
        self.training: bool | None = None
        """Mode of the model in training forwards (people do fine-tune in inference mode)."""
        self._trace: ForwardTrace | None = ForwardTrace(
            model, (name for layer in self.layers for name in layer.modules)
        )

    @property
    def boundaries(self) -> list[str]:
        """Name of the last module of each layer."""
        return [layer.boundary for layer in self.layers]

    @property
    def resolved(self) -> bool:
        """Whether a forward has been seen, or the answer was loaded."""
        return self._trace is None

    def settle(self) -> None:
        """Take registration order for forward order: blocks of a pipeline run in it."""
        self.close()
        self._trace, self.training = None, True

    def resolve(self) -> None:
        """Settle order and prefixes by the forward that has just run."""
        trace = self._trace
        if trace is None:
            return
        trace.close()
        self._trace = None
        self.training = self._model.training
        # Inside compiled code nobody watches; what was seen around it would be a part at random.
        compiled = any(m._compiled_call_impl is not None for m in self._model.modules())
        if compiled or all(layer.boundary not in trace.returned for layer in self.layers):
            log.log(
                logging.INFO if compiled else logging.WARNING,
                "egeria: the layers of %s were not seen in the first forward (is it compiled?), so "
                "registration order is taken for forward order",
                type(self._model).__name__,
            )
            return
        self.layers = find_layers(
            self._model,
            self._pattern,
            num_layers=self._num_layers,
            order=trace.returned,
            costs=trace.costs,
        )
        names = {id(p): name for name, p in self._model.named_parameters()}
        names |= unsharded_names(self._model)
        for layer in self.layers:
            modules = tuple(trace.modules_before(layer.boundary))
            behind = [
                names[id(p)] for p in trace.parameters_before(layer.boundary) if id(p) in names
            ]
            owned = [names[id(p)] for p in _own_parameters(self._model, modules)]
            around = tuple(trace.drawing_around(layer.boundary))
            drawing = (*(name for name in modules if name in trace.drew), *around)
            parameters = tuple(dict.fromkeys(owned + behind))
            self.prefixes[layer.boundary] = Prefix(modules, parameters, around, drawing)

    def prefix(self, boundary: str) -> Prefix:
        """Return what is in front of `boundary`, itself included."""
        if boundary not in self.prefixes:
            modules = tuple(registration_prefix(self._model, boundary))
            names = {id(p): name for name, p in self._model.named_parameters()}
            owned = [names[id(p)] for p in _own_parameters(self._model, modules)]
            drawing = tuple(name for name in modules if draws(self._model.get_submodule(name)))
            return Prefix(modules, tuple(dict.fromkeys(owned)), (), drawing)
        return self.prefixes[boundary]

    def parameters_before(self, boundary: str) -> list[nn.Parameter]:
        """Return the parameters in front of `boundary`, by whichever module they are owned."""
        return [self._model.get_parameter(name) for name in self.prefix(boundary).parameters]

    def tied(self, boundary: str) -> list[tuple[str, str]]:
        """Return the parameters in front of `boundary` that an active module uses as well.

        As pairs of names of one tensor: in the prefix, and in the active part (a language model's
        embedding, and its head).
        """
        prefix = self.prefix(boundary)
        mine = {id(self._model.get_parameter(name)): name for name in prefix.parameters}
        inside = set(prefix.modules)
        return [
            (mine[id(parameter)], name)
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if id(parameter) in mine
            and name.rpartition(".")[0] not in inside
            and name != mine[id(parameter)]
        ]

    def close(self) -> None:
        """Take the watching hooks off; idempotent."""
        if self._trace is not None:
            self._trace.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the layers and prefixes as found."""
        return {
            "resolved": self.resolved,
            "training": self.training,
            "layers": [[list(layer.modules), layer.num_parameters] for layer in self.layers],
            "prefixes": {
                name: [list(part) for part in astuple(prefix)]
                for name, prefix in self.prefixes.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the layers and prefixes as they were found then."""
        if not state["resolved"]:
            return
        self.close()
        self._trace = None
        self.training = state["training"]
        self.layers = [Layer(tuple(modules), size) for modules, size in state["layers"]]
        self.prefixes = {
            name: Prefix(*map(tuple, parts)) for name, parts in state["prefixes"].items()
        }


def _pattern_of(layers: str | Sequence[str] | None) -> str | None:
    if layers is None or isinstance(layers, str):
        return layers
    import re

    return "|".join(re.escape(name) for name in layers)


def _own_parameters(model: nn.Module, modules: Sequence[str]) -> list[Tensor]:
    return [
        parameter
        for name in modules
        for parameter in model.get_submodule(name).parameters(recurse=False)
    ]
