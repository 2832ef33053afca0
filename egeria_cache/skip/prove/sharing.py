"""Memory that is shared stays shared: tensors that cross the cut, and are one in a plain run.

A module may return what it was given, a view of it, or one tensor twice. If what follows reads
both, it may write to one some day, and see that in the other. Two stored tensors would not show it.
So one is stored for both; a module without parameters runs after all, on what it is really given;
and what shares memory in another way is refused.
"""

from __future__ import annotations

from collections.abc import Collection

from egeria_cache.batch import geometry, overlap
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.prove.evidence import Recomputed
from egeria_cache.skip.serve.recipe import Recipe, Slot

__all__ = ["share"]


def share(recipe: Recipe, plain: Recomputed, given: Collection[Slot]) -> bool:
    """Let what shares memory in a plain run of the prefix share it in a replay.

    Args:
        recipe: What crosses the cut so far.
        plain: The prefix, with what its modules were given.
        given: Which tensors skipped modules are really given in a replay: step, leaf.

    Returns:
        Whether the recipe was changed.

    Raises:
        BoundaryError: Memory is shared in a way that a replay cannot repeat.
    """
    stored = list(recipe.slots().values())
    for number, (step, leaf) in enumerate(stored):
        own, name = plain.leaves[step][leaf], recipe.steps[step].name
        for other in stored[:number]:
            theirs = plain.leaves[other[0]][other[1]]
            if overlap(own, theirs):
                if geometry(own) == geometry(theirs):
                    recipe.steps[step].cached.discard(leaf)
                    recipe.same[step, leaf] = other
                elif not _runs(recipe, step):
                    raise BoundaryError.shares_memory(
                        recipe.boundary, name, recipe.steps[other[0]].name
                    )
                return True
        for at, position in given:
            if at > step or not overlap(own, plain.given[at][position]):
                continue
            if not _runs(recipe, step):
                raise BoundaryError.shares_memory(recipe.boundary, name, recipe.steps[at].name)
            return True
    return False


def _runs(recipe: Recipe, step: int) -> bool:
    """Let a module run on what it is really given, if it has nothing to train or to watch."""
    plan = recipe.steps[step]
    if next(plan.module.parameters(), None) is not None:
        return False
    plan.run = True
    plan.cached.clear()
    return True
