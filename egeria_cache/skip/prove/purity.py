"""Whether the prefix only computes: run again on the same copy, nothing of it may move.

What settles after the first run (a memo, a mask kept for its shape) is harmless: skipping it skips
nothing. What moves with every run (a counter, a moving average, a private generator, a growing
list) would stand still on hits, and what is left behind by a run would be that of another batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Set
from functools import partial
from typing import Any

from torch import nn

from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import Content, Names, Place, Snapshot, describe
from egeria_cache.skip.prove.model_copy import ModelCopy
from egeria_cache.skip.prove.traced_batch import TracedBatch, recompute, rest
from egeria_cache.skip.serve.plan import Left, ReplayPlan
from egeria_cache.skip.state.watch import OF_EVERY_MODULE

_NOT_STATE = frozenset({"_modules", "_parameters", "train", "forward"})
Held = dict[Any, Content]
"""What modules hold, by (module, attribute), and words outside of the model, by place."""


class Repeats:
    """The prefix three times on one copy of the model: twice on the same rows, then on others."""

    def __init__(self, traced: TracedBatch) -> None:
        self._traced = traced
        copied = self.copied = traced.copies.fresh()
        before = held_in(traced, copied)
        self.first = recompute(traced, copied=copied)
        settled = held_in(traced, copied)
        own = ((vars(copied.of(mark[0])), mark[1]) for mark in moved(before, settled)
               if copied.of(mark[0]) is not mark[0])  # fmt: skip
        self.kept = Snapshot((), [Names("", held, (key,)) for held, key in own])
        once, world = self.kept.now(), traced.before.outside
        outside = world.now(copied.copy_of), world.now(), dict(copied.context)
        self.again = recompute(traced, self.first.rows, copied=copied, goes_on=True)
        self.counted = list(self.kept.moved(once, self.kept.now()))
        """What the second run has moved on the copy, as far as that can be put ahead."""
        self._outside = list(self._moved_outside(*outside))
        again = held_in(traced, copied)
        self._counting = moved(settled, again)
        self.last = recompute(traced, rest(traced.size), copied=copied, keeps_given=True)
        later = held_in(traced, copied)
        self._of_others = moved(again, later)
        """Whether other rows leave other tensors there, and not new ones."""
        self.moving = list(dict.fromkeys((*self._counting, *self._of_others)))
        """What calls after the first move; what that one has left is a memo."""
        traced.common = copied

    def check(self, plan: ReplayPlan) -> None:
        """Raise if what a hit skips would have moved something of what is skipped.

        Raises:
            BoundaryError: And what that is.
        """
        skipped = {id(m) for step in plan.steps if not step.run for m in step.module.modules()}
        around = {id(module) for module in plan.ancestors} - skipped
        for mark, has_arrays in self._counting.items():
            if id(mark[0]) in skipped or (id(mark[0]) in around and has_arrays):
                raise BoundaryError.leaves(self._traced.boundary, self._name(mark))

    def check_left(self, plan: ReplayPlan) -> list[Left]:
        """Return what a plain call leaves elsewhere, a hit does not, and is the same after all.

        Raises:
            BoundaryError: Something is not the same.
        """
        found, outside = list[Left](), self._traced.before.outside.places
        skipped, left = {id(module) for _, module in plan.skipped_modules()}, self._traced.left
        anew = self._counting.keys() | {mark for mark, holds in self._of_others.items() if holds}
        if not left.keys().isdisjoint(self._of_others):
            anew |= self._told_of_a_batch()
        for mark, (_, now) in left.items():
            if mark in anew:
                raise BoundaryError.leaves(self._traced.boundary, self._name(mark))
            where = mark[0] if isinstance(mark[0], nn.Module) else outside[mark[0]]
            if id(where) not in skipped and not now.arrays:
                found.append((self._name(mark), partial(_look, where, mark[1]), now.texts))
        return found

    def _told_of_a_batch(self) -> Set[Any]:
        """Return where other rows, of the same number, leave something else."""
        held, num = list[Held](), min(len(self.first.rows), len(self.last.rows))
        for rows in (self.first.rows[:num], self.last.rows[:num]):
            recompute(self._traced, rows, copied=self.copied)
            held.append(held_in(self._traced, self.copied))
        return moved(*held).keys()

    def check_outside(self) -> None:
        """Nothing outside of the model may move with each run of the prefix, if it is no count."""
        counted = {id(one.where) for one in self._traced.counted}
        for where, name in self._outside:
            if id(where) not in counted:
                how = f"{name} moves with every call of it"
                raise BoundaryError.impure(self._traced.boundary, how)

    def _moved_outside(
        self, once: list[Any], really: list[Any], context: Mapping[Any, Any]
    ) -> Iterator[tuple[Any, str]]:
        """Yield where something has moved since, of the copy's or really, and its name."""
        world, of = self._traced.before.outside, self.copied.copy_of
        for variable, value in self.copied.context.items():
            then = context.get(variable)
            if value is not then and describe(value) != describe(then):
                yield variable, f"the context variable {variable.name!r}"
        for one in world.moved(once, world.now(of)):
            if id(one.where) not in world.apart:
                yield one.where, one.name
        for one in world.moved(really, world.now()):
            if of(one.where) is not one.where:  # the model itself, which a global names
                yield one, one.name

    def reason(self) -> str:
        """Name what moved between two runs on the same rows, where their results differ."""
        names = map(self._name, self._counting)
        return next((f" ({name!r} moves with every call)" for name in names), "")

    def left(self, noted: Container[tuple[int, str]]) -> str:
        """Name what the whole first call has left: what is `noted` as read, if any of it is."""
        own = [mark for mark in self._traced.left if isinstance(mark[0], nn.Module)]
        read = [mark for mark in own if (id(mark[0]), mark[1]) in noted]
        names = [repr(self._name(mark)) for mark in read or own]
        return ", ".join(names) or "something outside of the model"

    def _name(self, mark: Any) -> str:
        name = self._traced.names.get(id(mark[0]), "")
        return f"{name}.{mark[1]}" if name else str(mark[1])


def held_in(traced: TracedBatch, copied: ModelCopy) -> Held:
    """Return what a copy of the model holds now, and what words it has left outside."""
    own = {
        (module, key): Content(part, into_foreign=False)
        for module in traced.model.modules()
        for key, part in _state(copied.of(module))
    }
    world = traced.before.outside
    words = {
        (i, name): Content(part)
        for i, place in enumerate(world.places)
        if place.has_names and id(place.where) not in world.apart
        for name, part in place.read(copied.copy_of(place.where)).items()
        if type(part) in (bool, str)
    }
    return own | words


def is_left_otherwise(then: Content | None, now: Content, replayed: Content | None) -> bool:
    """Whether a replay leaves what it found where a plain run moves it; or has counted less."""
    before, found = ({} if one is None else one.texts for one in (then, replayed))
    return before == found or any(
        _is_less(text, now.texts.get(path, b"")) for path, text in found.items()
    )


def _is_less(a: bytes, b: bytes) -> bool:
    (kind, _, number), (other_kind, _, other) = a.partition(b":"), b.partition(b":")
    return kind == other_kind == b"int" and int(number) < int(other)


def moved(before: Held, after: Held) -> dict[Any, bool]:
    """Return where something is another, and whether tensors or arrays that were there are."""
    found = {}
    for mark, held in after.items():
        then = before[mark].texts if mark in before else {}
        paths = {
            path
            for path in then.keys() | held.texts.keys()
            if held.texts.get(path) != then.get(path)
        }
        if paths:
            found[mark] = not held.arrays.isdisjoint(paths & then.keys() if then else paths)
    return found


def _look(where: nn.Module | Place, key: Any) -> dict[str, bytes]:
    held = vars(where) if isinstance(where, nn.Module) else where.read(where.where)
    return Content(held.get(key), into_foreign=False).texts


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = {key: value for key, value in module.__dict__.items() if key not in _NOT_STATE}
    for key, value in {**own.pop("_buffers", {}), **own}.items():
        if key == "training" or key not in OF_EVERY_MODULE or (isinstance(value, dict) and value):
            yield key, value
