"""The three ways through a model: all of it, the prefix alone, and from the cut on.

`CaptureRun` keeps what crosses the boundary, `ReplayRun` enters there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from egeria_cache.attempt import Attempt, is_ours
from egeria_cache.batch import Lengths
from egeria_cache.device import runs_late, synchronize
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import RandomState, Remembered
from egeria_cache.skip.model.calls import intercept
from egeria_cache.skip.serve.call import Invocation, plain
from egeria_cache.skip.serve.compare import difference, tolerance
from egeria_cache.skip.serve.cut import Slot, StepPlan, TensorSpec
from egeria_cache.skip.serve.placeholder import Placeholder, Scene, Source, Unavailable
from egeria_cache.skip.serve.plan import Recipe
from egeria_cache.skip.state.quiet import quietly


def wants_grad(step: int, leaves: Sequence[Any]) -> set[Slot]:
    """Return which leaves of a step's output autograd follows."""
    return {(step, j) for j, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}


class PrefixDone(BaseException):
    """Leaves the model once the boundary has returned; no `except Exception` may stop it."""


class CaptureRun:
    """Handler for a forward that computes the prefix: keeps the tensors of the cut.

    Args:
        recipe: What to keep.
        batch_size: Rows of this forward.
        stop: Leave the model by `PrefixDone` when the boundary has returned.
    """

    def __init__(self, recipe: Recipe, batch_size: int, *, stop: bool = False) -> None:
        self.recipe = recipe
        self.batch_size = batch_size
        self.stop = stop
        self.deviation: str | None = None
        self._taken: dict[Slot, Tensor] = {}
        self._rows: dict[str, Tensor] | None = None
        self._position = 0
        self._inside = False

    def __call__(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Handle one call of a module of the prefix."""
        steps = self.recipe.steps
        if self._inside or self._position >= len(steps) or self.deviation:
            return original(*args, **kwargs)
        step = steps[self._position]
        if step.module is not module:
            if self.recipe.surrounds(module):
                return original(*args, **kwargs)
            self._deviate(f"{self.recipe.names[id(module)]!r} ran where {step.name!r} was expected")
            return original(*args, **kwargs)
        self._inside = True
        try:
            output = original(*args, **kwargs)
        finally:
            self._inside = False
        with Attempt(lambda error: self._deviate(repr(error))):
            self._keep(step, output)
            if self._position == len(steps) - 1 and not self.deviation:
                self._rows = self._finish()
        self._position += 1
        if self._position == len(steps) and self.stop:
            raise PrefixDone
        return output

    def rows(self) -> dict[str, Tensor] | None:
        """Return the cut's tensors as rows; None if the model took another way this time."""
        return None if self.deviation else self._rows

    def _keep(self, step: StepPlan, output: Any) -> None:
        if step.single and isinstance(output, Tensor):  # as most modules do
            if not step.cached and isinstance(step.leaves[0], TensorSpec):
                return
            leaves = [output]
        else:
            leaves, spec = tree_flatten(output)
            if spec != step.spec:
                self._deviate(f"{step.name!r} returned another structure")
                return
        if step.cached:
            self.recipe.wants_grad |= wants_grad(self._position, leaves)
        for j, (leaf, known) in enumerate(zip(leaves, step.leaves, strict=True)):
            if j in step.cached:
                if isinstance(leaf, Placeholder) or not known.matches(leaf, self.batch_size):
                    self._deviate(f"{step.name!r} returned another shape")
                    return
                self._taken[self._position, j] = leaf
            elif isinstance(known, int | float | str | bool) and leaf != known:
                self._deviate(f"{step.name!r} returned {leaf!r} where it gave {known!r}")

    def _finish(self) -> dict[str, Tensor]:
        # Copies of the values as they stand when the boundary returns: in-place steps of the prefix
        # count; what the active part writes, perhaps through NumPy or `.data`, does not.
        rows = {}
        for name, slot in self.recipe.slots().items():
            tensor = self._taken[slot]
            with torch.inference_mode(False), torch.no_grad():
                view = self.recipe.tensor_spec(slot).to_rows(tensor)
                rows[name] = view.clone(memory_format=torch.contiguous_format)
        return rows

    def _deviate(self, how: str) -> None:
        self.deviation = self.deviation or how
        if self.stop:
            raise BoundaryError.another_way(self.recipe.boundary, how)


class LearnRun(CaptureRun):
    """A `CaptureRun` for a batch of lengths that the recipe does not know yet: it does afterwards.

    Args:
        recipe: What to keep.
        lengths: Of the batch.
        batch_size: Rows of this forward.
        stop: Leave the model by `PrefixDone` when the boundary has returned.
    """

    def __init__(
        self, recipe: Recipe, lengths: Lengths, batch_size: int, *, stop: bool = False
    ) -> None:
        super().__init__(recipe, batch_size, stop=stop)
        self._lengths = lengths
        self._outputs: list[list[Any]] = []

    def _keep(self, step: StepPlan, output: Any) -> None:
        leaves, spec = tree_flatten(output)
        if spec != step.spec:
            self._deviate(f"{step.name!r} returned another structure")
        self._outputs.append(leaves)

    def _finish(self) -> dict[str, Tensor]:
        recipe, whole = self.recipe, self._lengths.whole
        assert recipe.growth is not None
        odd = recipe.growth.learn(recipe.steps, whole, self.batch_size, self._outputs)
        here = None if odd is not None else recipe.at(self._lengths)
        if here is None:
            self._deviate(f"the shape of what {odd or recipe.boundary!r} returned follows no rule")
            return {}
        self.recipe, outputs = here, self._outputs
        for index, step in enumerate(here.steps):
            self._position = index
            super()._keep(step, tree_unflatten(outputs[index], step.spec))
        self._position = len(here.steps)
        return {} if self.deviation else super()._finish()


def capturing(
    recipe: Recipe, lengths: Lengths | None, batch_size: int, *, stop: bool = False
) -> CaptureRun:
    """Return the handler of a forward of `batch_size` rows, as long as a batch of these lengths."""
    here = recipe.at(lengths)
    if here is None:
        assert lengths is not None
        return LearnRun(recipe, lengths, batch_size, stop=stop)
    return CaptureRun(here, batch_size, stop=stop)


class ReplayRun:
    """Handler for a forward that enters at the cut: skipped modules return what is stored."""

    looks = False
    """Whether it looks at what skipped modules are called with."""

    def __init__(
        self,
        recipe: Recipe,
        batch_size: int,
        values: Mapping[Slot, Tensor],
        *,
        proven: bool = False,
        scene: Scene | None = None,
    ) -> None:
        self.recipe = recipe
        self.batch_size = batch_size
        self.values = values
        self.scene = scene or (recipe.stage() if proven else recipe.scene())
        self._output = recipe.hit_output if proven else recipe.output
        self._ready: Mapping[tuple[int, int], Any] = recipe.ready if proven else {}
        self._position = 0
        self._inside = False

    def __call__(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Handle one call of a module of the prefix."""
        if self._inside or self.scene.after_boundary:
            return original(*args, **kwargs)
        steps, index = self.recipe.steps, self._position
        step = steps[index]
        if step.module is not module:
            if self.recipe.surrounds(module):
                return original(*args, **kwargs)
            how = f"{self.recipe.names[id(module)]!r} ran where {step.name!r} was expected"
            raise BoundaryError.another_way(self.recipe.boundary, how)
        if step.run:
            self.running(index, args, kwargs)
            self._inside = True
            try:
                output = original(*args, **kwargs)
            finally:
                self._inside = False
            self.ran(index, output)
        else:
            if self.looks:
                self.skipping(index, args, kwargs)
            for draw in step.draws:
                draw.again()
            output = self._ready.get((index, self.batch_size))
            if output is None:
                output = self._output(index, self.batch_size, self.scene, self.values)
        self._position += 1
        self.scene.after_boundary = self._position == len(steps)
        return output

    def running(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what a module that is not skipped is called with; a rehearsal does."""

    def skipping(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what a skipped module is called with; a rehearsal does."""

    def ran(self, index: int, output: Any) -> None:
        """Look at what a module that is not skipped returned; a rehearsal does."""


Forward = Callable[..., Any]
Rows = dict[str, Tensor]


def full(forward: Forward, recipe: Recipe, call: Invocation) -> tuple[Any, CaptureRun]:
    """Compute every row; what crosses the boundary is captured on the way."""
    capture = capturing(recipe, call.batch.lengths, call.batch.size)
    args, kwargs = call.plain()
    with intercept(recipe.modules, capture):
        return forward(*args, **kwargs), capture


def alike(rows: Rows, proved: Rows | None) -> bool:
    """Whether the model gave what its copies did when the cut was proved."""
    return proved is None or all(
        difference(known, rows[name]) <= tolerance(known) for name, known in proved.items()
    )


def timed(forward: Forward, module: nn.Module, call: Invocation) -> tuple[Any, float, float]:
    """Compute every row as without a cache; return how long it took until `module` returned, and
    in all: the device's time, or on the host this thread's own, which no other process changes.
    """
    is_late = any(runs_late(p.device) for p in module.parameters())

    def now() -> float:
        synchronize()
        return time.perf_counter() if is_late else time.thread_time()

    def note(module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        returned.append(now())
        return output

    args, kwargs = call.plain()
    returned = [now()]
    with intercept([module], note):
        output = forward(*args, **kwargs)
    return output, returned[-1] - returned[0], now() - returned[0]


def prefix(
    forward: Forward,
    source: Recipe,
    call: Invocation,
    rows: np.ndarray,
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Rows:
    """Run the prefix on the masked rows alone, and leave the model where the boundary returns.

    `inputs` are the arguments for these rows; by default the rows that the batch's entry misses.

    Raises:
        BoundaryError: The model took another way this time.
    """
    capture = capturing(source, call.batch.lengths, int(rows.sum()), stop=True)
    args, kwargs = inputs or call.rows(rows)
    generators = RandomState.now() if source.draws else None
    # The code around the boundary will run again, in the replay: let it count once.
    outside = source.surroundings.but_modules() if source.surroundings is not None else None
    if outside is not None:
        outside.restore(for_a_copy=True)
    state = Remembered(slots=[(module.__dict__, key) for module, key in source.moving])
    state.restore(for_a_copy=True)
    try:
        with intercept(source.modules, capture):
            quietly(forward, *args, **kwargs)
    except PrefixDone:
        pass
    finally:
        state.restore()
        if outside is not None:
            outside.restore()
    if generators is not None:
        generators.restore()  # the replay draws what the whole forward would
    fresh = capture.rows()
    if fresh is None:
        raise BoundaryError.never_called(source.boundary)
    return fresh


def replay(
    forward: Forward,
    source: Recipe,
    recipe: Recipe | None,
    call: Invocation,
    stored: Mapping[str, Tensor],
) -> tuple[Any, Rows | None]:
    """Enter at `source`'s cut; if the boundary has moved on, capture `recipe`'s on the way.

    Both are those for batches of these lengths; None if such a batch has to be seen first.

    Returns:
        The model's output, and the rows of `recipe` if it is another one than `source`.

    Raises:
        BoundaryError: Something skipped was needed after all. What the replay did is undone, as it
            is where any other error is ours; the model's own are the loop's.
    """
    size = call.batch.size
    values = {
        slot: spec.from_rows(stored[name].clone() if source.copies else stored[name])
        for name, slot, spec in source.entries()
    }
    if source.wants_grad and torch.is_grad_enabled():
        for slot in source.wants_grad & values.keys():
            leaf = values[slot].detach().requires_grad_()
            # What the model writes into may not be a leaf.
            values[slot] = leaf.clone() if source.copies else leaf
    run = ReplayRun(source, size, values, proven=True)
    capture = CaptureRun(recipe, size) if recipe is not None and recipe is not source else None
    args, kwargs = call.noted(call.rebuild(lambda i, leaf: _input(source, run, i, leaf)))
    undo = _Undo(source)
    try:
        with intercept(*_handler(source, run, capture)):
            output = forward(*args, **kwargs)
    except Exception as error:
        if is_ours(error):
            undo.restore()
        raise
    finally:
        run.scene.finished = True
    if source.opaque_outputs:
        output = _hide(call, output, source.opaque_outputs)
    return output, capture.rows() if capture is not None else None


class _Undo:
    """Takes back what an abandoned replay did: random draws, and writes to active buffers."""

    def __init__(self, recipe: Recipe) -> None:
        self._rng = torch.get_rng_state()
        self._recipe = recipe
        recipe.save_buffers()

    def restore(self) -> None:
        torch.set_rng_state(self._rng)
        self._recipe.put_back_buffers()


def _input(source: Recipe, replay: ReplayRun, position: int, leaf: Tensor) -> Tensor:
    if position in source.kept or position not in source.leaf_names:
        result: Tensor = plain(leaf)
        return result
    return source.input_placeholder(position, leaf, replay.scene)


def _handler(
    source: Recipe, replay: ReplayRun, capture: CaptureRun | None
) -> tuple[list[nn.Module], Callable[..., Any]]:
    """Route calls to the replay, and around it to the capture of a later boundary."""
    if capture is None:
        return source.taken_over(), replay
    recipe = capture.recipe
    old, new = set(map(id, source.modules)), set(map(id, recipe.modules))

    def handle(module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        if id(module) in old:
            original = functools.partial(replay, module, original)
        if id(module) in new:
            return capture(module, original, *args, **kwargs)
        return original(*args, **kwargs)

    both = {id(m): m for m in (*source.modules, *recipe.modules)}
    return list(both.values()), handle


def _hide(call: Invocation, output: Any, opaque: frozenset[int]) -> Any:
    leaves, layout = call.result(output)
    hidden = Unavailable(frozenset({Source("step", "a skipped module")}))
    leaves = [hidden if i in opaque else leaf for i, leaf in enumerate(leaves)]
    return call.put(output, leaves, layout)
