"""What loading a sample does besides: random generators that are drawn from, counters that move.

The three global generators are watched, seeded for each sample, and put back. What else loading
moves is put back where samples are loaded out of turn, or put ahead to see whether it decides what
a sample is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from egeria_cache.attempt import Attempt, in_turns
from egeria_cache.pystate import DATA, GENERATORS, Moved, Snapshot

_AHEAD = 1, 12, 130, 777, 12_345, 1_234_567
"""Of no common period."""
_MAX_ASKED = 32


@contextmanager
def preserved() -> Iterator[None]:
    """Restore all three on exit, whatever was drawn or seeded inside."""
    with in_turns():
        saved = {name: generator.whole() for name, generator in GENERATORS.items()}
        try:
            yield
        finally:
            for name, generator in GENERATORS.items():
                generator.put_back(saved[name])


def kept_of(roots: Mapping[str, Any]) -> Snapshot:
    """Return what some objects are like now; from here on copies of iterators run."""
    kept = Snapshot(roots.items(), reach=DATA)
    kept.put_back(copies=True)
    return kept


@contextmanager
def unmoved(roots: Mapping[str, Any], kept: Snapshot | None = None) -> Iterator[Snapshot]:
    """Have what loading moves be what it was when this ends; `kept` is that, if it is known."""
    now = kept or kept_of(roots)
    try:
        yield now
    finally:
        now.put_back(copies=kept is not None)


def deciding(roots: Mapping[str, Any], load: Callable[[], Any]) -> str | None:
    """Name something that counts what is loaded, and decides what that is.

    The same samples are loaded three times; what that moves is put ahead, by little and much.

    Args:
        roots: The data set and the collate function by name, whose state may move.
        load: Loads some samples; returns what tells them from others.
    """
    given = load()  # what is opened, or filled, once
    with unmoved(roots) as kept:
        before, again, once = kept.now(), load(), kept.now()
        third, twice = load(), kept.now()
        found = list(itertools.islice(kept.moved(once, twice), _MAX_ASKED))

        def differs(some: list[Moved], by: int) -> bool:
            kept.put_back(copies=True)
            with Attempt():
                for i, one in enumerate(some):
                    one.put_ahead(by + i)
                return bool(load() != again)
            return False

        is_still = given == again == third
        if (is_still and not found) or differs([], 0):  # what draws, by itself
            return None
        if is_still and not any(differs(found, by) for by in _AHEAD):
            return None
        decide = (one for by in _AHEAD for one in found if differs([one], by))
        moved = itertools.chain(decide, found, kept.moved(before, once))
        return next((one.path for one in moved), None)
