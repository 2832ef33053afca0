"""What a hit needs, and what the prefix makes use of.

*What crosses the boundary* is found by replays on placeholders, until nothing escapes. Each escape
names its sources, and the next probe is given what was missing: an input leaf is kept, the output
of a module is cached with the cut, or kept as a constant if it does not depend on the samples
(rotary embeddings).

Memory that is shared stays shared: tensors that cross the cut, and are one in a plain run. A module
may return what it was given, a view of it, or one tensor twice. If what follows reads both, it may
write to one some day, and see that in the other. Two stored tensors would not show it. So one is
stored for both, and what shares memory in another way is refused.

*What it makes use of*: tensors, attributes of the modules around it, arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from egeria_cache.attempt import Attempt
from egeria_cache.batch import geometry, overlap
from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import is_compiled, is_library, own_dict, unreadable
from egeria_cache.skip.model.calls import ForwardSlot
from egeria_cache.skip.model.fsdp import is_sharded
from egeria_cache.skip.prove.model_copy import ModelCopy
from egeria_cache.skip.prove.purity import check_constants, same_parts
from egeria_cache.skip.prove.traced_batch import Recomputed, TracedBatch, another
from egeria_cache.skip.serve.compare import same_content
from egeria_cache.skip.serve.cut import Slot, TensorSpec
from egeria_cache.skip.serve.placeholder import Escape, Placeholder, Source, placeholders
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.serve.replay import ReplayRun
from egeria_cache.skip.serve.trace import PrefixTrace, bytes_of
from egeria_cache.skip.state import watch
from egeria_cache.skip.state.quiet import quietly_here


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
        self.traced, self.plain, self.plan = traced, plain, plan

    def run(self) -> None:
        """Probe.

        Raises:
            BoundaryError: Something crosses that cannot be cached, or is trained.
        """
        call = self.traced.call
        self.plan.leaf_names = {i: (path, "") for i, path in enumerate(call.layout.paths())}
        for i, step in enumerate(self.plan.steps):
            for j in range(len(step.leaves)) if watch.has_user_hooks(step.module) else ():
                self._give(Source("step", step.name, i, j))
        for _ in range(_MAX_PROBES):
            copied = self.traced.copies.fresh()
            run = _ProbeRun(self, copied)
            try:
                left, layout = self.traced.run(copied, run, run.input)
                copied.call.lent.clear()  # they hold placeholders, as they were given
                run.scene.finished = True
                if layout != self.traced.result[1] and self._run_hooked(copied):
                    continue
                if escaped := {source for p in placeholders(left) for source in p.sources}:
                    raise Escape.at(escaped, "the model's output")
                # The copied is still there, and so is what its hooks and attributes hold.
                kept = run.scene.kept()
                del left  # and what backward would read
                if kept:
                    raise Escape.at(kept, "what the forward leaves (an output, a hook, a global)")
                if not share(self.plan, self.plain, run.given) and self._can_wait(run, copied):
                    self.plan.kept &= call.tagged.keys()  # other arguments are always there
                    return
            except Escape as escape:
                if not self._resolve(escape, run):
                    raise BoundaryError(str(escape)) from escape
        raise BoundaryError.not_proved(self.plan.boundary, "too much crosses the boundary")

    def _run_hooked(self, copied: ModelCopy) -> bool:
        """Skip no module with hooks inside, a library's too, that the output shows to be missed (of
        attentions, say); whether there is any.
        """
        progress = False
        for step in self.plan.steps:
            if not step.run and watch.has_hooks_inside(copied.of(step.module), watch.own_hooks):
                step.run, step.cached, step.constants, progress = True, set(), {}, True
        return progress

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
            if not copied.context.run(quietly_here, scene.settle, Escape.at((), "what comes late")):
                return True
        scene.finished = True
        return not sum(
            self._give(Source("step", "", index, j))
            for index, marks in run.marks.items()
            for j, mark in enumerate(marks)
            if mark in scene.values
            and not same_content(self.traced.leaf(index, j), scene.values[mark])
        )

    def enter(self, source: Source) -> None:
        """The prefix reads an input: one that no loader vouches for is to be what it was."""
        if source.kind == "leaf" and source.index in self.traced.call.tagged:
            self.plan.entered.add(source.index)
        elif source.kind == "leaf":
            value = self.traced.copies.leaves[source.index]
            self.plan.pinned[source.index] = value.detach().clone()

    def _resolve(self, escape: Escape, run: ReplayRun) -> bool:
        """Give the next probe what was missing; False if there is nothing to give."""
        progress = False
        for source in escape.sources:
            if source.kind == "step" and source.index >= 0:
                progress |= self._give(source)
            elif source.kind == "leaf" and source.index not in self.plan.kept:
                self.plan.kept.add(source.index)
                if not run.scene.after_boundary:
                    self.enter(source)
                progress = True
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
        values = {slot: traced.leaf(*slot).clone() for slot in plan.slots().values()}
        super().__init__(plan, traced.size, copied.scene(plan))
        self.begin(values)
        self.given: list[Slot] = []
        """The real tensors that skipped modules are given: step, leaf."""
        self.marks: dict[int, list[Any]] = {}
        """Of what stands for the leaves of each step's output."""

    def _stand_ins(self, index: int) -> tuple[list[Any], list[Any]]:
        leaves, self.marks[index] = super()._stand_ins(index)
        return leaves, self.marks[index]

    def input(self, position: int, leaf: Tensor) -> Tensor:
        instead = super().input(position, leaf)
        self._inputs.clear()  # it is seen who keeps them
        self.own.clear()
        return instead

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index, step = self.position, self.plan.steps[self.position]
        if step.run:
            given = placeholders((args, kwargs))
            if given and watch.has_hooks_inside(step.module):  # somebody reads what goes on inside
                raise Escape.at((source for p in given for source in p.sources), step.name)
            return
        for position, leaf in enumerate(tree_leaves((args, kwargs))):
            if isinstance(leaf, Placeholder):
                for key, tensor in self.scene.trainable.items():  # as they were met
                    if Source("trainable", "", key) in leaf.sources:
                        self._prober.traced.refuse_trained(tensor)
                for source in leaf.sources:
                    self._prober.enter(source)
            elif isinstance(leaf, Tensor):
                self.given.append((index, position))
                if leaf.requires_grad:
                    self._prober.traced.refuse_trained(leaf)


# ---- what the prefix makes use of ----------------------------------------------------------------


def observe(traced: TracedBatch) -> PrefixTrace:
    """Run the prefix once more and note what it reads and draws: on a few rows, and on all of the
    batch where a value decides what runs.
    """
    seen = _observed(traced, another(traced.size))
    return _observed(traced, list(range(traced.size))) if seen.branches else seen


def _observed(traced: TracedBatch, rows: list[int]) -> PrefixTrace:
    # A run of its own: some modules choose another way where a dispatch mode is active.
    copied = traced.copies.fresh()
    tensors = ((named, copied.of(named[2])) for named in traced.known)
    # Those that only active modules have are left.
    known = [one for one in tensors if not is_lazy(one[1]) and not is_sharded(one[1])]
    trace = PrefixTrace(known, copied.names(traced.names), grad=traced.grad)
    trace.is_blind = any(is_compiled(m) for module in traced.modules for m in module.modules())
    own = [module for module in traced.not_skipped() if copied.of(module) is not module]
    copies = [(id(module), copied.of(module), trace.noted) for module in own]
    with _noting([*copies, *((id(module), module, trace.really) for module in own)]):
        traced.recompute(rows, trace=None if trace.is_blind else trace, copied=copied)
    trace.noted |= trace.really
    return trace


def note_reads(
    traced: TracedBatch, plan: ReplayPlan, moving: Iterable[tuple[nn.Module, str]]
) -> None:
    """Note what the prefix makes use of beside its modules' own tensors and the batch.

    Class tokens, constants; modules behind the boundary of which it reads an attribute, or the
    mode, and which attributes of those and of the modules around it; not what that code moves
    itself, a counter, as no activation depends on it: that was shown.

    Raises:
        BoundaryError: Not only code around the modules draws random numbers, to no effect, as it
            will in a hit.
    """
    trace, near = traced.trace, {id(module) for module in plan.ancestors}
    skipped = {i for i, step in enumerate(plan.steps) if not step.run}
    is_read = {key for key, by in trace.read.items() if not by.isdisjoint(skipped | {-1})}
    frozen = [named for named in traced.known if not named[2].requires_grad]
    plan.reads = [named for named in frozen if id(named[2]) in is_read]
    if trace.is_blind:  # take all that is near
        plan.reads = [named for named in traced.known if id(named[1]) in near]
    plan.operators, plan.until = trace.operators, trace.until
    plan.draws |= bool(trace.draws)
    if drawing := [index for index in trace.draws if index in skipped]:
        raise BoundaryError.impure(plan.boundary, trace.draws[drawing[0]])
    read = {owner for owner, key in trace.noted if key == "training" or _may_count(key)}
    around = set(map(id, traced.ancestors))
    plan.others = [one for one in traced.not_skipped() if id(one) in read - around]
    own = {id(module): own_dict(module) or {} for module in plan.not_skipped}
    plan.moving = [pair for pair in moving if id(pair[0]) in own]
    names = {pair for pair in trace.noted if pair[0] in own}
    names |= {(owner, key) for owner, name in names if name == "__dict__" for key in own[owner]}
    names -= {(id(module), key) for module, key in plan.moving}
    slots = {(i, key) for i, key in names if isinstance(own[i].get(key), ForwardSlot)}
    plan.attributes = frozenset(pair for pair in names - slots if _may_count(pair[1]))


def _may_count(key: str) -> bool:
    """Whether an attribute of a module is not one that every module has, or all its children."""
    return key == "_modules" or (key not in watch.OF_EVERY_MODULE and not hasattr(nn.Module, key))


@contextmanager
def _noting(watched: Iterable[tuple[int, Any, set[tuple[int, str]]]]) -> Iterator[None]:
    """Note which attributes of some objects are read inside the block."""
    with ExitStack() as undo:
        for owner, one, names in watched:
            undo.callback(object.__setattr__, one, "__class__", type(one))
            object.__setattr__(one, "__class__", _noting_class(type(one), owner, names))
        yield


class _Untold:
    """Comes first behind a class of ours: what the user's own do with a subclass (they register it,
    say) is not done to it.
    """

    def __init_subclass__(cls) -> None:
        pass


def _noting_class(cls: Any, owner: int, names: set[tuple[int, str]]) -> Any:
    def note(self: Any, name: str) -> Any:
        if name != "__dict__" or not is_library(sys._getframe(1).f_globals["__name__"]):
            names.add((owner, name))
        return cls.__getattribute__(self, name)

    kind, own = type(cls), {"__getattribute__": note, "__module__": cls.__module__}
    meta = type(kind.__name__, (kind,), {"mro": lambda made: [made, _Untold, *cls.__mro__]})
    return type.__new__(meta, cls.__name__, (cls,), own)


def note_unused(traced: TracedBatch, plan: ReplayPlan) -> None:
    """Note what the prefix computes the same without: where it cannot be read on a copy, all of it
    or each by itself.

    Of arguments numbers, strings, and tensors that no loader vouches for: boxes, say, for the loss
    alone, or what is passed on to every layer and read by none. Another value that changes nothing
    would not do: `if epoch > 10`. And numbers of modules that are not skipped (an epoch, a schedule
    of the head's) which are read before the boundary returns. Code that it is given and runs is its
    own.
    """
    leaves, tagged = traced.call.leaves, traced.call.tagged
    code = traced.call.code().keys()
    found: list[Any] = [
        i
        for i, leaf in enumerate(leaves)
        if i in code or type(leaf) in (int, float, str)
        or (isinstance(leaf, Tensor | np.generic) and i not in tagged)
    ]  # fmt: skip
    trace = traced.trace
    if not (trace.is_blind or trace.branches):  # else a value may decide it
        named = ((module, key) for _, module, keys in plan.around() for key in keys)
        named = (one for one in named if (id(one[0]), one[1]) not in trace.really)
        found += [one for one in named if type(vars(one[0]).get(one[1])) in (int, float)]
    for rows in ([0, traced.size - 1], list(range(traced.size))):
        known = traced.recompute(rows) if found else None
        if known is not None and not _is_same_without(traced, plan, known, found):
            apart = found if len(found) > 1 else []
            found = [one for one in apart if _is_same_without(traced, plan, known, [one])]
    plan.free = frozenset(one for one in found if type(one) is int) - code
    plan.given = [leaves[i] for i in sorted(code - {*found})]
    plan.numbers = [one for one in found if type(one) is tuple]
    plan.attributes -= {(id(module), key) for module, key in plan.numbers}
    for position in plan.free & plan.pinned.keys():
        del plan.pinned[position]


def _is_same_without(
    traced: TracedBatch, plan: ReplayPlan, known: Recomputed, hidden: list[Any]
) -> bool:
    """Whether the prefix computes the same where these arguments and attributes cannot be read."""
    copied = traced.copies.fresh()
    scene, leaves = copied.scene(plan), copied.call.leaves
    for one in hidden:
        if type(one) is tuple:
            setattr(copied.of(one[0]), one[1], unreadable(type(vars(one[0])[one[1]])))
        elif isinstance(leaf := leaves[one], Tensor):
            longer = torch.cat([leaf, leaf[:1], leaf]) if leaf.dim() else leaf
            source = frozenset({Source("leaf", "", one)})
            leaves[one] = Placeholder.of(longer, source, scene)
        else:
            leaves[one] = unreadable(type(leaf))
    with Attempt() as tried:
        other = traced.recompute(known.rows, copied=copied)
        alike = not placeholders(other.leaves) and same_parts(plan, known, other)
        check_constants([other], plan)
    scene.finished = True
    return tried.error is None and alike
