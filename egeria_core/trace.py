"""One look at a real forward: which modules ran, when they returned, what fed each of them.

Registration order is a guess, and a model's own parameters (a class token) belong to no layer. So
the first training forward is watched once: everything that ran before a boundary returned is in
front of it, and so is every parameter that its output was made from.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from egeria_cache.device import random_states

__all__ = ["ForwardTrace", "parameters_behind", "registration_prefix"]


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
        self._handles: list[RemovableHandle] = []
        self.complete = False
        self.started: dict[str, int] = {}
        self.returned: dict[str, int] = {}
        self.parameters: dict[str, list[Tensor]] = {}
        self.costs: dict[str, float] = {}
        """Multiplications of each module's own code, estimated from its weights and outputs."""
        self.drew: dict[str, int] = {}
        """When a module in training mode first drew random numbers in its own code."""
        self._starts: Counter[str] = Counter()
        self._open: list[str] = []
        self._stacks: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._random: Any = None
        self._seen: set[Any] = set()
        for name, module in model.named_modules():
            hooks = _Watch(self, name)
            self._handles.append(module.register_forward_pre_hook(hooks.before))
            self._handles.append(module.register_forward_hook(hooks.after))

    def before(self, name: str) -> None:
        """Note the first start of a module."""
        if self._live():
            self._look()
            self._clock += 1
            self.started.setdefault(name, self._clock)
            self._starts[name] += 1
            self._open.append(name)

    def after(self, name: str, output: object) -> None:
        """Note the last return of a module, and what a candidate's output was made from."""
        if not self._live() or name not in self.started:
            return
        self._look()
        self._clock += 1
        self.returned[name] = self._clock
        self.costs[name] = self.costs.get(name, 0.0) + _cost(
            self._model.get_submodule(name), output
        )
        if name in self._open:
            while self._open.pop() != name:  # one that was left by an exception
                pass
        if name in self._candidates:
            self._stacks.setdefault(name, (self._clock, tuple(self._open)))
        if name in self._candidates:
            # Nodes seen for an earlier boundary are skipped: each boundary lists what it adds.
            found = parameters_behind(output, self._seen)
            self.parameters[name] = self.parameters.get(name, []) + found
        if name == "":
            self.complete = True

    def _look(self) -> None:
        """Compare the random generators with the last look: does the running module's code draw?"""
        before, self._random = self._random, _random_state()
        if before is not None and before != self._random and self._open:
            running = self._open[-1]
            if self._model.get_submodule(running).training:
                self.drew.setdefault(running, self._clock)

    def _live(self) -> bool:
        return not self.complete and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def modules_before(self, boundary: str) -> list[str]:
        """Names of the modules that had started when `boundary` returned, its ancestors aside."""
        end = self.returned[boundary]
        return [
            name
            for name, at in self.started.items()
            if at < end and not self._encloses(name, boundary)
        ]

    def drawing_around(self, boundary: str) -> list[str]:
        """Names of the modules around `boundary` whose own code draws before it returns.

        Those that are called more than once are left out: where are they frozen?
        """
        end, around = self._stacks.get(boundary, (0, ()))
        return [
            name for name in around if self.drew.get(name, end) < end and self._starts[name] == 1
        ]

    def _encloses(self, name: str, boundary: str) -> bool:
        """Whether `name` is an ancestor, still running when `boundary` returns."""
        return name == "" or boundary.startswith(name + ".")

    def parameters_before(self, boundary: str) -> list[Tensor]:
        """Parameters that feed `boundary`'s output, whichever module owns them."""
        end = self.returned[boundary]
        return [
            parameter
            for name, found in self.parameters.items()
            if self.returned[name] <= end
            for parameter in found
        ]

    def close(self) -> None:
        """Remove every hook; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()


class _Watch:
    """Hooks of one module. A copy of the model gets inert ones, not a copy of the tracer."""

    def __init__(self, trace: ForwardTrace | None, name: str) -> None:
        self._trace = trace
        self._name = name

    def before(self, module: nn.Module, args: object) -> None:
        if self._trace is not None:
            self._trace.before(self._name)

    def after(self, module: nn.Module, args: object, output: object) -> None:
        if self._trace is not None:
            self._trace.after(self._name, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return _Watch(None, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watch, (None, self._name)


def _cost(module: nn.Module, output: object) -> float:
    """Return about how many multiplications one call of a module's own code took.

    A convolution's weight is used once per position of the output, a matrix once per row of it, a
    table's rows are only looked up. Attention itself is left out: it is alike in all blocks.
    """
    tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if tensor is None or tensor.numel() == 0 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 0.0
    cost = 0.0
    for weight in module.parameters(recurse=False):
        if weight.dim() > 2:
            cost += tensor.numel() * weight[0].numel()
        elif weight.dim() == 2:
            cost += weight.numel() * tensor.numel() / tensor.shape[-1]
    return cost


def _random_state() -> tuple[Any, ...]:
    """Return the states of the generators that a forward may draw from, for comparison."""
    generators = [torch.get_rng_state(), *random_states()]
    name, key, *rest = np.random.get_state()
    return (
        *(state.cpu().numpy().tobytes() for state in generators),
        random.getstate(),
        (name, np.asarray(key).tobytes(), *rest),
    )


def parameters_behind(output: object, seen: set[Any] | None = None) -> list[Tensor]:
    """Return the leaf tensors that `output`'s autograd graph accumulates gradients into."""
    seen = set() if seen is None else seen
    stack = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    found: list[Tensor] = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        stack.extend(parent for parent, _ in node.next_functions)
    return found


def registration_prefix(model: nn.Module, boundary: str) -> Sequence[str]:
    """Names of the modules registered up to the end of `boundary`: the guess before any forward."""
    names = [name for name, _ in model.named_modules()]
    last = max(i for i, n in enumerate(names) if n == boundary or n.startswith(boundary + "."))
    return [
        name
        for name in names[: last + 1]
        if name and (name == boundary or not boundary.startswith(name + "."))
    ]
