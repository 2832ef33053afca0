"""What the prefix makes use of: tensors, attributes of the modules around it, arguments."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from egeria_cache.attempt import Attempt
from egeria_cache.pystate import is_compiled, is_library, own_dict
from egeria_cache.skip.model.calls import ForwardSlot
from egeria_cache.skip.model.fsdp import is_sharded
from egeria_cache.skip.prove.model_copy import ModelCopy
from egeria_cache.skip.prove.probe import scene_of
from egeria_cache.skip.prove.traced_batch import Recomputed, TracedBatch, another, recompute
from egeria_cache.skip.serve.placeholder import OF_EVERY_OBJECT, Placeholder, Source, placeholders
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.serve.trace import PrefixTrace
from egeria_cache.skip.state.watch import OF_EVERY_MODULE

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run of the prefix on the whole batch has read."""

    trace: PrefixTrace | None
    """Tensors, and random draws; None if the prefix is compiled."""
    noted: set[tuple[int, str]]
    """(id of a module that is not skipped, attribute)."""
    really: set[tuple[int, str]]
    """The same of the model itself, where a global leads to it and not to the copy that ran."""
    others: list[nn.Module]
    """Modules behind the boundary of which attributes were read."""


def observe(traced: TracedBatch) -> Observed:
    """Run the prefix once more and note what it reads and draws: on a few rows, and on all of the
    batch where a value decides what runs.
    """
    seen = _observed(traced, another(traced.size))
    is_decided = seen.trace is None or not seen.trace.branches
    return seen if is_decided else _observed(traced, list(range(traced.size)))


def _observed(traced: TracedBatch, rows: list[int]) -> Observed:
    # A run of its own: some modules choose another way where a dispatch mode is active.
    copied = traced.copies.fresh()
    pairs = [(module, copied.of(module)) for module in traced.not_skipped()]
    copies = [(id(module), copy) for module, copy in pairs if copy is not module]
    models, really = [(id(m), m) for m, copy in pairs if copy is not m], set[tuple[int, str]]()
    noted, trace = set[tuple[int, str]](), _trace(traced, copied)
    with _noting(copies, noted), _noting(models, really):
        recompute(traced, rows, trace=trace, copied=copied)
    return Observed(trace, noted | really, really, _others(traced, noted | really))


def _trace(traced: TracedBatch, copied: ModelCopy) -> PrefixTrace | None:
    if any(is_compiled(m) for module in traced.modules for m in module.modules()):
        return None
    pairs = [(named, copied.of(named[2])) for named in traced.known]
    known = [
        (named, tensor)
        for named, tensor in pairs
        if not is_lazy(tensor) and not is_sharded(tensor)  # which only active modules have
    ]
    return PrefixTrace(known, copied.names(traced.names), grad=traced.grad)


def note_reads(plan: ReplayPlan, seen: Observed, moving: Iterable[tuple[nn.Module, str]]) -> None:
    """Note what the prefix reads beside tensors: `ReplayPlan.attributes` of the modules around it
    and behind it, but for those that it moves itself.
    """
    plan.others = seen.others
    read_of = {id(module) for module in plan.not_skipped}
    plan.moving = [pair for pair in moving if id(pair[0]) in read_of]
    plan.operators = {} if seen.trace is None else seen.trace.operators
    plan.until = {} if seen.trace is None else seen.trace.until
    plan.attributes = _attributes(plan, {pair for pair in seen.noted if pair[0] in read_of})


def _others(traced: TracedBatch, noted: set[tuple[int, str]]) -> list[nn.Module]:
    """Return the modules behind the boundary of which an attribute was read, or the mode."""
    around = {id(module) for module in traced.ancestors}
    read = {owner for owner, key in noted if key == "training" or _may_count(key)} - around
    return [module for module in traced.not_skipped() if id(module) in read]


def _may_count(key: str) -> bool:
    """Whether an attribute of a module is not one that every module has, or all its children."""
    return key == "_modules" or (key not in OF_EVERY_MODULE and not hasattr(nn.Module, key))


def _attributes(plan: ReplayPlan, names: set[tuple[int, str]]) -> frozenset[tuple[int, str]]:
    """Return what counts of the attributes of modules that are read: not what that code moves
    itself, a counter, as no activation depends on it: that was shown.
    """
    moving = {(id(module), key) for module, key in plan.moving}
    own = {id(module): own_dict(module) or {} for module in plan.not_skipped}
    whole = {owner for owner, key in names if key == "__dict__"}
    found = names | {(owner, key) for owner in whole for key in own[owner]}
    return frozenset(
        (owner, key)
        for owner, key in found - moving
        if _may_count(key) and not isinstance(own[owner].get(key), ForwardSlot)
    )


@contextmanager
def _noting(copies: Iterable[tuple[int, Any]], names: set[tuple[int, str]]) -> Iterator[None]:
    """Note which attributes of some objects, copies all, are read inside the block."""
    before: list[tuple[Any, type]] = []
    try:
        for owner, copy in copies:
            cls = type(copy)
            before.append((copy, cls))
            object.__setattr__(copy, "__class__", _noting_class(cls, owner, names))
        yield
    finally:
        for copy, cls in before:
            object.__setattr__(copy, "__class__", cls)


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


def free_arguments(traced: TracedBatch, plan: ReplayPlan) -> frozenset[int]:
    """Return the positions of arguments that nothing before the boundary reads.

    Numbers and strings, and tensors that no loader vouches for: boxes, say, for the loss alone, or
    what is passed on to every layer and read by none. Another value that changes nothing would not
    do: `if epoch > 10`.
    """
    candidates = [
        i
        for i, leaf in enumerate(traced.call.leaves)
        if type(leaf) in (int, float, str)
        or (isinstance(leaf, Tensor) and i not in traced.call.tagged)
    ]
    if not candidates:
        return frozenset()
    known = recompute(traced, list(range(traced.size)))
    return frozenset(_unused(candidates, partial(_same_without, traced, plan, known)))


def _unused(candidates: list[_T], are_unused: Callable[[list[_T]], bool]) -> list[_T]:
    """Return what may be done without: all together, or else each by itself."""
    if not candidates or are_unused(candidates):
        return candidates
    return [one for one in candidates if len(candidates) > 1 and are_unused([one])]


def _same_without(
    traced: TracedBatch, plan: ReplayPlan, known: Recomputed, positions: list[int]
) -> bool:
    """Whether the prefix computes the same where nothing at these positions can be read."""
    copied: ModelCopy = traced.copies.fresh()
    scene, leaves = scene_of(plan, copied), list(copied.call.leaves)
    for position in positions:
        leaf = leaves[position]
        if not isinstance(leaf, Tensor):
            leaves[position] = _unreadable(type(leaf))
            continue
        longer = torch.cat([leaf, leaf[:1], leaf]) if leaf.dim() else leaf
        source = frozenset({Source("argument", "", position)})
        leaves[position] = Placeholder.of(longer, source, scene)
    copied.call = dataclasses.replace(copied.call, leaves=leaves)
    is_same = _is_same_on(traced, plan, known, copied)
    scene.finished = True
    return is_same


def _is_same_on(
    traced: TracedBatch, plan: ReplayPlan, known: Recomputed, copied: ModelCopy
) -> bool:
    """Whether the prefix computes the same on a copy in which something cannot be read."""
    with Attempt() as tried:
        other = recompute(traced, known.rows, copied=copied)
    return (
        tried.error is None
        and not placeholders(other.leaves)
        and all(_same(a, b) for a, b in _needed(plan, known, other))
    )


def free_attributes(traced: TracedBatch, plan: ReplayPlan) -> frozenset[tuple[int, str]]:
    """Return which numbers of modules that are not skipped (an epoch, a schedule of the head's) are
    read before the boundary returns, and nothing that it computes makes use of them.
    """
    named = [(module, key) for _, module, keys in plan.around() for key in keys]
    found = [pair for pair in named if type(vars(pair[0]).get(pair[1])) in (int, float)]

    def are_free(known: Recomputed, pairs: list[tuple[nn.Module, str]]) -> bool:
        copied = traced.copies.fresh()
        for module, key in pairs:
            setattr(copied.of(module), key, _unreadable(type(vars(module)[key])))
        return _is_same_on(traced, plan, known, copied)

    for rows in ([0, traced.size - 1], list(range(traced.size))):
        if found:
            found = _unused(found, partial(are_free, recompute(traced, rows)))
    return frozenset((id(module), key) for module, key in found)


def _needed(plan: ReplayPlan, a: Recomputed, b: Recomputed) -> Iterator[tuple[Any, Any]]:
    """Yield what two runs gave for all that a hit is given."""
    for i, step in enumerate(plan.steps):
        needed = {*step.cached, *step.constants}
        yield len(a.leaves[i]), len(b.leaves[i])
        for j, (x, y) in enumerate(zip(a.leaves[i], b.leaves[i], strict=False)):
            if j in needed or not isinstance(x, Tensor):
                yield x, y


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return type(a) is type(b) and (not isinstance(a, int | float | str) or a == b)


def _unreadable(kind: type) -> Any:
    """Return what passes for a value of this kind, and has none: whatever asks for it fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise LookupError("it is read")

    def goes_on(self: Any, *others: Any) -> Any:
        return self if all(isinstance(one, int | float) for one in others) else refuse()

    asked = {name: refuse for name in dir(kind) if name not in OF_EVERY_OBJECT}
    asked |= dict.fromkeys(_ARITHMETIC & asked.keys(), goes_on)
    return type(
        "Unreadable", (), asked | {"__bool__": refuse, "__class__": property(lambda _: kind)}
    )()


_ARITHMETIC = {
    f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv") for side in ("", "r")
}
"""What only makes another number of numbers."""
