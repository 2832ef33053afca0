"""Run a copy of the model: what a dry run changes is a copy's, by construction.

A copy has the model's parameters, which are put back behind each run (`surroundings.py`), and
copies of everything else: buffers, attributes, queues, hooks with what they append to, private
generators, and the inputs of the call (`pystate`). All of one dry run are copies of the model as it
was before the user's own forward, so that no run sees what another has left. Making one takes about
30 us per module: runs that only differ in their rows share one, as batches share a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.batch import Fold
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import Copier, is_shared
from egeria_cache.skip.model.calls import intercept
from egeria_cache.skip.model.fsdp import is_sharded, make_local
from egeria_cache.skip.serve.call import Invocation, plain
from egeria_cache.skip.serve.placeholder import Scene
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.state.quiet import quietly_here
from egeria_cache.skip.state.surroundings import Weights


@dataclasses.dataclass(eq=False)
class ModelCopy:
    """One copy of the model and its call, to be run and thrown away."""

    modules: Sequence[nn.Module]
    """The user's."""
    _forward: Callable[..., Any]
    call: Invocation
    _weights: Weights
    of: Callable[[Any], Any]
    """Gives the copy of what the model holds; itself if it is shared."""

    def __post_init__(self) -> None:
        self.moved: dict[int, str] = {}
        """Id -> name of the parameters that the last run has written to."""
        self.context = copy_context()
        self._real = {id(self.of(module)): module for module in self.modules}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; context variables that it sets are this copy's own."""
        try:
            return self.context.run(quietly_here, self._forward, *args, **kwargs)
        finally:
            self.moved = self._weights.put_back()

    def real(self, value: Any) -> Any:
        """Return the user's module for a copy of it, and anything else as it is."""
        return self._real.get(id(value), value)

    def names(self, names: Mapping[int, str]) -> dict[int, str]:
        """Return the names of the copies beside those of the modules."""
        ours = {key: names[id(real)] for key, real in self._real.items() if id(real) in names}
        return {**names, **ours}

    def scene(self, plan: ReplayPlan) -> Scene:
        """Begin a run of it on placeholders, which meet its modules as well as the model's."""
        around = {id(one) for module in plan.ancestors for one in (module, self.of(module))}
        return Scene(self.names(plan.names), frozenset(around), written=plan.written)

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
        self.model, self._modules, self._weights = model, list(model.modules()), weights
        self.call = call
        with torch.inference_mode(False):
            leaves = [plain(leaf) for leaf in call.leaves]
        self._copier = Copier(model)
        # The containers too: a model may fill a list that it is given.
        self._root = self._copier((model, forward, (leaves, call.given)))
        self.first: nn.Module = self._root[0]
        """What all are copies of, and share their parameters with."""
        self.leaves: list[Any] = self._root[2][0]
        """Those of the call as they were; not to be written to."""
        weights.keep(self._copier.weights)
        copied = [pair for pair in self._copier.pairs.values() if pair[0] is not pair[1]]
        make_local(model, [pair for pair in copied if isinstance(pair[0], nn.Module)])
        if any(is_sharded(p) for m in shared_modules(model) for p in m._parameters.values()):
            why = "a block of the model is compiled and cut by fully_shard: a dry run would take "
            why += "part in collectives alone; leave blocks uncompiled, or do without fully_shard"
            raise BoundaryError(why)

    def fresh(self, change: Callable[[Tensor], Tensor] | None = None) -> ModelCopy:
        """Return a new copy.

        Args:
            change: Gives what it has in place of each parameter, buffer and input.
        """
        copier, first = Copier(self.first, change=change), self._copier.of
        return self._copy(copier(self._root), lambda value: copier.of(first(value)))

    def itself(self) -> ModelCopy:
        """Return what else all would be copies of, where there is to be one only."""
        return self._copy(self._root, self._copier.of)

    def call_anew(self) -> Invocation:
        """Return the call as it was."""
        leaves, given = Copier(self.first)(self._root[2])
        return dataclasses.replace(self.call, leaves=leaves, given=given, lent=[])

    def _copy(self, root: Any, of: Callable[[Any], Any]) -> ModelCopy:
        _, forward, (leaves, given) = root
        call = dataclasses.replace(self.call, leaves=leaves, given=given, lent=[])
        return ModelCopy(self._modules, forward, call, self._weights, of)


def shared_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a copy shares with the model: compiled code, and what it calls."""
    return distinct(one for root in model.modules() if is_shared(root) for one in root.modules())


def arguments(
    call: Invocation, rows: list[int], resize: Callable[[int, Tensor], Tensor] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with other rows of its batch; as they are for none."""
    if not rows:
        return call.plain()
    size, tagged = call.batch.size, call.tagged

    def swap(position: int, leaf: Any) -> Any:
        if position not in tagged and (leaf.dim() == 0 or leaf.shape[0] != size):
            return leaf
        fold = tagged[position].fold if position in tagged else Fold()
        if fold == Fold():
            taken = take(leaf, rows, size)
        else:
            taken = fold.together(take(fold.apart(leaf), rows, size))
        return taken if resize is None or position not in tagged else resize(position, taken)

    return call.rebuild(swap)


def take(leaf: Tensor, rows: list[int], size: int) -> Tensor:
    """Return some rows of a leaf of shape (B, ...), made-up ones included."""
    if max(rows) >= size:
        leaf = torch.cat([leaf, *_made_up(leaf[:1])])
    return leaf[torch.tensor(rows, device=leaf.device)]


def _made_up(row: Tensor) -> list[Tensor]:
    """Return three other samples than this one, of values that a sample may have."""
    if row.dim() < 2 or not row.numel():  # a label, a length: what is possible cannot be known
        return [row] * 3
    rolled = row.roll(1, -1)
    if row.is_floating_point() or row.is_complex():
        return [rolled, -row.flip(-1), 3 * row + 0.5]
    least, most = row.amin().expand_as(row), row.amax().expand_as(row)
    return [rolled, least, most]


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules without repetition, in order."""
    return list({id(module): module for module in modules}.values())


def trainable(module: nn.Module) -> str | None:
    """Name one trainable parameter of `module`, if there is one."""
    return next((name for name, p in module.named_parameters() if p.requires_grad), None)
