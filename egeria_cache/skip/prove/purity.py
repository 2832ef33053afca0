"""Whether the prefix only computes: run again on the same copy, nothing of it may move.

What settles after the first run (a memo, a mask kept for its shape) is harmless: skipping it skips
nothing. What moves with every run (a counter, a moving average, a private generator, a growing
list) would stand still on hits, and what is left behind by a run would be that of another batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import Content, Names, Snapshot, describe
from egeria_cache.skip.prove.traced_batch import TracedBatch, recompute, rest
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.state.hooks import has_user_hooks

_NOT_STATE = frozenset({"_modules", "_parameters", "training", "train", "forward"})
_MAX_DEPTH = 12
_Held = list[dict[str, Content]]


class Repeats:
    """The prefix three times on one copy of the model: twice on the same rows, then on others.

    Args:
        traced: The plain run.
        others: Modules behind the boundary that code before it makes use of.
    """

    def __init__(self, traced: TracedBatch, others: Iterable[nn.Module]) -> None:
        self._traced = traced
        copied = self.copied = traced.copies.fresh()
        modules = [*traced.prefix_modules(), *others]
        self._watched = [(module, copied.of(module)) for module in modules]
        before = self._held()
        self.first = recompute(traced, copied=copied)
        settled = self._held()
        begun = [pair for pair, _ in self._changes(before, settled)]
        own = ((vars(copied.of(module)), key) for module, key in begun
               if copied.of(module) is not module)  # fmt: skip
        self.kept = Snapshot((), [Names("", held, (key,)) for held, key in own])
        once, world = self.kept.now(), traced.before.outside
        outside = world.now(copied.copy_of), world.now(), dict(copied.context)
        self.again = recompute(traced, self.first.rows, copied=copied, goes_on=True)
        self.counted = list(self.kept.moved(once, self.kept.now()))
        """What the second run has moved on the copy, as far as that can be put ahead."""
        self._outside = list(self._moved_outside(*outside))
        again = self._held()
        self._counting = self._changes(settled, again)
        self.last = recompute(traced, rest(traced.size), copied=copied, keeps_given=True)
        later = self._held()
        left = self._changes(again, later, new_keys=False)
        self._left = [pair for pair, holds in left if holds]
        self._told = [] if len(left) == len(self._left) else self._told_of_a_batch()
        moving = chain(self._counting, self._changes(again, later))
        self.moving = list(dict.fromkeys(pair for pair, _ in moving))
        """What calls after the first move; what that one has left is a memo."""
        traced.common = copied

    def _told_of_a_batch(self) -> list[tuple[nn.Module, str]]:
        """Return what other rows, of the same number, leave behind otherwise."""
        held, num = list[_Held](), min(len(self.first.rows), len(self.last.rows))
        for rows in (self.first.rows[:num], self.last.rows[:num]):
            recompute(self._traced, rows, copied=self.copied)
            held.append(self._held())
        return [pair for pair, _ in self._changes(*held)]

    def check(self, plan: ReplayPlan) -> None:
        """Raise if what a hit skips would have changed something.

        Raises:
            BoundaryError: And what that is.
        """
        skipped = {id(m) for step in plan.steps if not step.run for m in step.module.modules()}
        around = {id(module) for module in plan.ancestors} - skipped
        for (module, key), tensors in self._counting:
            if id(module) in skipped or (id(module) in around and tensors):
                raise self._impure(module, key, "moves with every call of the prefix")
        left = [pair for pair in self._left if id(pair[0]) in skipped | around]
        # Hooks are called on hits, too, and may leave what they like.
        left += ((m, key) for m, key in self._told if id(m) in skipped and not has_user_hooks(m))
        for module, key in left:
            how = "is what the prefix leaves behind: on a hit it would be that of another batch"
            raise self._impure(module, key, how)

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
        names = (self._name(*pair) for pair, _ in self._counting)
        return next((f" ({name!r} moves with every call)" for name in names), "")

    def left(self, noted: Container[tuple[int, str]]) -> str:
        """Name what the whole first call has left: what is `noted` as read, if any of it is."""
        moved = []
        for module in self._traced.model.modules():
            copies = self._traced.copies.before(module), self._traced.called.of(module)
            then, now = ({"training": str(one.training)} | _texts(one) for one in copies)
            moved += [(module, key) for key, held in now.items() if held != then.get(key)]
        read = [(module, key) for module, key in moved if (id(module), key) in noted]
        names = [repr(self._name(*pair)) for pair in read or moved]
        return ", ".join(names) or "something outside of the model"

    def _impure(self, module: nn.Module, key: str, how: str) -> BoundaryError:
        kind = "buffer" if key in module._buffers else "attribute"
        what = f"the {kind} {self._name(module, key)!r} {how}"
        return BoundaryError.impure(self._traced.boundary, what)

    def _name(self, module: nn.Module, key: str) -> str:
        name = self._traced.names.get(id(module), "")
        return f"{name}.{key}" if name else key

    def _held(self) -> _Held:
        """Return what the copies hold now, by module and attribute."""
        return [_contents(copy) for _, copy in self._watched]

    def _changes(
        self, before: _Held, after: _Held, *, new_keys: bool = True
    ) -> list[tuple[tuple[nn.Module, str], bool]]:
        """Return (user's module, attribute), and whether tensors or arrays are what changed.

        Without `new_keys` what has joined a mapping or an object is no change.
        """
        found = []
        for (module, _), old, now in zip(self._watched, before, after, strict=True):
            for key, held in now.items():
                then = old[key].texts if key in old else {}
                paths = set(held.texts)
                if new_keys:
                    paths |= then.keys()
                elif key in old:
                    paths &= then.keys()
                moved = {path for path in paths if held.texts.get(path) != then.get(path)}
                if moved:
                    found.append(((module, key), not held.arrays.isdisjoint(moved)))
        return found


def _contents(module: nn.Module) -> dict[str, Content]:
    return {key: Content(part, _MAX_DEPTH, into_foreign=False) for key, part in _state(module)}


def _texts(module: nn.Module) -> dict[str, Any]:
    return {key: held.texts for key, held in _contents(module).items()}


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = {key: value for key, value in module.__dict__.items() if key not in _NOT_STATE}
    yield from {**own.pop("_buffers", {}), **own}.items()
