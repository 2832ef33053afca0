"""What lies in front of each boundary: guessed at first, then seen in one real forward.

Registration order is a guess, and a model's own parameters (a class token) belong to no layer. So
the first training forward is watched once: everything that ran before a boundary returned is in
front of it, and so is every parameter that its output was made from. Its arithmetic is counted, so
that what freezing saves is the same in every run and on every rank, as times would not be.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from egeria_cache.skip import RandomState, leaves_behind
from egeria_core.ranks import unsharded_names
from egeria_core.reference import Hook
from egeria_core.watch.layers import Layer, draws, find_layers

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


class ForwardTrace:
    """Watches one forward of `model`; `close()` leaves no hook behind. Not thread-safe.

    Args:
        model: The bare model.
        candidates: Modules whose outputs are asked which parameters they were made from.
    """

    def __init__(self, model: nn.Module, candidates: Iterable[str]) -> None:
        self._model = model
        self._candidates = frozenset(candidates)
        self._clock = 0
        self.complete = False
        self.started: dict[str, int] = {}
        self.returned: dict[str, int] = {}
        self.parameters: dict[str, list[Tensor]] = {}
        self.costs: defaultdict[str, float] = defaultdict(float)
        """Arithmetic of each module's own code."""
        self.upto: dict[str, float] = {}
        """Arithmetic of the forward when each candidate had returned."""
        self.drew: dict[str, int] = {}
        """When a module in training mode first drew random numbers in its own code."""
        self._starts: Counter[str] = Counter()
        self._open: list[str] = []
        self._stacks: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._random: RandomState | None = None
        self._counted = 0.0
        self._seen: set[Any] = set()
        # What is compiled is not looked into.
        self.compiled = any(m._compiled_call_impl is not None for m in model.modules())
        self._arithmetic: _Arithmetic | None = None
        self._handles: list[RemovableHandle] = [
            # Called also where the forward raises: the mode must not stay.
            model.register_forward_hook(Hook(self._stop_counting), always_call=True)
        ]
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(Hook(partial(self._before, name))),
                module.register_forward_hook(Hook(partial(self._after, name))),
            ]

    @property
    def total(self) -> float:
        """Arithmetic of the whole forward."""
        return sum(self.costs.values())

    def _live(self) -> bool:
        return not self.complete and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def _before(self, name: str, *_: Any) -> None:
        """Note the first start of a module."""
        if not self._live():
            return
        if self._arithmetic is None and name == "" and not self.compiled:
            self._arithmetic = _Arithmetic()
            self._arithmetic.__enter__()  # type: ignore[no-untyped-call]
        self._look()
        self.started.setdefault(name, self._clock)
        self._starts[name] += 1
        self._open.append(name)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note the last return of a module, and what a candidate's output was made from."""
        if not self._live() or name not in self.started:
            return
        self._look()
        self.returned[name] = self._clock
        if isinstance(module, nn.RNNBase) and not self.costs[name]:
            self.costs[name] += _recurrent(module, output)  # one operator, which nobody counts
        if name in self._open:
            while self._open.pop() != name:  # one that was left by an exception
                pass
        if name in self._candidates:
            self.upto[name] = self.total
            self._stacks.setdefault(name, (self._clock, tuple(self._open)))
            # Nodes seen for an earlier boundary are skipped: each boundary lists what it adds.
            self.parameters.setdefault(name, []).extend(leaves_behind(output, self._seen))
        self.complete = name == ""

    def _look(self) -> None:
        """See what the running module's own code has computed and drawn since the last look."""
        self._clock += 1
        counted = 0.0 if self._arithmetic is None else self._arithmetic.total
        before, self._random = self._random, RandomState.now()
        if self._open:
            running = self._open[-1]
            self.costs[running] += counted - self._counted
            moved = before is not None and not before.equals(self._random)
            if moved and self._model.get_submodule(running).training:
                self.drew.setdefault(running, self._clock)
        self._counted = counted

    def _stop_counting(self, *_: Any) -> None:
        mode = self._arithmetic
        if mode is not None:
            self._look()
            self._arithmetic = None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counted = 0.0

    def modules_before(self, boundary: str) -> list[str]:
        """Names of the modules that had started when `boundary` returned, its ancestors aside."""
        end = self.returned[boundary]
        return [
            name
            for name, at in self.started.items()
            if at < end and name != "" and not boundary.startswith(name + ".")
        ]

    def drawing_around(self, boundary: str) -> list[str]:
        """Names of the modules around `boundary` whose own code draws before it returns.

        Those that are called more than once are left out: where are they frozen?
        """
        end, around = self._stacks.get(boundary, (0, ()))
        return [
            name for name in around if self.drew.get(name, end) < end and self._starts[name] == 1
        ]

    def parameters_before(self, boundary: str) -> list[Tensor]:
        """Parameters that feed `boundary`'s output, whichever module owns them."""
        end = self.returned[boundary]
        found = (own for name, own in self.parameters.items() if self.returned[name] <= end)
        return [parameter for own in found for parameter in own]

    def close(self) -> None:
        """Remove every hook; idempotent."""
        self._stop_counting()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()


def _recurrent(module: nn.Module, output: Any) -> float:
    rows = next((x.numel() / x.shape[-1] for x in tree_leaves(output) if isinstance(x, Tensor)), 0)
    return 2 * rows * sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)


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
        self._pattern = layers
        self._num_layers = num_layers
        self.layers: list[Layer] = find_layers(model, self._pattern, num_layers=num_layers)
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
        if trace is None:
            return
        trace.close()
        self.training = self._model.training
        # Inside compiled code nobody watches; what was seen around it would be a part at random.
        if trace.compiled or all(layer.boundary not in trace.returned for layer in self.layers):
            log.log(
                logging.INFO if trace.compiled else logging.WARNING,
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
            costs=trace.costs if trace.total else None,
        )
        names = self._names() | unsharded_names(self._model)
        for boundary in self.boundaries:
            self.prefixes[boundary] = self._seen(trace, boundary, names)
        if trace.total and all(boundary in trace.upto for boundary in self.boundaries):
            self.parts = [trace.upto[boundary] / trace.total for boundary in self.boundaries]

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._model.named_parameters()}

    def _owned(self, modules: Iterable[str]) -> list[str]:
        names = self._names()
        own = (self._model.get_submodule(name).parameters(recurse=False) for name in modules)
        return [names[id(parameter)] for parameters in own for parameter in parameters]

    def _seen(self, trace: ForwardTrace, boundary: str, names: Mapping[int, str]) -> Prefix:
        modules = tuple(trace.modules_before(boundary))
        behind = [names[id(p)] for p in trace.parameters_before(boundary) if id(p) in names]
        around = tuple(trace.drawing_around(boundary))
        drawing = (*(name for name in modules if name in trace.drew), *around)
        parameters = tuple(dict.fromkeys([*self._owned(modules), *behind]))
        return Prefix(modules, parameters, around, drawing)

    def prefix(self, boundary: str) -> Prefix:
        """Return what is in front of `boundary`, itself included."""
        if boundary in self.prefixes:
            return self.prefixes[boundary]
        names = [name for name, _ in self._model.named_modules()]
        inside = [i for i, n in enumerate(names) if n == boundary or n.startswith(boundary + ".")]
        modules = tuple(
            name
            for name in names[: inside[-1] + 1]
            if name and (name == boundary or not boundary.startswith(name + "."))
        )
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
            "parts": self.parts,
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
        self._trace, self.training, self.parts = None, state["training"], state["parts"]
        self.layers = [Layer(tuple(modules), size) for modules, size in state["layers"]]
        self.prefixes = {
            name: Prefix(*map(tuple, parts)) for name, parts in state["prefixes"].items()
        }
