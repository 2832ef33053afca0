"""Skip the frozen prefix of a model, inside the user's own `model(x)`.

The whole way of a batch through the model is `SkipEngine.forward`. How a cut is found and proved:
`rehearsal.py`; how it is replayed: `recipe.py`; what is promised: docs/correctness.md.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from egeria_cache.address import address, prefix_tensors
from egeria_cache.batch import Batch, Entry, unwrap
from egeria_cache.calls import intercept
from egeria_cache.cut import Cut, merge
from egeria_cache.errors import BoundaryError
from egeria_cache.frozen import FrozenPrefix
from egeria_cache.guards import ContentHash, PrefixGuard
from egeria_cache.invocation import Invocation, plain
from egeria_cache.placeholder import Source
from egeria_cache.probe import input_placeholder
from egeria_cache.recipe import CaptureRun, PrefixDone, Recipe, ReplayRun, Unavailable
from egeria_cache.rehearsal import Rehearsal
from egeria_cache.state import RandomState

__all__ = ["SkipEngine", "SkipHost"]

log = logging.getLogger("egeria")

_MAX_RECIPES = 16
"""Signatures of calls (shapes, modes, plain arguments) proved per boundary."""
_FIRST_WAIT = 2
"""Batches during which the prefix must be still after it changed; doubles each time."""


class SkipHost(Protocol):
    """What the engine asks of its owner."""

    def cut_found(self, batch: Batch, cut: Cut) -> None:
        """A cut was proved for this batch's loader."""

    def captured(
        self, batch: Batch, cut: Cut, rows: np.ndarray | None, tensors: dict[str, Tensor]
    ) -> None:
        """Fresh activations of the masked rows (None: all); nobody changes the tensors later."""

    def prefix_changed(self, reason: str) -> None:
        """The prefix is not what it was: everything stored is void. Nothing stale was served."""

    def refused(self, error: BoundaryError) -> None:
        """The model cannot be cut here; if this returns, the engine goes on uncached."""

    def note(self, kind: str, seconds: float, rows: int) -> None:
        """Time of a "prefix", a "replay" or a "full" forward."""


class SkipEngine:
    """Wraps one model's `forward`. Used from the training thread only.

    Args:
        model: The model, possibly wrapped by DistributedDataParallel.
        host: Who keeps the activations.
    """

    def __init__(self, model: nn.Module, host: SkipHost) -> None:
        self.model = _inner(model)
        self.host = host
        self.boundary: str | None = None
        self.cut: Cut | None = None
        self._forward: Callable[..., Any] = self.model.forward
        self._recipes: dict[tuple[Any, ...], list[Recipe]] = {}
        self._refused: set[tuple[Any, ...]] = set()
        self._num_rehearsals = 0
        self._held = FrozenPrefix()
        self._hashes = ContentHash()
        self._watch: PrefixGuard | None = None
        self._wait = _FIRST_WAIT
        self._num_still = 0
        self._busy = False

    # ---- the way of a batch -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `model.forward`."""
        if self.boundary is None or self._busy:
            return self._forward(*unwrap(args), **unwrap(kwargs))
        # Shapes of tagged tensors are read often: not through their `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            call = Invocation.of(args, kwargs)
            key = () if call is None else call.key()
        if call is None:
            return self._forward(*unwrap(args), **unwrap(kwargs))
        self._busy = True
        try:
            return self._cached(call, key)
        finally:
            self._busy = False

    def _cached(self, call: Invocation, key: tuple[Any, ...]) -> Any:
        self._compare_guards()
        recipe = self._find(None, key, call)
        if recipe is None:
            return self._first(key, call)
        entry = call.batch.entry
        source = None if entry is None else self._find(entry.cut, key, call)
        if entry is None or source is None:
            return self._miss(recipe, call)
        try:
            stored = entry.load()
        except LookupError:
            return self._miss(recipe, call)
        try:
            if not entry.hit.all():
                stored = self._complete(source, call, entry, stored)
            return self._replay(source, recipe, call, stored)
        except BoundaryError as error:
            return self._give_up(key, call, error)

    def _first(self, key: tuple[Any, ...], call: Invocation) -> Any:
        """Prove a cut on this batch; whatever comes of it, return the plain result."""
        args, kwargs = call.plain()
        if key in self._refused or not self._ready():
            return self._forward(*args, **kwargs)
        assert self.boundary is not None
        alike = [r for r in self._recipes.get(key, ()) if r.boundary == self.boundary]
        restless = [recipe for recipe in alike if recipe.pinned]
        if len(restless) > 1:
            paths = call.paths()
            changing = ", ".join(paths[position] for position in restless[-1].pinned)
            what = (
                f"the prefix reads {changing}, which is not a batch of an EgeriaLoader as it came "
                "and changes from call to call"
            )
            self._refuse(key, BoundaryError.impure(self.boundary, what))
            return self._forward(*args, **kwargs)
        self._num_rehearsals += 1
        rehearsal = Rehearsal(
            self.model, self._forward, self.boundary, call, self._held, known=alike
        )
        outcome = rehearsal.run()
        recipe = outcome.recipe
        if recipe is None:
            self._refused.add(key)
            if outcome.error is not None:
                self.host.refused(outcome.error)
            return outcome.result
        recipe.key = key
        cut = self._adopt(recipe, outcome.twin) or self._publish(recipe, call)
        if outcome.rows is not None:
            self.host.captured(call.batch, cut, None, outcome.rows)
        return outcome.result

    def _miss(self, recipe: Recipe, call: Invocation) -> Any:
        """Every row is computed; what crosses the boundary is captured on the way."""
        capture = CaptureRun(recipe, call.batch.size)
        args, kwargs = call.plain()
        started = time.perf_counter()
        with intercept(recipe.modules, capture):
            output = self._forward(*args, **kwargs)
        self.host.note("full", time.perf_counter() - started, call.batch.size)
        rows = capture.rows()
        if rows is not None and recipe.cut is not None:
            self.host.captured(call.batch, recipe.cut, None, rows)
        elif capture.deviation is not None:
            self._refuse(call.key(), BoundaryError.another_way(recipe.boundary, capture.deviation))
        return output

    def _complete(
        self, source: Recipe, call: Invocation, entry: Entry, stored: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the prefix on the misses alone, and merge the rows in order."""
        missing = ~entry.hit
        num_missing = int(missing.sum())
        capture = CaptureRun(source, num_missing, stop=True)
        args, kwargs = call.rows(missing)
        generators = RandomState.now() if source.draws else None
        started = time.perf_counter()
        try:
            with intercept(source.modules, capture):
                self._forward(*args, **kwargs)
        except PrefixDone:
            pass
        if generators is not None:
            generators.restore()  # the replay draws what the whole forward would
        self.host.note("prefix", time.perf_counter() - started, num_missing)
        fresh = capture.rows()
        if fresh is None:
            raise BoundaryError.never_called(source.boundary)
        if source.boundary == self.boundary and source.cut is not None:
            self.host.captured(call.batch, source.cut, missing, fresh)
        return {name: merge(entry.hit, stored[name], fresh[name]) for name in fresh}

    def _replay(
        self, source: Recipe, recipe: Recipe, call: Invocation, stored: Mapping[str, Tensor]
    ) -> Any:
        """Enter at `source`'s cut; on the way capture `recipe`'s, if the boundary has moved on."""
        size = call.batch.size
        values = {
            slot: source.tensor_spec(slot).from_rows(
                stored[name].clone() if source.copies else stored[name]
            )
            for name, slot in source.slots().items()
        }
        replay = ReplayRun(source, size, values)
        capture = CaptureRun(recipe, size) if source is not recipe else None
        args, kwargs = call.rebuild(lambda i, leaf: _input(source, replay, i, leaf))
        before = _Undo(source)
        started = time.perf_counter()
        try:
            with intercept(*_handler(source, replay, recipe, capture)):
                output = self._forward(*args, **kwargs)
        except BoundaryError:
            before.restore()
            raise
        finally:
            replay.scene.finished = True
        self.host.note("replay", time.perf_counter() - started, size)
        if capture is not None and recipe.cut is not None:
            rows = capture.rows()
            if rows is not None:
                self.host.captured(call.batch, recipe.cut, None, rows)
        return _hide(output, source.opaque_outputs) if source.opaque_outputs else output

    # ---- the boundary -------------------------------------------------------------------------

    def attach(self) -> None:
        """Take over `model.forward`. The model's `state_dict`, copies and pickles stay plain."""
        attached = _AttachedForward(self, self.model, self.model.__dict__.get("forward"))
        self._forward = self.model.forward
        self.model.__dict__["forward"] = attached

    def detach(self) -> None:
        """Give the model its own forward back, and let the prefix go. Idempotent."""
        self.set_boundary(None)
        attached = self.model.__dict__.get("forward")
        if isinstance(attached, _AttachedForward) and attached.engine is self:
            del self.model.__dict__["forward"]
            if attached.before is not None:
                self.model.__dict__["forward"] = attached.before

    def set_boundary(self, name: str | None) -> None:
        """Name the last frozen module.

        Moving forward keeps what was proved: activations of an earlier cut stay right, and serve as
        entries. Moving back, or to None, voids every cut that lies beyond.

        Raises:
            BoundaryError: The model has no such module.
        """
        if name == self.boundary:
            return
        name = name if name is None else self._resolve(name)
        before = self._all()
        kept = [r for r in before if name is not None and not _lies_beyond(r, name)]
        self._recipes.clear()
        for recipe in kept:
            self._recipes.setdefault(recipe.key, []).append(recipe)
        self.boundary, self.cut = name, None
        self._refused.clear()
        self._num_rehearsals = 0
        self._watch, self._wait = None, _FIRST_WAIT
        self._held.release()
        for recipe in kept:
            self._held.extend(step.module for step in recipe.steps if not step.run)
        if name is None:
            self._hashes.forget()
        else:
            self._held.extend([self.model.get_submodule(name)])

    def knows(self, cut: Cut) -> bool:
        """Whether batches may still enter at this cut."""
        return any(recipe.cut is cut for recipe in self._all())

    def _resolve(self, name: str) -> str:
        known = dict(self.model.named_modules())
        for candidate in (name, name.removeprefix("module."), name.removeprefix("_orig_mod.")):
            if candidate and candidate in known:
                return candidate
        raise BoundaryError.unknown(name, [other for other in known if other])

    # ---- recipes ------------------------------------------------------------------------------

    def _find(self, cut: Cut | None, key: tuple[Any, ...], call: Invocation) -> Recipe | None:
        """Return the recipe for calls like this one, at `cut` or else at the present boundary."""
        for recipe in self._recipes.get(key, ()):
            wanted = recipe.boundary == self.boundary if cut is None else recipe.cut is cut
            if wanted and _fits(recipe, call):
                return recipe
        return None

    def _ready(self) -> bool:
        """Whether another rehearsal is worth its price."""
        if self._watch is not None:
            if self._watch.changed() is not None:
                self._watch, self._num_still = _frozen_now(self.model), 0
            self._num_still += 1
            if self._num_still <= self._wait:
                return False
            self._watch, self._wait = None, min(2 * self._wait, 1024)
        return self._num_rehearsals < _MAX_RECIPES

    def _adopt(self, recipe: Recipe, twin: Recipe | None) -> Cut | None:
        """Let two modes of the model share a cut whose rows are the same."""
        if twin is None:
            return None
        recipe.cut, recipe.guard = twin.cut, twin.guard
        self._recipes[recipe.key].append(recipe)
        return recipe.cut

    def _publish(self, recipe: Recipe, call: Invocation) -> Cut:
        tensors = prefix_tensors(recipe)
        recipe.guard = guard = PrefixGuard(tensors, _skipped_modules(recipe))
        dropped = {call.tagged[i].leaf for i in call.tagged if i not in recipe.kept}
        kept = {call.tagged[i].leaf for i in recipe.kept}
        recipe.cut = self.cut = Cut(
            boundary=recipe.boundary,
            tensors={n: recipe.tensor_spec(slot).row for n, slot in recipe.slots().items()},
            dropped=frozenset(dropped - kept),
            tagged=frozenset(dropped | kept),
            fields=address(recipe, call, tensors, self._hashes),
            profile=recipe.profile,
            changed=guard.changed,
        )
        self._recipes.setdefault(recipe.key, []).append(recipe)
        self.host.cut_found(call.batch, recipe.cut)
        return recipe.cut

    def _compare_guards(self) -> None:
        for guard in {id(r.guard): r.guard for r in self._all()}.values():
            reason = guard.changed() if guard is not None else None
            if reason is not None:
                self._void(reason)
                return

    def _void(self, reason: str) -> None:
        self.host.prefix_changed(reason)
        self._recipes.clear()
        self.cut = None
        self._hashes.forget()
        self._refused.clear()
        self._watch, self._num_still = _frozen_now(self.model), 0

    def _all(self) -> list[Recipe]:
        return [recipe for recipes in self._recipes.values() for recipe in recipes]

    def _refuse(self, key: tuple[Any, ...], error: BoundaryError) -> None:
        self._recipes.pop(key, None)
        self._refused.add(key)
        self.host.refused(error)

    def _give_up(self, key: tuple[Any, ...], call: Invocation, error: BoundaryError) -> Any:
        """A replay could not be finished: compute the batch plainly, and cut no more like this."""
        self._refuse(key, error)
        args, kwargs = call.plain()
        return self._forward(*args, **kwargs)


class _AttachedForward:
    """The instance's `forward`; a copy or a pickle of the model gets its plain forward back."""

    def __init__(self, engine: SkipEngine, model: nn.Module, before: Any) -> None:
        self.engine = engine
        self.model = model
        self.before = before
        # Signature of the model's own forward: trainers look at it to choose columns.
        self.__wrapped__ = model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self.engine.forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return _same, (self.before,)
        # While the copy is built its instance dict is empty: this finds its class's forward.
        return getattr, (self.model, "forward")


def _frozen_now(model: nn.Module) -> PrefixGuard:
    """Watch all that looks frozen at present."""
    return PrefixGuard(
        (f"{name}.{key}", module, tensor)
        for name, module in model.named_modules()
        for slot in (module._parameters, {} if module.training else module._buffers)
        for key, tensor in slot.items()
        if tensor is not None and not tensor.requires_grad
    )


def _same(value: Any) -> Any:
    return value


class _Undo:
    """Takes back what an abandoned replay did: random draws, and writes to active buffers."""

    def __init__(self, recipe: Recipe) -> None:
        self._rng = torch.get_rng_state()
        self._buffers = [(buffer, buffer.clone()) for buffer in recipe.mutable]

    def restore(self) -> None:
        torch.set_rng_state(self._rng)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)


def _input(source: Recipe, replay: ReplayRun, position: int, leaf: Tensor) -> Tensor:
    if position in source.kept or position not in source.leaf_names:
        result: Tensor = plain(leaf)
        return result
    name = source.leaf_names[position][0]
    return input_placeholder(leaf, frozenset({Source("leaf", name, position)}), replay)


def _handler(
    source: Recipe, replay: ReplayRun, recipe: Recipe, capture: CaptureRun | None
) -> tuple[list[nn.Module], Callable[..., Any]]:
    """Route calls to the replay, and around it to the capture of a later boundary."""
    if capture is None:
        return source.modules, replay
    old, new = set(map(id, source.modules)), set(map(id, recipe.modules))

    def handle(module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) in old:
            original = functools.partial(replay, module, original)
        if id(module) in new:
            return capture(module, original, *args, **kwargs)
        return original(*args, **kwargs)

    both = {id(m): m for m in (*source.modules, *recipe.modules)}
    return list(both.values()), handle


def _fits(recipe: Recipe, call: Invocation) -> bool:
    """Whether the inputs are those that the recipe was proved with."""
    if tuple(module.training for module in recipe.ancestors) != recipe.modes:
        return False
    for position, known in recipe.leaf_names.items():
        leaf = call.tagged.get(position)
        if leaf is None:
            if position not in recipe.kept or position in recipe.entered:
                return False
        elif (leaf.leaf, leaf.chain_key) != known:
            return False
    return all(
        torch.equal(plain(call.leaves[position]), value)
        for position, value in recipe.pinned.items()
    )


def _lies_beyond(recipe: Recipe, name: str) -> bool:
    """Whether the recipe's boundary comes after the module `name`."""
    return any(
        step.name == name or name.startswith(step.name + ".") for step in recipe.steps[:-1]
    ) or name.startswith(recipe.boundary + ".")


def _skipped_modules(recipe: Recipe) -> list[tuple[str, nn.Module]]:
    modules = {
        id(module): module
        for step in recipe.steps
        if not step.run
        for module in step.module.modules()
    }
    return [(recipe.names.get(i, ""), module) for i, module in modules.items()]


def _hide(output: Any, opaque: frozenset[int]) -> Any:
    leaves, spec = tree_flatten(output)
    hidden = Unavailable(frozenset({Source("step", "a skipped module")}))
    return tree_unflatten([hidden if i in opaque else x for i, x in enumerate(leaves)], spec)


def _inner(model: nn.Module) -> nn.Module:
    """Look through wrappers that call the model as it is."""
    while type(model).__name__ == "DistributedDataParallel":
        inner = model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model
