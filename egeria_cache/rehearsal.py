"""Prove a cut on the first batch, before anything is stored.

The model is run a few times more on that batch, and left as it was:
 1. *Discovery*: a forward that writes down the order of module calls. The modules that returned
    before the boundary did are the prefix; they are put into inference mode.
 2. *Plain*: the forward whose result the user gets, with every output of the prefix kept.
 3. *Recomposition*: the prefix alone, on the rows in another order and number. It shows which
    dimension is the batch, and that no sample's activation depends on its neighbours.
 4. *Probes*: replays on placeholders until nothing escapes; each escape adds an input leaf, a light
    module or a tensor to what a hit needs.
 5. *Replay*: from rows as they come back from the store; its output must be the plain one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from egeria_cache.calls import Recorder, intercept, is_compiled
from egeria_cache.compare import difference, same_content, tolerance
from egeria_cache.cut import TensorSpec
from egeria_cache.errors import BoundaryError
from egeria_cache.frozen import FrozenPrefix
from egeria_cache.invocation import Invocation, plain
from egeria_cache.placeholder import Escape, Placeholder, Source, placeholders
from egeria_cache.recipe import (
    PrefixDone,
    Recipe,
    ReplayRun,
    Slot,
    StepPlan,
    Unavailable,
)
from egeria_cache.state import ModelState, RandomState, stashed

__all__ = ["Outcome", "Rehearsal"]

_MAX_PROBES = 200


@dataclass(slots=True)
class Outcome:
    """What the first batch brought."""

    result: Any
    """The user's."""
    recipe: Recipe | None = None
    rows: dict[str, Tensor] | None = None
    """The first batch's activations."""
    error: BoundaryError | None = None
    """Why there is no recipe."""


class Rehearsal:
    """One attempt to cut `model` at `boundary` for calls like `call`."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        boundary: str,
        call: Invocation,
        held: FrozenPrefix,
    ) -> None:
        self.model = model
        self.forward = forward
        self.boundary = boundary
        self.call = call
        self.held = held
        self.size = call.batch.size
        self.names = {id(module): name for name, module in model.named_modules()}
        self.args, self.kwargs = call.plain()

    def run(self) -> Outcome:
        """Return the user's result, and the recipe or the reason why there is none."""
        try:
            recorder = self._discover()
        except BoundaryError as error:
            return Outcome(self.forward(*self.args, **self.kwargs), error=error)
        before = RandomState.now()
        plain_run = _PlainRun(recorder, self)
        with intercept(plain_run.modules, plain_run):
            result = self.forward(*self.args, **self.kwargs)
        after = RandomState.now()
        outcome = Outcome(result)
        state = ModelState(self.model)
        try:
            if plain_run.error is not None:
                raise plain_run.error
            proof = _Proof(self, plain_run, result, before, after, state)
            outcome.recipe, outcome.rows = proof.recipe()
        except BoundaryError as error:
            outcome.error = error
        except Exception as error:
            outcome.error = BoundaryError.not_proved(
                self.boundary, f"{type(error).__name__}: {error}"
            )
            outcome.error.__cause__ = error
        finally:
            state.restore()
            after.restore()
        return outcome

    def _discover(self) -> Recorder:
        """Record the calls with the prefix in inference mode, as it will be from now on."""
        for _ in range(3):
            recorder = Recorder()
            with stashed(self.model), intercept(_patchable(self.model), recorder):
                self.forward(*self.args, **self.kwargs)
            steps, _ = recorder.before(self._boundary_call(recorder))
            skipped = [step.module for step in steps if not _trainable(step.module)]
            moved = any(m.training for module in skipped for m in module.modules())
            self.held.extend(skipped)
            if not moved:
                break
        return recorder

    def _boundary_call(self, recorder: Recorder) -> int:
        """Choose the last call before which nothing trainable ran; else the very last."""
        module = self.model.get_submodule(self.boundary)
        calls = [i for i, call in enumerate(recorder.calls) if call.module is module]
        if not calls:
            raise BoundaryError.never_called(self.boundary)
        parameter = _trainable(module)
        if parameter is not None:
            raise BoundaryError.trainable(self.boundary, f"{self.boundary}.{parameter}")
        for index in reversed(calls):
            steps, _ = recorder.before(index)
            if not any(_trainable(step.module) for step in steps):
                return index
        return calls[-1]


class _PlainRun:
    """Keeps every output of the prefix during the user's forward."""

    def __init__(self, recorder: Recorder, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        steps, around = recorder.before(rehearsal._boundary_call(recorder))
        self.steps = steps
        self.ancestors = _distinct([rehearsal.model, *(call.module for call in around)])
        self.modules = _distinct(step.module for step in steps)
        self.outputs: list[Any] = []
        self.versions: list[list[int]] = []
        self.error: BoundaryError | None = None
        self._inside = False

    def __call__(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        index = len(self.outputs)
        if self._inside or index == len(self.steps) or self.error is not None:
            return original(*args, **kwargs)
        if self.steps[index].module is not module:
            names, boundary = self._rehearsal.names, self._rehearsal.boundary
            self.error = BoundaryError.another_way(
                boundary, f"{names[id(module)]!r} ran where another module did a moment before"
            )
            return original(*args, **kwargs)
        if index == len(self.steps) - 1 and torch.is_grad_enabled() and _inside_checkpoint():
            self.error = BoundaryError.not_proved(
                self._rehearsal.boundary,
                "it is called inside a checkpointed region that reaches past it, which would run "
                "the skipped modules again in backward; let the checkpointed region begin after it",
            )
        self._inside = True
        try:
            output = original(*args, **kwargs)
        finally:
            self._inside = False
        self.outputs.append(output)
        return output


class _Proof:
    """Steps 3 to 5: from the plain run to a recipe, or a `BoundaryError`."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        plain_run: _PlainRun,
        result: Any,
        before: RandomState,
        after: RandomState,
        state: ModelState,
    ) -> None:
        self.r = rehearsal
        self.run = plain_run
        self.result = result
        self.rng_before, self.rng_after = before, after
        self.state = state
        self.tried: set[int] = set()
        self.real_arguments: set[int] = set()
        self.other: list[list[Any]] = []

    def recipe(self) -> tuple[Recipe, dict[str, Tensor]]:
        """Prove the cut."""
        rows = _recompose(self.r.size)
        self._recompute(rows)
        recipe = self._draft(len(rows))
        self._probe(recipe)
        self._check_rows(recipe, rows)
        tagged = self.r.call.tagged
        recipe.leaf_names = {i: (leaf.leaf, leaf.chain_key) for i, leaf in tagged.items()}
        recipe.modes = tuple(module.training for module in recipe.ancestors)
        captured = self._check_replay(recipe)
        return recipe, captured

    # ---- 3. recomposition ---------------------------------------------------------------------

    def _recompute(self, rows: list[int]) -> None:
        """Run the prefix alone on other rows, under other random numbers."""
        size, tagged = self.r.size, self.r.call.tagged
        index = torch.tensor(rows)

        def swap(position: int, leaf: Any) -> Any:
            whole = plain(leaf)
            if position not in tagged and (whole.dim() == 0 or whole.shape[0] != size):
                return whole
            taken = whole[index.to(whole.device)]
            if size == 1 and taken.dim() > 1:  # a batch of one: let its neighbour be another sample
                taken[1] = taken[1].roll(1, -1)
            return taken

        outputs: list[Any] = []

        def keep(module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
            position = len(outputs)
            if keep.inside or position == len(self.run.steps):  # type: ignore[attr-defined]
                return original(*args, **kwargs)
            if self.run.steps[position].module is not module:
                raise BoundaryError.another_way(self.r.boundary, "its calls depend on the batch")
            keep.inside = True  # type: ignore[attr-defined]
            try:
                outputs.append(original(*args, **kwargs))
            finally:
                keep.inside = False  # type: ignore[attr-defined]
            if len(outputs) == len(self.run.steps):
                raise PrefixDone
            return outputs[-1]

        keep.inside = False  # type: ignore[attr-defined]
        self.rng_after.restore()
        torch.rand(1)
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = self.r.call.rebuild(swap)
            try:
                with intercept(self.run.modules, keep):
                    self.r.forward(*args, **kwargs)
            except PrefixDone:
                pass
        self._check_state()
        self.other = [tree_leaves(output) for output in outputs]

    def _check_state(self) -> None:
        """Refuse a prefix that writes to its own buffers or stashes tensors on modules."""
        skipped = [m for m in self.run.modules if _trainable(m) is None]
        inside = {id(m) for module in skipped for m in module.modules()}
        for module, key in self.state.changed_buffers():
            if id(module) in inside:
                name = f"{self.r.names[id(module)]}.{key}"
                raise BoundaryError.impure(
                    self.r.boundary, f"its prefix writes to the buffer {name!r}"
                )
        for module, key, value in self.state.changed_attributes():
            if id(module) in inside and _holds_tensor(value):
                name = f"{self.r.names[id(module)]}.{key}"
                raise BoundaryError.impure(
                    self.r.boundary,
                    f"the prefix leaves a tensor behind as the attribute {name!r}, which would be "
                    "that of another batch when the prefix is skipped",
                )
        self.state.restore()

    def _draft(self, other_size: int) -> Recipe:
        steps = []
        for record, output, other in zip(self.run.steps, self.run.outputs, self.other, strict=True):
            name = self.r.names[id(record.module)]
            leaves, spec = tree_flatten(output)
            if len(leaves) != len(other):
                raise BoundaryError.another_way(
                    self.r.boundary, f"{name!r} returns another structure for another batch"
                )
            described = [
                self._describe(name, a, b, other_size) for a, b in zip(leaves, other, strict=True)
            ]
            run = _trainable(record.module) is not None
            steps.append(StepPlan(record.module, name, spec, described, run=run))
        recipe = Recipe(self.r.boundary, steps, self.run.ancestors, self.r.names)
        tensors = [j for j, x in enumerate(steps[-1].leaves) if isinstance(x, TensorSpec)]
        if len(tensors) == 1 and steps[-1].leaves[tensors[0]].batch_dim is not None:
            steps[-1].cached.add(tensors[0])
        return recipe

    def _describe(self, name: str, a: Any, b: Any, other_size: int) -> Any:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            spec = TensorSpec.of(a, self.r.size, b, other_size)
            if spec is None:
                raise BoundaryError.impure(
                    self.r.boundary,
                    f"{name!r} returns a tensor of shape {tuple(a.shape)} for {self.r.size} "
                    f"samples and {tuple(b.shape)} for {other_size}",
                )
            return spec
        if isinstance(a, int | float | str | bool | type(None)):
            if a != b:
                raise BoundaryError.impure(
                    self.r.boundary, f"{name!r} returns {a!r} for one batch and {b!r} for another"
                )
            return a
        return Unavailable(frozenset({Source("step", name)}))

    # ---- 4. probes ----------------------------------------------------------------------------

    def _probe(self, recipe: Recipe) -> None:
        """Replay until nothing escapes."""
        for _ in range(_MAX_PROBES):
            run = _ProbeRun(self, recipe)
            self.rng_before.restore()
            args, kwargs = self._placeholder_inputs(recipe, run)
            try:
                with intercept(recipe.modules, run):
                    output = self.r.forward(*args, **kwargs)
                run.scene.finished = True
                escaped = {s for p in _leaked(output) for s in p.sources}
                if not escaped:
                    return
                raise Escape.at(escaped, "the model's output")
            except _TryAgain:
                pass
            except Escape as escape:
                if not self._resolve(recipe, escape, run):
                    raise BoundaryError(str(escape)) from escape
            finally:
                self.state.restore()
        raise BoundaryError.not_proved(self.r.boundary, "too much crosses the boundary")

    def _placeholder_inputs(
        self, recipe: Recipe, run: ReplayRun
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        paths = self.r.call.paths()

        def swap(position: int, leaf: Any) -> Any:
            kind = "leaf" if position in self.r.call.tagged else "argument"
            if position in recipe.kept or position in self.real_arguments:
                return plain(leaf)
            source = frozenset({Source(kind, paths[position], position)})
            return input_placeholder(leaf, source, run)

        return self.r.call.rebuild(swap)

    def _resolve(self, recipe: Recipe, escape: Escape, run: _ProbeRun) -> bool:
        """Give the next probe what was missing; False if there is nothing to give."""
        progress = False
        for source in escape.sources:
            if source.kind == "leaf" and source.index not in recipe.kept:
                recipe.kept.add(source.index)
                if not run.scene.after_boundary:
                    recipe.entered.add(source.index)
                progress = True
            elif source.kind == "argument" and source.index not in self.real_arguments:
                self.real_arguments.add(source.index)
                if not run.scene.after_boundary:
                    self._pin(recipe, source.index)
                progress = True
            elif source.kind == "step" and source.index >= 0:
                progress |= self._give(recipe, source)
        return progress

    def _give(self, recipe: Recipe, source: Source) -> bool:
        step = recipe.steps[source.index]
        last = source.index == len(recipe.steps) - 1
        light = not last and next(step.module.parameters(), None) is None
        if light and source.index not in self.tried:
            # Rotary embeddings, masks: computed anew from what is there anyway.
            self.tried.add(source.index)
            step.run = True
            return True
        spec = step.leaves[source.leaf]
        if step.run or not isinstance(spec, TensorSpec):
            return False
        if source.leaf in step.cached or source.leaf in step.constants:
            return False
        if spec.batch_dim is not None:
            step.cached.add(source.leaf)
            return True
        value = tree_leaves(self.run.outputs[source.index])[source.leaf].detach()
        error = difference(value, self.other[source.index][source.leaf])
        if error > tolerance(value):
            raise BoundaryError.mixes_samples(self.r.boundary, step.name, error)
        step.constants[source.leaf] = value
        return True

    def _pin(self, recipe: Recipe, position: int) -> None:
        recipe.pinned[position] = self.r.call.leaves[position]

    # ---- 3b. and 5. numbers -------------------------------------------------------------------

    def _check_rows(self, recipe: Recipe, rows: list[int]) -> None:
        """Compare what is cached with the same samples in other company."""
        for i, j in recipe.slots().values():
            value = tree_leaves(self.run.outputs[i])[j]
            other = self.other[i][j]
            if other.requires_grad:
                parameter = self.trained_by(other)
                raise BoundaryError.trainable(self.r.boundary, parameter)
            error = self._row_difference(recipe.tensor_spec((i, j)), value, other, rows)
            if error > tolerance(value):
                raise self._blame(recipe, rows, error)

    def _row_difference(self, spec: TensorSpec, a: Tensor, b: Tensor, rows: list[int]) -> float:
        if spec.batch_dim is None:
            return difference(a, b)
        first = spec.to_rows(a, self.r.size)[torch.tensor(rows, device=a.device)]
        second = spec.to_rows(b, len(rows))
        if self.r.size == 1:  # the second row is a made-up neighbour
            first, second = first[:1], second[:1]
        return difference(first, second)

    def _blame(self, recipe: Recipe, rows: list[int], error: float) -> BoundaryError:
        for i, step in enumerate(recipe.steps):
            pairs = zip(step.leaves, tree_leaves(self.run.outputs[i]), self.other[i], strict=True)
            for spec, a, b in pairs:
                if isinstance(spec, TensorSpec):
                    here = self._row_difference(spec, a, b, rows)
                    if here > tolerance(a):
                        return BoundaryError.mixes_samples(self.r.boundary, step.name, here)
        return BoundaryError.mixes_samples(self.r.boundary, self.r.boundary, error)

    def _check_replay(self, recipe: Recipe) -> dict[str, Tensor]:
        """Replay from rows as the store gives them back; compare with the user's result."""
        rows: dict[str, Tensor] = {}
        values: dict[Slot, Tensor] = {}
        versions: dict[Slot, int] = {}
        for name, slot in recipe.slots().items():
            spec = recipe.tensor_spec(slot)
            tensor = tree_leaves(self.run.outputs[slot[0]])[slot[1]]
            with torch.inference_mode(False), torch.no_grad():
                view = spec.to_rows(tensor, self.r.size)
                rows[name] = view.clone(memory_format=torch.contiguous_format)
                values[slot] = spec.from_rows(rows[name].clone())
                versions[slot] = values[slot]._version
        run = ReplayRun(recipe, self.r.size, values)
        self.rng_before.restore()
        args, kwargs = self._placeholder_inputs(recipe, run)
        with intercept(recipe.modules, run):
            output = self.r.forward(*args, **kwargs)
        run.scene.finished = True
        recipe.copies = any(values[slot]._version != versions[slot] for slot in values)
        changed = self.state.changed_buffers()
        recipe.mutable = [module._buffers[key] for module, key in changed]  # type: ignore[misc]
        if not RandomState.now().equals(self.rng_after):
            raise BoundaryError.impure(
                self.r.boundary, "the prefix draws random numbers, so later ones would differ"
            )
        recipe.opaque_outputs = self._compare_outputs(output)
        return rows

    def _compare_outputs(self, output: Any) -> frozenset[int]:
        expected, spec = tree_flatten(self.result)
        leaves, other_spec = tree_flatten(output)
        if spec != other_spec:
            raise BoundaryError.not_proved(self.r.boundary, "the output has another structure")
        opaque = set()
        for i, (a, b) in enumerate(zip(expected, leaves, strict=True)):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                error = difference(a, b)
                if error > tolerance(a):
                    raise BoundaryError.not_proved(
                        self.r.boundary,
                        f"the output differs by {error:.3g}: something reaches the active part "
                        "without being passed to it (an attribute, a global, a mutated input)",
                    )
            elif not same_content(a, b):
                opaque.add(i)
        return frozenset(opaque)

    def trained_by(self, tensor: Tensor) -> str:
        """Name a trainable parameter that `tensor` was computed with."""
        names = {id(p): name for name, p in self.r.model.named_parameters()}
        pending, seen = [tensor.grad_fn], set()
        if id(tensor) in names:
            return names[id(tensor)]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in names:
                return names[id(variable)]
            pending.extend(following for following, _ in node.next_functions)
        return "?"


class _TryAgain(Exception):  # noqa: N818
    """A module that was worth a try gives no real output: skip it after all."""


class _ProbeRun(ReplayRun):
    """A replay that also looks at what the skipped modules are called with."""

    def __init__(self, proof: _Proof, recipe: Recipe) -> None:
        self._proof = proof
        values: dict[Slot, Tensor] = {}
        for slot in recipe.slots().values():
            value = tree_leaves(proof.run.outputs[slot[0]])[slot[1]]
            values[slot] = value.detach().clone()
        super().__init__(recipe, proof.r.size, values)

    def skipping(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        boundary = self.recipe.boundary
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Placeholder):
                for source in leaf.sources:
                    if source.kind == "trainable":
                        tensor = self.scene.trainable[source.index]
                        raise BoundaryError.trainable(boundary, self._proof.trained_by(tensor))
                    if source.kind == "leaf":
                        self.recipe.entered.add(source.index)
                    if source.kind == "argument":
                        self._proof._pin(self.recipe, source.index)
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                raise BoundaryError.trainable(boundary, self._proof.trained_by(leaf))

    def ran(self, index: int, output: Any) -> None:
        step = self.recipe.steps[index]
        if index in self._proof.tried and _leaked(output):
            step.run = False
            raise _TryAgain


def input_placeholder(leaf: Tensor, source: frozenset[Source], run: ReplayRun) -> Placeholder:
    """Stand for one of the model's inputs."""
    meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return Placeholder.like(meta, leaf.device, source, run.scene)


def _leaked(output: Any) -> list[Placeholder]:
    return placeholders([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])


def _recompose(size: int) -> list[int]:
    """Return other rows than 0..B-1: another number, in another order."""
    if size == 1:
        return [0, 0]
    return [1, 0, 1] if size == 2 else list(range(size - 1, 0, -1))


def _patchable(model: nn.Module) -> list[nn.Module]:
    """Every module but the model itself, and but what lies inside compiled ones."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if id(child) not in found and child is not model:
                found[id(child)] = child
                if not is_compiled(child):
                    visit(child)

    visit(model)
    return list(found.values())


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def _trainable(module: nn.Module) -> str | None:
    return next((name for name, p in module.named_parameters() if p.requires_grad), None)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def _inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
