"""What lies in front of each boundary: guessed at first, then seen in one real forward.

Registration order is a guess, and a model's own parameters (a class token) belong to no layer. So
the first training forward is watched once: everything that ran before a boundary returned is in
front of it, and so is every parameter that its output was made from. Its arithmetic is counted, so
that what freezing saves is the same in every run and on every rank, as times would not be.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from egeria_cache.skip import RandomState, Recorder, intercept, leaves_behind
from egeria_core.ranks import parameter_names
from egeria_core.watch.layers import Layer, draws, find_layers

log = logging.getLogger("egeria")


class Prefix(NamedTuple):
    """All that has run when a boundary returns."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    around: tuple[str, ...]
    """Modules still running then, whose own code before that draws random numbers (dropout)."""
    drawing: tuple[str, ...]
    """Modules of all these that draw in training mode, and are switched off where they freeze."""


class _Arithmetic(TorchDispatchMode):
    """Adds up the floating-point operations of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=result))
        return result


class Hook:
    """Calls a function; a copy of the model gets an inert one, and no copy of the function's owner.

    Args:
        function: Called as the hook is; its answer is not used.
    """

    def __init__(self, function: Callable[..., Any] = lambda *_: None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:  # by which copies are made as well
        return Hook, ()


class ForwardTrace:
    """Watches one forward of `model`; `close()` leaves no hook behind. Not thread-safe.

    Args:
        model: The bare model.
        candidates: Modules whose outputs are asked which parameters they were made from.
    """

    def __init__(self, model: nn.Module, candidates: Iterable[str]) -> None:
        self._model, self._candidates = model, frozenset(candidates)
        self._names = {module: name for name, module in model.named_modules()}
        self.is_complete = False
        self.costs: defaultdict[str, float] = defaultdict(float)
        """Arithmetic of each module's own code."""
        self.upto: dict[str, float] = {}
        """Arithmetic of the forward when each candidate had returned."""
        self._parameters: dict[str, list[Tensor]] = {}
        self._seen: set[Any] = set()
        self._recorder, self._arithmetic, self._counted = Recorder(), _Arithmetic(), 0.0
        self._watching, self._is_on = ExitStack(), False
        # What is compiled is not looked into.
        self.is_compiled = any(m._compiled_call_impl is not None for m in model.modules())
        self._hooks = ExitStack()
        self._hooks.enter_context(model.register_forward_pre_hook(Hook(self._begin)))
        # Called also where the forward raises: the mode must not stay.
        self._hooks.enter_context(model.register_forward_hook(Hook(self._end), always_call=True))

    @property
    def total(self) -> float:
        """Arithmetic of the whole forward."""
        return sum(self.costs.values())

    def _begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.is_complete or self.is_compiled:
            return
        self._watching.close()  # a forward before may have been interrupted
        self._is_on = torch.is_grad_enabled()
        if self._is_on:
            inner = (module for module in self._model.modules() if module is not self._model)
            self._recorder = Recorder(watch=self._look, returned=self._returned)
            self._watching.enter_context(self._arithmetic)
            self._watching.enter_context(intercept(inner, self._called))
            self._recorder.begin()

    def _called(self, module: nn.Module, original: Any, *args: Any, **kw: Any) -> Any:
        if not torch.is_grad_enabled():  # a teacher's, an average's
            return original(*args, **kw)
        return self._recorder(module, original, *args, **kw)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_on:
            self._look()
            self._watching.close()
            # Where it has raised, no output is known.
            self._is_on, self.is_complete = False, output is not None or sys.exc_info()[0] is None

    def _look(self) -> RandomState:
        """See what the running module's own code has computed since the last look."""
        before, self._counted, opened = self._counted, self._arithmetic.total, self._recorder.open
        name = self._names[self._recorder.calls[opened[-1]].module] if opened else ""
        self.costs[name] += self._counted - before
        return RandomState.now()

    def _returned(self, module: nn.Module, output: Any) -> None:
        """See what a candidate's output was made from."""
        name = self._names[module]
        if isinstance(module, nn.RNNBase) and not self.costs[name]:
            # One operator, which nobody counts.
            rows = [x.numel() / x.shape[-1] for x in tree_leaves(output) if isinstance(x, Tensor)]
            weights = sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)
            self.costs[name] += 2 * weights * sum(rows[:1])
        if name in self._candidates:
            self.upto[name] = self.total
            # Nodes seen for an earlier boundary are skipped: each boundary lists what it adds.
            self._parameters.setdefault(name, []).extend(leaves_behind(output, self._seen))

    @property
    def order(self) -> dict[str, int]:
        """Position of the last return of each module that has run."""
        calls = self._recorder.calls if self.is_complete else ()
        return {self._names[call.module]: call.end for call in calls if call.end >= 0}

    def before(self, boundary: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return the modules that had been called when `boundary` last returned, but those around
        it; those around it whose own code drew random numbers by then; and all of these that drew.
        """
        calls, at = self._recorder.calls, self.order[boundary]
        last = next(call for call in calls if call.end == at)
        begun = dict.fromkeys(self._names[call.module] for call in calls[: last.num_begun])
        modules = tuple(name for name in begun if not boundary.startswith(name + "."))
        first = next(i for i, call in enumerate(calls) if call.module is last.module)
        drew = {calls[i].module for i in self._recorder.drew if i >= 0}
        drawing = {self._names[module] for module in drew if module.training}
        holders = self._recorder.drawing_around(first, self._model)
        around = tuple(self._names[module] for module in holders if module.training)
        return modules, around, (*(name for name in modules if name in drawing), *around)

    def parameters_before(self, boundary: str) -> list[Tensor]:
        """Parameters that feed `boundary`'s output, whichever module owns them."""
        order = self.order
        found = (own for name, own in self._parameters.items() if order[name] <= order[boundary])
        return [parameter for own in found for parameter in own]

    def close(self) -> None:
        """Remove every hook; idempotent."""
        self._watching.close()
        self._hooks.close()
        self._seen.clear()


class LayerMap:
    """The layers of a model and the prefix behind each.

    Args:
        model: The bare model.
        layers: Regular expression, or the names of the modules to use, or None for the parse.
        num_layers: Wanted number of layers of the parse.
    """

    def __init__(
        self, model: nn.Module, layers: str | Sequence[str] | None, num_layers: int
    ) -> None:
        self._model = model
        if layers is not None and not isinstance(layers, str):
            layers = "|".join(map(re.escape, layers))
        self._parsed = partial(find_layers, model, layers, num_layers=num_layers)
        self.layers = self._parsed()
        self.prefixes: dict[str, Prefix] = {}
        self.parts: list[float] | None = None
        """Part of the forward's arithmetic in front of each boundary, where it was counted."""
        self.training: bool | None = None
        """Mode of the model in training forwards (people do fine-tune in inference mode)."""
        names = (name for layer in self.layers for name in layer.modules)
        self._trace: ForwardTrace | None = ForwardTrace(model, names)

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
        trace, self._trace = self._trace, None
        assert trace is not None, "it is settled already"
        trace.close()
        self.training = self._model.training
        # Inside compiled code nobody watches; what was seen around it would be a part at random.
        order = trace.order
        if all(layer.boundary not in order for layer in self.layers):
            text = "egeria: the layers of %s were not seen in the first forward (is it compiled?), "
            text += "so registration order is taken for forward order"
            level = logging.INFO if trace.is_compiled else logging.WARNING
            log.log(level, text, type(self._model).__name__)
            return
        self.layers = self._parsed(order=order, costs=trace.costs if trace.total else None)
        names = parameter_names(self._model)
        for boundary in self.boundaries:
            modules, around, drawing = trace.before(boundary)
            behind = [names[id(p)] for p in trace.parameters_before(boundary) if id(p) in names]
            parameters = tuple(dict.fromkeys([*self._owned(modules), *behind]))
            self.prefixes[boundary] = Prefix(modules, parameters, around, drawing)
        if trace.total and all(boundary in trace.upto for boundary in self.boundaries):
            self.parts = [trace.upto[boundary] / trace.total for boundary in self.boundaries]

    def _owned(self, modules: Iterable[str]) -> list[str]:
        names = parameter_names(self._model)
        own = (self._model.get_submodule(name).parameters(recurse=False) for name in modules)
        return [names[id(parameter)] for parameters in own for parameter in parameters]

    def prefix(self, boundary: str) -> Prefix:
        """Return what is in front of `boundary`, itself included."""
        if boundary in self.prefixes:
            return self.prefixes[boundary]
        names = [name for name, _ in self._model.named_modules()]
        last = max(i for i, name in enumerate(names) if f"{name}.".startswith(f"{boundary}."))
        modules = tuple(n for n in names[: last + 1] if n and not boundary.startswith(f"{n}."))
        drawing = tuple(name for name in modules if draws(self._model.get_submodule(name)))
        found = Prefix(modules, tuple(dict.fromkeys(self._owned(modules))), (), drawing)
        if self.resolved:
            self.prefixes[boundary] = found
        return found

    def parameters_of_layers(self) -> list[list[Tensor]]:
        """Return the parameters that freeze with each layer and not with the one before.

        Those in front of a boundary that no module of a layer owns (a class token) belong to the
        first boundary that they feed; the last layer has all that is in front of no boundary. A
        tied tensor belongs to the first that has it.
        """
        seen: set[int] = set()

        def new(parameters: Iterable[Tensor]) -> list[Tensor]:
            own = [p for p in parameters if id(p) not in seen]
            seen.update(map(id, own))
            return own

        prefixes = map(self.prefix, self.boundaries[:-1])
        found = [new(map(self._model.get_parameter, prefix.parameters)) for prefix in prefixes]
        return [*found, new(self._model.parameters())]

    def close(self) -> None:
        """Take the watching hooks off; idempotent."""
        if self._trace is not None:
            self._trace.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the layers and prefixes as found; nothing where no forward was seen."""
        if not self.resolved:
            return {}
        return {
            "training": self.training,
            "layers": [(layer.modules, layer.num_parameters) for layer in self.layers],
            "parts": self.parts,
            "prefixes": {name: tuple(prefix) for name, prefix in self.prefixes.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the layers and prefixes as they were found then."""
        if not state:
            return
        self.close()
        self._trace, self.training, self.parts = None, state["training"], state["parts"]
        self.layers = [Layer(tuple(modules), size) for modules, size in state["layers"]]
        prefixes = state["prefixes"].items()
        self.prefixes = {name: Prefix(*map(tuple, parts)) for name, parts in prefixes}
