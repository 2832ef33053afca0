"""What was proved of a model: the recipes for the prefix as it is now, and as it was before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from egeria_cache.skip.serve.cut import Cut
from egeria_cache.skip.serve.invocation import Invocation
from egeria_cache.skip.serve.recipe import Recipe
from egeria_cache.skip.state.guards import PrefixGuard

Key = tuple[Any, ...]
"""What calls have in common that are served alike: see `Invocation.key`."""

_MAX_RECIPES = 16
"""Signatures of calls (shapes, modes, plain arguments) proved per boundary."""
_FIRST_WAIT = 2
"""Batches during which the prefix must be still after it changed; doubles each time."""
_MAX_PARKED = 4
"""States of the prefix that are remembered, in case it returns to one (weights swapped for their
average during evaluation, say)."""


class RecipeBook:
    """Keeps recipes by signature; parks them while the prefix is not what they were proved for."""

    def __init__(self) -> None:
        self._recipes: dict[Key, list[Recipe]] = {}
        self._refused: set[Key] = set()
        self._num_rehearsals = 0
        self._parked: list[dict[Key, list[Recipe]]] = []
        self._watch: PrefixGuard | None = None
        """Looks whether a prefix that changed is still again."""
        self._wait = _FIRST_WAIT
        self._num_still = 0

    def all(self) -> list[Recipe]:
        """Return the recipes for the prefix as it is now."""
        return [recipe for recipes in self._recipes.values() for recipe in recipes]

    def guards(self) -> list[PrefixGuard]:
        """Return what watches the prefix of any of them; two recipes may share a guard."""
        found: list[PrefixGuard] = []
        for recipes in self._recipes.values():
            for recipe in recipes:
                if recipe.guard is not None and recipe.guard not in found:
                    found.append(recipe.guard)
        return found

    def alike(self, key: Key, boundary: str) -> list[Recipe]:
        """Return those of one signature at one boundary."""
        return [recipe for recipe in self._recipes.get(key, ()) if recipe.boundary == boundary]

    def find(
        self, key: Key, call: Invocation, *, boundary: str | None = None, cut: Cut | None = None
    ) -> Recipe | None:
        """Return the recipe for calls like this one, at `cut` or else at `boundary`."""
        for recipe in self._recipes.get(key, ()):
            wanted = recipe.boundary == boundary if cut is None else recipe.cut is cut
            if wanted and recipe.fits(call):
                return recipe
        return None

    def add(self, recipe: Recipe) -> None:
        """Take in a recipe that was proved."""
        self._recipes.setdefault(recipe.key, []).append(recipe)

    def refuse(self, key: Key) -> None:
        """Try calls of this signature no more; what was proved of some goes on."""
        self._refused.add(key)

    def drop(self, key: Key) -> None:
        """What was proved of calls of this signature does not hold."""
        self._recipes.pop(key, None)
        self._refused.add(key)

    def may_rehearse(self, key: Key) -> bool:
        """Whether another rehearsal is worth its price; whoever asks and is told so makes one."""
        if key in self._refused or not self._is_still() or self._num_rehearsals >= _MAX_RECIPES:
            return False
        self._num_rehearsals += 1
        return True

    def turn_to(self, kept: Iterable[Recipe]) -> None:
        """The boundary has moved: only these recipes still hold, and everything may be tried."""
        self._recipes.clear()
        for recipe in kept:
            self.add(recipe)
        self._refused.clear()
        self._num_rehearsals = 0
        self._watch, self._wait = None, _FIRST_WAIT

    def park(self, guard: PrefixGuard) -> bool:
        """The prefix has changed, as `guard` saw; return whether it is one that was proved before.

        It may return to what it was, or go on changing: then it is left alone for a while.
        """
        self._parked = [self._recipes, *self._parked][:_MAX_PARKED]
        self._recipes = {}
        self._refused.clear()
        if self._unpark():
            return True
        self._watch, self._num_still = guard.anew(), 0
        return False

    def forget_parked(self) -> None:
        """No former state counts any more."""
        self._parked.clear()

    def _unpark(self) -> bool:
        """Go back to recipes that were proved for what the prefix is now, if there are any."""
        for parked in self._parked:
            guards = [r.guard for recipes in parked.values() for r in recipes if r.guard]
            if guards and all(guard.is_same() for guard in guards):
                self._parked.remove(parked)
                self._recipes, self._watch = parked, None
                return True
        return False

    def _is_still(self) -> bool:
        """Whether the prefix has not changed for a while, since it did."""
        if self._watch is not None:
            if self._unpark():
                return False
            if self._watch.changed() is not None:
                self._watch.renew()
                self._num_still = 0
            self._num_still += 1
            if self._num_still <= self._wait:
                return False
            self._watch, self._wait = None, min(2 * self._wait, 1024)
        return True
