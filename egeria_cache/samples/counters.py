"""What a data set may count its loads in: whole numbers, lists by their length, dictionaries.

They may be its own, or those of what it holds: a data set that it wraps, its transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from egeria_cache.attempt import Attempt

__all__ = ["counts", "deciding"]

_AHEAD = 10, 1_000, 1_000_000
_MAX_ITEMS = 4096
"""Of a dictionary; a larger one is data."""
_MAX_HELD, _MAX_OBJECTS = 64, 256
"""Of a list of objects, transforms say, and in all."""


_NO_HOLDERS = type, ModuleType, Tensor


class Count(NamedTuple):
    """An attribute that may count, and what it was."""

    attributes: dict[str, Any]
    name: str
    was: int
    items: dict[Any, Any]
    """Of a dictionary."""

    @property
    def moved(self) -> int:
        """By how much it has gone on."""
        return (_number(self.attributes.get(self.name)) or 0) - self.was

    def put_ahead(self, by: int) -> None:
        """Have it go on by more."""
        now = self.attributes[self.name]
        if isinstance(now, dict):
            now.update({key: n + by for key, n in now.items() if type(n) is int})
        else:
            self.attributes[self.name] = now + (by if type(now) is int else now[-1:] * by)

    def put_back(self) -> None:
        """Have it be what it was."""
        now = self.attributes.get(self.name)
        if self.moved and isinstance(now, dict):
            now.clear()
            now.update(self.items)
        elif self.moved and type(now) is list:
            del now[self.was :]
        elif self.moved and type(now) is int:
            self.attributes[self.name] = self.was


def _number(value: Any) -> int | None:
    if isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        return sum(n for n in value.values() if type(n) is int)
    if type(value) is list:
        return len(value)
    return value if type(value) is int else None


def counts(dataset: Any) -> Iterator[Count]:
    """Yield what may count in a data set, and in what it holds."""
    objects, seen = [dataset], set[int]()
    while objects and len(seen) < _MAX_OBJECTS:
        node = objects.pop(0)
        attributes = getattr(node, "__dict__", None)
        if type(attributes) is not dict or id(node) in seen or isinstance(node, _NO_HOLDERS):
            continue
        seen.add(id(node))
        for name, value in attributes.items():
            if (number := _number(value)) is not None:
                items = dict(value) if isinstance(value, dict) else {}
                yield Count(attributes, name, number, items)
            inner = value.values() if isinstance(value, dict) else value
            is_short = isinstance(value, list | tuple | dict) and len(value) <= _MAX_HELD
            objects += inner if is_short else [value]


def deciding(dataset: Any, load: Callable[[], Sequence[Any]]) -> str | None:
    """Name an attribute that counts the loads of a data set, and decides what it gives.

    What goes on by as much when the same samples are loaded again counts them. What is given must
    not change by that, nor when it is put ahead.

    Args:
        dataset: One whose state may move.
        load: Loads some of its samples; returns what tells them from others.
    """
    given, found = [load()], list(counts(dataset))
    given.append(load())
    steps = [count.moved for count in found]
    given.append(load())
    for count, once, twice in zip(found, steps, [one.moved for one in found], strict=True):
        for by in _AHEAD if 0 < once == twice - once else ():
            count.put_ahead(by)
            with Attempt():
                if any(one != given[0] for one in (*given, load())):
                    return count.name
        count.put_back()
    return None
