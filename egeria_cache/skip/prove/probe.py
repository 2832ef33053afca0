"""Find what crosses the boundary: replay on placeholders until nothing escapes.

Each escape names its sources, and the next probe is given what was missing: an input leaf is kept,
the output of a module is cached with the cut, or kept as a constant if it does not depend on the
samples (rotary embeddings).

Memory that is shared stays shared: tensors that cross the cut, and are one in a plain run.

A module may return what it was given, a view of it, or one tensor twice. If what follows reads
both, it may write to one some day, and see that in the other. Two stored tensors would not show it.
So one is stored for both, and what shares memory in another way is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from egeria_cache.attempt import Attempt
from egeria_cache.batch import geometry, overlap
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.prove.model_copy import ModelCopy
from egeria_cache.skip.prove.traced_batch import Recomputed, TracedBatch
from egeria_cache.skip.serve.call import plain
from egeria_cache.skip.serve.compare import same_content
from egeria_cache.skip.serve.cut import Slot, TensorSpec
from egeria_cache.skip.serve.placeholder import (
    Escape,
    Placeholder,
    Scene,
    Source,
    mark_of,
    placeholders,
)
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.serve.replay import ReplayRun
from egeria_cache.skip.serve.trace import bytes_of
from egeria_cache.skip.state.hooks import has_user_hooks, has_user_hooks_inside
from egeria_cache.skip.state.quiet import quietly_in


def share(plan: ReplayPlan, plain: Recomputed, given: Collection[Slot]) -> bool:
    """Let what shares memory in a plain run of the prefix share it in a replay.

    Args:
        plan: What crosses the cut so far.
        plain: The prefix, with what its modules were given.
        given: Which tensors skipped modules are really given in a replay: step, leaf.

    Returns:
        Whether the plan was changed.

    Raises:
        BoundaryError: Memory is shared in a way that a replay cannot repeat.
    """
    stored = list(plan.slots().values())
    for number, (step, leaf) in enumerate(stored):
        own, name = plain.leaves[step][leaf], plan.steps[step].name
        if 0 not in own.stride() and own.nbytes > len(bytes_of(own)):  # with itself
            raise BoundaryError.shares_memory(plan.boundary, name, name)
        for other in stored[:number]:
            theirs = plain.leaves[other[0]][other[1]]
            if not overlap(own, theirs):
                continue
            if geometry(own) != geometry(theirs):
                raise BoundaryError.shares_memory(plan.boundary, name, plan.steps[other[0]].name)
            plan.steps[step].cached.discard(leaf)
            plan.same[step, leaf] = other
            return True
        for at, position in given:
            if at <= step and overlap(own, plain.given[at][position]):
                raise BoundaryError.shares_memory(plan.boundary, name, plan.steps[at].name)
    return False


_MAX_PROBES = 200


class Prober:
    """Completes a plan.

    Args:
        traced: The plain run.
        plain: The prefix, with what its modules are given.
        plan: A draft; what crosses is written into it.
    """

    def __init__(self, traced: TracedBatch, plain: Recomputed, plan: ReplayPlan) -> None:
        self.traced = traced
        self.plain = plain
        self.plan = plan
        self._real_arguments: set[int] = set()
        self._paths = traced.call.layout.paths()

    def run(self) -> None:
        """Probe.

        Raises:
            BoundaryError: Something crosses that cannot be cached, or is trained.
        """
        for i, step in enumerate(self.plan.steps):
            for j in range(len(step.leaves)) if has_user_hooks(step.module) else ():
                self._give(Source("step", step.name, i, j))
        for _ in range(_MAX_PROBES):
            copied = self.traced.copies.fresh()
            run = _ProbeRun(self, copied)
            self.traced.before.restore(for_a_copy=True)
            try:
                left = self._probe(run, copied)
                # The copied is still there, and so is what its hooks and attributes hold.
                kept = run.scene.kept()
                del left  # and what backward would read
                if kept:
                    raise Escape.at(kept, "what the forward leaves (an output, a hook, a global)")
                if not share(self.plan, self.plain, run.given) and self._can_wait(run, copied):
                    return
            except Escape as escape:
                if not self._resolve(escape, run):
                    raise BoundaryError(str(escape)) from escape
        raise BoundaryError.not_proved(self.plan.boundary, "too much crosses the boundary")

    def _probe(self, run: _ProbeRun, copied: ModelCopy) -> list[Any]:
        args, kwargs = self.inputs(run, copied)
        with copied.intercept(self.plan.modules, run):
            leaves, _ = copied.call.result(copied.forward(*args, **kwargs))
        copied.call.lent.clear()  # they hold placeholders, as they were given
        run.scene.finished = True
        escaped = {source for p in placeholders(leaves) for source in p.sources}
        if escaped:
            raise Escape.at(escaped, "the model's output")
        return leaves

    def _can_wait(self, run: _ProbeRun, copied: ModelCopy) -> bool:
        """Whether what is left out comes out the same when it is computed late, as the head may
        want it some day. What does not is stored: code around a module may set it for one call.
        """
        scene, plan = run.scene, self.plan
        if written := scene.written_since():
            plan.written |= written
            return False
        scene.is_hit, scene.finished = True, False
        with Attempt():
            if not quietly_in(copied.context, scene.settle, Escape.at((), "what comes late")):
                return True
        scene.finished = True
        return not sum(
            self._give(Source("step", "", index, j))
            for index, marks in run.marks.items()
            for j, mark in enumerate(marks)
            if not same_content(self.traced.leaf(index, j), scene.values.get(mark))
        )

    def inputs(self, run: ReplayRun, copied: ModelCopy) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with placeholders where a hit has no data."""

        def swap(position: int, leaf: Any) -> Any:
            if position in self.plan.kept or position in self._real_arguments:
                return leaf
            kind = "leaf" if position in self.traced.call.tagged else "argument"
            source = frozenset({Source(kind, self._paths[position], position)})
            instead = Placeholder.of(leaf, source, run.scene)
            run.scene.left_out.append((plain, ((leaf,), {}), [instead.mark], (False, ())))
            return instead

        return copied.call.noted(copied.call.rebuild(swap))

    def pin(self, position: int) -> None:
        """Note an argument that the prefix reads and that no loader vouches for."""
        self.plan.pinned[position] = self.traced.copies.leaves[position].detach().clone()

    def _resolve(self, escape: Escape, run: ReplayRun) -> bool:
        """Give the next probe what was missing; False if there is nothing to give."""
        progress = False
        early = not run.scene.after_boundary
        for source in escape.sources:
            if source.kind == "leaf" and source.index not in self.plan.kept:
                self.plan.kept.add(source.index)
                if early:
                    self.plan.entered.add(source.index)
                progress = True
            elif source.kind == "argument" and source.index not in self._real_arguments:
                self._real_arguments.add(source.index)
                if early:
                    self.pin(source.index)
                progress = True
            elif source.kind == "step" and source.index >= 0:
                progress |= self._give(source)
        return progress

    def _give(self, source: Source) -> bool:
        """Store a step's output, or keep that as a constant."""
        step = self.plan.steps[source.index]
        spec = step.leaves[source.leaf]
        if step.run or not isinstance(spec, TensorSpec):
            return False
        known = step.cached | step.constants.keys()
        if source.leaf in known or (source.index, source.leaf) in self.plan.same:
            return False
        if spec.batch_dim is not None:
            step.cached.add(source.leaf)
            return True
        # That it is always the same is looked at in the end: `check_constants`.
        step.constants[source.leaf] = self.traced.leaf(source.index, source.leaf)
        return True


class _ProbeRun(ReplayRun):
    """A replay that also looks at what the skipped modules are called with."""

    looks = True

    def __init__(self, prober: Prober, copied: ModelCopy) -> None:
        self._prober = prober
        plan, traced = prober.plan, prober.traced
        values: dict[Slot, Tensor] = {
            slot: traced.leaf(*slot).clone() for slot in plan.slots().values()
        }
        super().__init__(plan, traced.size, scene_of(plan, copied))
        self.begin(values)
        self.given: list[Slot] = []
        """The real tensors that skipped modules are given: step, leaf."""
        self.marks: dict[int, list[Any]] = {}
        """Of what stands for the leaves of each step's output."""

    def _stand_ins(self, index: int) -> list[Any]:
        leaves = super()._stand_ins(index)
        self.marks[index] = list(map(mark_of, leaves))
        return leaves

    def looking(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self.plan.steps[index]
        if step.run:
            given = placeholders((args, kwargs))
            if given and has_user_hooks_inside(step.module):  # somebody reads what goes on inside
                raise Escape.at((source for p in given for source in p.sources), step.name)
            return
        for position, leaf in enumerate(tree_leaves((args, kwargs))):
            if isinstance(leaf, Placeholder):
                for key, tensor in self.scene.trainable.items():  # as they were met
                    if Source("trainable", "", key) in leaf.sources:
                        self._refuse_trained(tensor)
                for source in leaf.sources:
                    if source.kind == "leaf":
                        self.plan.entered.add(source.index)
                    elif source.kind == "argument":
                        self._prober.pin(source.index)
            elif isinstance(leaf, Tensor):
                self.given.append((index, position))
                if leaf.requires_grad:
                    self._refuse_trained(leaf)

    def _refuse_trained(self, tensor: Tensor) -> None:
        parameter = self._prober.traced.trained_by(tensor)
        if parameter is not None:
            raise BoundaryError.trainable(self.plan.boundary, parameter)


def scene_of(plan: ReplayPlan, copied: ModelCopy) -> Scene:
    """Begin a run of a copy on placeholders, which meet its modules as well as the model's."""
    names, around = copied.names(plan.names), copied.ids(plan.ancestors)
    return Scene(names, around, written=plan.written)
