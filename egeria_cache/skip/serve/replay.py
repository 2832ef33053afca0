"""The three ways through a model: all of it, the prefix alone, and from the cut on.

`CaptureRun` keeps what crosses the boundary, `ReplayRun` enters there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from egeria_cache.attempt import Attempt, is_ours
from egeria_cache.device import runs_late, synchronize
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import RandomState
from egeria_cache.skip.model.calls import Recorder, intercept, when_returned
from egeria_cache.skip.serve import placeholder
from egeria_cache.skip.serve.call import Arguments, Invocation, autocast_modes, plain
from egeria_cache.skip.serve.cut import Slot, StepPlan, TensorSpec
from egeria_cache.skip.serve.placeholder import Escape, LeftOut, Placeholder, Scene, Source
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.state.quiet import quietly

Forward = Callable[..., Any]
Rows = dict[str, Tensor]


class PrefixDone(BaseException):
    """Leaves the model once the boundary has returned; no `except Exception` may stop it."""


class PrefixRun:
    """Handler for a forward that goes through the prefix step by step.

    What runs within a step is the step's own, and what another thread runs is let be.

    Args:
        steps: The calls that it consists of, in order; each knows its module.
        around: The modules whose own code makes these calls.
        stop: Leave the model by `PrefixDone` when the boundary has returned.
    """

    def __init__(self, steps: Sequence[Any], around: Iterable[nn.Module], *, stop: bool) -> None:
        self.steps, self.stop, self._around = steps, stop, frozenset(map(id, around))
        self.position, self._inside, self._thread = 0, False, get_ident()

    def __call__(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        """Handle one call of a module of the prefix."""
        is_over = self.position >= len(self.steps)
        if self._inside or is_over or get_ident() != self._thread:
            return original(*args, **kwargs)
        step = self.steps[self.position]
        if step.module is not module:
            if id(module) not in self._around:
                self.goes_astray(module, step)
            return original(*args, **kwargs)
        self._inside = True
        try:
            output = self.takes(step, original, args, kwargs)
        finally:
            self._inside = False
        self.position += 1
        if self.position == len(self.steps):
            self.returned(module)
        return output

    def takes(
        self, step: Any, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of a step."""
        self.begins(args, kwargs)
        output = original(*args, **kwargs)
        self.ends(step, output)
        return output

    def returned(self, module: nn.Module) -> None:
        """The boundary has returned."""
        if self.stop:
            raise PrefixDone

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step is called with this."""

    def ends(self, step: Any, output: Any) -> None:
        """A step has returned this."""

    def goes_astray(self, module: nn.Module, step: Any) -> None:
        """Another module is called in the place of a step."""


class CaptureRun(PrefixRun):
    """Keeps the tensors of the cut.

    Args:
        plan: What to keep, as it is for batches of these lengths.
        batch_size: Rows of this forward.
        stop: Leave the model by `PrefixDone` when the boundary has returned.
    """

    deviation: str | None = None
    """What was not as it is known, if anything."""
    rows: Rows | None = None
    """The cut's tensors as rows; None if the model took another way this time."""

    def __init__(self, plan: ReplayPlan, batch_size: int, *, stop: bool = False) -> None:
        super().__init__(plan.steps, plan.ancestors, stop=stop)
        self.plan = plan
        self.batch_size = batch_size
        self._taken: dict[Slot, Tensor] = {}

    def goes_astray(self, module: nn.Module, step: StepPlan) -> None:
        """Capture nothing."""
        self._deviate(self.plan.unexpected(module, step))

    def ends(self, step: StepPlan, output: Any) -> None:
        """Keep what crosses."""
        with Attempt(lambda error: self._deviate(repr(error))):
            self._keep(step, output)
            if self.position == len(self.steps) - 1 and not self.deviation:
                # Copies of the values as they stand when the boundary returns: in-place steps of
                # the prefix count; what the active part writes, perhaps by NumPy, does not.
                self.rows = self.plan.rows(self._taken.__getitem__)
                if not self.stop:
                    when_returned(step.module, self.plan.returned)

    def _keep(self, step: StepPlan, output: Any) -> None:
        is_one = step.single and isinstance(output, Tensor)
        leaves, spec = ([output], step.spec) if is_one else tree_flatten(output)
        if spec != step.spec:
            self._deviate(f"{step.name!r} returned another structure")
            return
        for j, (leaf, known) in enumerate(zip(leaves, step.leaves, strict=True)):
            if j in step.cached:
                if isinstance(leaf, Placeholder) or not known.matches(leaf, self.batch_size):
                    self._deviate(f"{step.name!r} returned another shape")
                    return
                self._taken[self.position, j] = leaf
                if leaf.requires_grad:
                    self.plan.wants_grad.add((self.position, j))
            elif isinstance(known, int | float | str | bool) and leaf != known:
                self._deviate(f"{step.name!r} returned {leaf!r} where it gave {known!r}")

    def _deviate(self, how: str) -> None:
        self.deviation, self.rows, self.position = self.deviation or how, None, len(self.steps)
        if self.stop:
            raise BoundaryError.another_way(self.plan.boundary, how)


_MAX_SIZES = 16
"""Sizes of batches that a plan has a replay ready for."""


class ReplayRun(PrefixRun):
    """Enters at the cut: skipped modules return what is stored.

    Made once for all hits of one batch size. Nothing is left of a run but its placeholders, which
    have no content; making them anew cost more than calling the skipped modules.
    """

    looks = False
    """Whether it looks at what modules are called with."""

    def __init__(self, plan: ReplayPlan, batch_size: int, scene: Scene | None = None) -> None:
        super().__init__(plan.steps, plan.ancestors, stop=False)
        self.plan = plan
        self.batch_size = batch_size
        self.scene = scene or Scene(plan.names, self._around, is_hit=True, written=plan.written)
        self.modules = plan.modules
        self.cached = list[tuple[str, Slot, TensorSpec, tuple[int, ...] | None]]()
        for name, slot in plan.slots().items():
            spec = plan.tensor_spec(slot)
            self.cached.append((name, slot, spec, spec.strides_of_rows(batch_size)))
        # A dry run looks who keeps them.
        kept = [] if self.looks else [i for i, step in enumerate(plan.steps) if not step.run]
        self._leaves = {index: self._stand_ins(index) for index in kept}
        self._inputs: dict[tuple[Any, ...], Placeholder] = {}
        made = (one for leaves, _ in self._leaves.values() for one in leaves)
        self.own = [one for one in made if isinstance(one, Placeholder | placeholder.Unavailable)]
        """All that it has made."""

    def begin(self, values: Mapping[Slot, Tensor]) -> None:
        """Enter with these values of the cached tensors."""
        self.values = values
        self.position, self._inside, self._thread = 0, False, get_ident()
        scene = self.scene
        scene.after_boundary = scene.finished = False
        for of_the_last in (scene.made, scene.left_out, scene.read, scene.stored):
            of_the_last.clear()

    def goes_astray(self, module: nn.Module, step: StepPlan) -> None:
        """Compute what was left out."""
        how = self.plan.unexpected(module, step)
        another = BoundaryError.another_way(self.plan.boundary, how)
        if not self.scene.settle(another):
            raise another

    def returned(self, module: nn.Module) -> None:
        """What runs from now on is active."""
        self.scene.after_boundary, guard = True, self.plan.guard
        if guard is not None and guard.has_hooks:
            when_returned(module, self.plan.returned)

    def takes(
        self, step: StepPlan, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what stands for its output: stored values and constants, or placeholders."""
        plan, scene, index = self.plan, self.scene, self.position
        if self.looks:
            self.begins(args, kwargs)
        if step.run or scene.why is not None:
            return original(*args, **kwargs)
        stand_ins, gives = self._leaves.get(index) or self._stand_ins(index)
        cast = autocast_modes() if torch._C._is_any_autocast_enabled() else ()
        modes = torch.is_grad_enabled(), cast
        is_one = not kwargs and len(args) == 1 and type(args[0]) is Placeholder
        given = ((args[0].mark,), {}) if is_one else scene.marked((args, kwargs))
        scene.left_out.append(LeftOut(original, given, gives, modes))
        if not (step.cached or step.constants or plan.same):
            return stand_ins[0] if step.single else tree_unflatten(stand_ins, step.spec)
        leaves = list(stand_ins)
        for j in range(len(leaves)):
            slot = plan.same.get((index, j), (index, j))
            if slot in self.values:
                leaves[j] = self.values[slot]
            elif scene.is_hit and slot in plan.own:
                leaves[j] = plan.own[slot]
            elif j in step.constants:
                leaves[j] = step.constants[j].clone() if plan.copies else step.constants[j]
            if j in step.cached:
                scene.stored.append((stand_ins[j].mark, leaves[j]))
        return leaves[0] if step.single else tree_unflatten(leaves, step.spec)

    def input(self, position: int, leaf: Tensor) -> Tensor:
        """Return what the model is given for one of its inputs: a placeholder if that will do."""
        plan = self.plan
        if position in plan.kept or position not in plan.leaf_names:
            result: Tensor = plain(leaf)
            return result
        with torch._C.DisableTorchFunctionSubclass():
            key = (position, leaf.shape, leaf.stride())
        if key not in self._inputs:
            source = frozenset({Source("leaf", plan.leaf_names[position][0], position)})
            self._inputs[key] = Placeholder.of(leaf, source, self.scene)
            self.own.append(self._inputs[key])
        one = self._inputs[key]
        # Not looked into: what a loader's tensor reads is no part of the run.
        self.scene.left_out.append(LeftOut(plain, ((leaf,), {}), [one.mark], (False, ())))
        return one

    def values_of(self, stored: Rows) -> dict[Slot, Tensor]:
        """Return the cached tensors as the model is given them."""
        values, copies = dict[Slot, Tensor](), self.plan.copies
        for name, slot, spec, strides in self.cached:
            rows = stored[name].clone() if copies else stored[name]
            values[slot] = rows if rows.stride() == strides else spec.from_rows(rows)
        for slot in self.plan.wants_grad & values.keys() if torch.is_grad_enabled() else ():
            leaf = values[slot].detach().requires_grad_()
            # What the model writes into may not be a leaf.
            values[slot] = leaf.clone() if copies else leaf
        return values

    def _stand_ins(self, index: int) -> tuple[list[Any], list[Any]]:
        """Return what stands for the leaves of a step's output where nothing was stored, and the
        marks of that.
        """
        step, leaves = self.plan.steps[index], list[Any]()
        for j, leaf in enumerate(step.leaves):
            if isinstance(leaf, TensorSpec):
                sources = frozenset({Source("step", step.name, index, j)})
                meta = leaf.empty(self.batch_size, torch.device("meta"))
                leaves.append(Placeholder.like(meta, leaf.device, sources, self.scene))
            elif isinstance(leaf, type):
                sources = frozenset({Source("step", step.name, index, j, made=leaf.__name__)})
                leaves.append(leaf(sources, self.scene))
            else:
                leaves.append(leaf)
        return leaves, self.scene.marks(leaves)


def full(forward: Forward, plan: ReplayPlan, call: Invocation) -> tuple[Any, CaptureRun]:
    """Compute every row; what crosses the boundary is captured on the way."""
    capture = CaptureRun(plan, call.batch.size)
    args, kwargs = call.plain()
    with intercept(plan.modules, capture):
        return forward(*args, **kwargs), capture


def timed(forward: Forward, module: nn.Module, call: Invocation) -> tuple[Any, float, float]:
    """Compute every row as without a cache; return how long it took until `module` returned, and
    in all: the device's time, or on the host this thread's own, which no other process changes.
    """
    is_late = any(runs_late(p.device) for p in module.parameters())

    def now() -> float:
        synchronize()
        return time.perf_counter() if is_late else time.thread_time()

    args, kwargs = call.plain()
    returned = [now()]
    with intercept([module], Recorder(returned=lambda *_: returned.append(now()))):
        output = forward(*args, **kwargs)
    return output, returned[-1] - returned[0], now() - returned[0]


def prefix(forward: Forward, source: ReplayPlan, inputs: Arguments, num_rows: int) -> Rows:
    """Run the prefix on so many rows alone, and leave the model where the boundary returns.

    `inputs` are the arguments for these rows.

    Raises:
        BoundaryError: The model took another way this time.
    """
    capture = CaptureRun(source, num_rows, stop=True)
    generators = RandomState.now() if source.draws else None
    # The code around the boundary will run again, in the replay: let it count once.
    state = source.surroundings.but_modules(source.moving)
    state.put_back(copies=True)
    try:
        with suppress(PrefixDone), intercept(source.modules, capture):
            quietly(forward, *inputs[0], **inputs[1])
    finally:
        state.put_back()
    if generators is not None:
        generators.restore()  # the replay draws what the whole forward would
    if capture.rows is None:
        raise BoundaryError.never_called(source.boundary)
    source.returned()
    return capture.rows


def replay(
    forward: Forward,
    source: ReplayPlan,
    plan: ReplayPlan | None,
    call: Invocation,
    stored: Rows,
) -> tuple[Any, Rows | None]:
    """Enter at `source`'s cut; if the boundary has moved on, capture `plan`'s on the way.

    Both are those for batches of these lengths; None if such a batch has to be seen first.

    Returns:
        The model's output, and the rows of `plan` if it is another one than `source`.

    Raises:
        BoundaryError: Something skipped was needed after all, and cannot be had any more. The
            model's own errors are the loop's.
    """
    size = call.batch.size
    run = source.replays.get(size)
    if run is None:
        if len(source.replays) >= _MAX_SIZES:
            source.replays.clear()
        run = source.replays[size] = ReplayRun(source, size)
    source.escaped = None
    run.begin(run.values_of(stored))
    args, kwargs = call.rebuild(run.input)
    if not call.layout.is_flat:
        call.noted((args, kwargs))
    generators, held = torch.get_rng_state(), list(map(sys.getrefcount, run.own))
    capture = CaptureRun(plan, size) if plan is not None and plan is not source else None
    # Around the replay of the same modules.
    captured = intercept(capture.plan.modules, capture) if capture else nullcontext()
    try:
        with intercept(run.modules, run, knows_thread=True), captured:
            output = forward(*args, **kwargs)
        if source.opaque_outputs and run.scene.why is None:
            output = _hide(call, output, source.opaque_outputs)
        # Somebody may hold a placeholder that nobody held before.
        is_suspect = list(map(sys.getrefcount, run.own)) != held
        for made in run.scene.made:
            is_suspect |= made() is not None
        if run.scene.why is None and is_suspect and (kept := run.scene.kept(run.own, held)):
            what = "what the call leaves (its output, its backward, an attribute)"
            if not run.scene.settle(escape := Escape.at(kept, what)):
                raise escape
    except Exception as error:
        if is_ours(error):
            torch.set_rng_state(generators)
        raise
    finally:
        run.begin({})
        run.scene.finished = True
        if run.scene.why is not None:
            source.escaped = run.scene.why
            source.replays.clear()  # its placeholders stay what they are now
            run.scene.let_go()
    if run.scene.why is not None:
        return tree_map_only((Placeholder, placeholder.Unavailable), _followed, output), None
    return output, capture.rows if capture is not None else None


def _followed(one: Any) -> Any:
    """Return the object, or the numbers of a placeholder, as autograd knows them."""
    if not isinstance(one, Placeholder):
        return one._object("the model's output")
    return one.clone() if one.requires_grad else one.number_of()


def _hide(call: Invocation, output: Any, opaque: frozenset[int]) -> Any:
    leaves, layout = call.result(output)
    skipped = frozenset({Source("step", "a skipped module")})
    for i in opaque:
        leaves[i] = placeholder.Unavailable.like(leaves[i].__class__)(skipped)
    return call.put(output, leaves, layout)
