"""Run a copy of the model: what a dry run changes is a copy's, by construction.

A copy has the model's parameters, which are put back behind each run (`surroundings.py`), and
copies of everything else: buffers, attributes, queues, hooks with what they append to, private
generators, and the inputs of the call (`pystate`). All of one dry run are copies of the model as it
was before the user's own forward, so that no run sees what another has left. Making one takes about
30 us per module: runs that only differ in their rows share one, as batches share a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import Copier, is_shared
from egeria_cache.skip.model.calls import intercept
from egeria_cache.skip.model.fsdp import is_sharded, make_local
from egeria_cache.skip.serve.call import Invocation, plain
from egeria_cache.skip.state.quiet import quietly_in
from egeria_cache.skip.state.surroundings import Weights


class ModelCopy:
    """One copy of the model and its call, to be run and thrown away."""

    def __init__(
        self,
        pairs: Mapping[int, Any],
        root: tuple[nn.Module, Callable[..., Any], Invocation],
        weights: Weights,
        copy_of: Callable[[Any], Any],
    ) -> None:
        self._pairs, self._weights, self.copy_of = pairs, weights, copy_of
        self.moved: dict[int, str] = {}
        """Id -> name of the parameters that the last run has written to."""
        self.model, self._forward, self.call = root
        self.context = copy_context()
        self._real = {
            id(copy): module for module, copy in pairs.values() if isinstance(module, nn.Module)
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; context variables that it sets are this copy's own."""
        try:
            return quietly_in(self.context, self._forward, *args, **kwargs)
        finally:
            self.moved = self._weights.put_back()

    def of(self, value: Any) -> Any:
        """Return the copy of one of the model's modules or tensors; itself if it is shared."""
        known = self._pairs.get(id(value))
        return value if known is None else known[1]

    def real(self, module: nn.Module) -> nn.Module:
        """Return the user's module that this is a copy of."""
        return self._real.get(id(module), module)

    def names(self, names: Mapping[int, str]) -> dict[int, str]:
        """Return the names of the copies beside those of the modules."""
        ours = {key: names[id(real)] for key, real in self._real.items() if id(real) in names}
        return {**names, **ours}

    def ids(self, modules: Iterable[nn.Module]) -> frozenset[int]:
        """Return the ids of modules and of their copies."""
        both = [(id(module), id(self.of(module))) for module in modules]
        return frozenset(i for pair in both for i in pair)

    def intercept(
        self, modules: Iterable[nn.Module], handler: Callable[..., Any]
    ) -> AbstractContextManager[None]:
        """Route the calls of the copies of `modules` to a handler that is told the modules."""

        def handle(module: nn.Module, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
            return handler(self.real(module), original, *args, **kw)

        return intercept([self.of(module) for module in modules], handle)


class ModelCopies:
    """Makes copies of a model as it is now.

    Args:
        model: The model.
        forward: Its own forward, a method of it or what wraps one.
        call: Its inputs.
        weights: Keeps the parameters.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], call: Invocation, weights: Weights
    ) -> None:
        self._model, self._weights = model, weights
        with torch.inference_mode(False):
            leaves = [plain(leaf) for leaf in call.leaves]
        self._copier = Copier(model)
        # The containers too: a model may fill a list that it is given.
        self._root: tuple[nn.Module, Callable[..., Any], list[Any], Any] = self._copier(
            (model, forward, leaves, call.given)
        )
        self.model = self._root[0]
        """What all are copies of, and share their parameters with."""
        self.leaves = self._root[2]
        """Those of the call as they were; not to be written to."""
        self.before = self._copier.of
        """Gives one of the model's modules or tensors as it was; not to be run or written to."""
        self._call = call
        self._pairs = [
            (i, original, first)
            for i, (original, first) in self._copier.pairs.items()
            if isinstance(original, nn.Module | Tensor)
        ]
        weights.keep(self._copier.weights)
        make_local(self._copier.modules())
        if any(is_sharded(p) for m in shared_modules(model) for p in m._parameters.values()):
            raise BoundaryError(
                "a block of the model is compiled and cut by fully_shard: a dry run would run it "
                "as it is, with collectives that the other ranks may not take part in; leave the "
                "blocks uncompiled, or train without fully_shard"
            )

    def fresh(self, change: Callable[[Tensor], Tensor] | None = None) -> ModelCopy:
        """Return a new copy.

        Args:
            change: Gives what it has in place of each parameter, buffer and input.
        """
        copier, first = Copier(self._root[0], change=change), self._copier.of
        root = copier(self._root)
        return self._made(root, copier.of, lambda value: copier.of(first(value)))

    def fresh_call(self) -> Invocation:
        """Return a new copy of the call alone."""
        return self._called(*Copier(self._root[0])(self._root[2:]))

    def only(self) -> ModelCopy:
        """Return the copy that others would be made of, where there are to be none."""
        return self._made(self._root, lambda first: first, self._copier.of)

    def _made(
        self, root: tuple[Any, ...], of: Callable[[Any], Any], of_original: Callable[[Any], Any]
    ) -> ModelCopy:
        model, forward, *call = root
        pairs = {i: (original, of(first)) for i, original, first in self._pairs}
        return ModelCopy(pairs, (model, forward, self._called(*call)), self._weights, of_original)

    def _called(self, leaves: list[Any], given: Any) -> Invocation:
        return dataclasses.replace(self._call, leaves=leaves, given=given, lent=[])


def shared_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a copy shares with the model: compiled code, and what it calls."""
    roots = [module for module in model.modules() if is_shared(module)]
    return list({id(module): module for root in roots for module in root.modules()}.values())
