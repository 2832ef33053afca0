"""Remove generations that no live process uses, from outside of any run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from egeria_cache.store.disk.budget import Budget
from egeria_cache.store.disk.claims import clear_graves, in_use_elsewhere, remove_directory

__all__ = ["remove_generations"]


def remove_generations(
    directory: Path, names: Iterable[str], *, only_look: bool = False
) -> dict[str, str]:
    """Remove these generations of a cache; one that a live process uses always stays.

    Args:
        directory: The cache.
        names: Its generations.
        only_look: Change nothing, and say what would happen.

    Returns:
        Per name what became of it: "removed", "would be removed", "in use, stays", "not ours,
        stays".

    Raises:
        BudgetBusyError: Another process holds the directory's lock.
    """
    outcome = {}
    # The lock keeps a run from opening what is being removed; looking needs none.
    budget = Budget(directory, 0, evict_unused=False)
    with contextlib.nullcontext() if only_look else budget.locked():
        for name in names:
            path = directory / name
            if in_use_elsewhere(path):
                outcome[name] = "in use, stays"
            elif only_look:
                outcome[name] = "would be removed"
            else:
                outcome[name] = "removed" if remove_directory(path) else "not ours, stays"
        if not only_look:
            clear_graves(directory)
    return outcome
