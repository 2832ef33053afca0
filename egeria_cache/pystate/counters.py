"""What loading moves: put back where samples are loaded out of turn, or put ahead to see whether it
decides what a sample is.

It is looked for in all that the data set and the collate function hold and read: attributes, items,
closures, globals, classes, small arrays, generators of random numbers, counters of `itertools`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import warnings
from array import array
from ast import literal_eval
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from operator import is_
from threading import Thread
from types import FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache.attempt import Attempt
from egeria_cache.kinds import home
from egeria_cache.pystate.look import (
    attributes,
    globals_of,
    is_filled,
    is_opaque,
    is_training,
    is_users,
)
from egeria_cache.pystate.prints import PLAIN

_AHEAD = 1, 12, 130, 777, 12_345, 1_234_567
"""Of no common period."""
_MAX_OBJECTS, _MAX_ASKED = 1024, 32
_MAX_ITEMS, _MAX_HELD = 4096, 64
"""Of a container that is kept whole, and those of its items that are looked into."""
_MAX_BYTES = 1 << 16
"""Of an array; a larger one is data."""
_SINGLES = random._inst, np.random.mtrand._rand, torch.default_generator
"""Generators that others put back."""
_COPIED = {itertools.count, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(0)))}
"""Iterators that are."""
_PARTS: dict[type, tuple[str, ...]] = {
    FunctionType: ("__defaults__", "__kwdefaults__"),
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


class State(NamedTuple):
    """Something that may change where it stands."""

    path: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    has_names: bool = False
    """Whether what it holds are things of their own: attributes, variables."""


class Moved(NamedTuple):
    """What was one thing, and is another after the same samples were loaded once more."""

    state: State
    name: str | None
    once: Any
    twice: Any

    @property
    def path(self) -> str:
        """Where it is."""
        return self.state.path + (f".{self.name}" if self.name else "")

    def put_ahead(self, by: int) -> None:
        """Have it be ahead."""
        ahead = _ahead(self.once, self.twice, by)
        self.state.write({**self.state.read(), self.name: ahead} if self.name else ahead)


class Kept:
    """What some objects, and all that they hold, are like now."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        found = list(_states(roots))
        self._states = [state for state, _ in found]
        self._kept = [kept for _, kept in found]
        self.used_up = next((one.path for one, kept in found if type(kept) is GeneratorType), None)
        """A generator that runs: nobody can put it back."""
        for state, kept in found:
            if (new := _copied(kept)) is not kept:
                state.write(new)

    def put_back(self, made: Callable[[Any], Any] = lambda kept: kept) -> None:
        """Have them be like that again.

        `made` of that: iterators that run out stay as they are, and copies of them run.
        """
        for state, kept in zip(self._states, self._kept, strict=True):
            new = made(kept)
            with Attempt():
                if not _same(state.read(), new):
                    state.write(new)

    def has_moved(self, *, names: bool = True) -> bool:
        """Whether they are not like that; without `names`, containers and arrays alone."""
        pairs = zip(self._states, self._kept, strict=True)
        return any(
            not _same(state.read(), kept) for state, kept in pairs if names or not state.has_names
        )

    def now(self) -> list[Any]:
        """Return what they are like by now."""
        return [_copied(state.read()) for state in self._states]

    def moved(self, once: list[Any], twice: list[Any]) -> Iterator[Moved]:
        """Yield what can be put ahead of what differs between two such times."""
        for state, before, after in zip(self._states, once, twice, strict=True):
            if not state.has_names:
                parts = [Moved(state, None, before, after)]
            else:
                parts = [Moved(state, n, before.get(n), value) for n, value in after.items()]
            for part in parts:
                with Attempt():
                    if _ahead(part.once, part.twice, 1) is not None:
                        yield part


@contextmanager
def unmoved(roots: Mapping[str, Any], kept: Kept | None = None) -> Iterator[Kept]:
    """Have what loading moves be what it was when this ends; `kept` is that, if it is known."""
    now = kept or Kept(roots)
    try:
        yield now
    finally:
        now.put_back(_copied) if kept else now.put_back()


def deciding(roots: Mapping[str, Any], load: Callable[[], Any]) -> str | None:
    """Name something that counts what is loaded, and decides what that is.

    What is another thing after the same samples are loaded again is put ahead, by little and much.

    Args:
        roots: The data set and the collate function by name, whose state may move.
        load: Loads some samples; returns what tells them from others.
    """
    load()  # what is opened, or filled, once
    with unmoved(roots) as kept:
        given, once = load(), kept.now()
        load()
        found = list(itertools.islice(kept.moved(once, kept.now()), _MAX_ASKED))

        def differs(some: list[Moved], by: int) -> bool:
            kept.put_back(_copied)
            with Attempt():
                for i, one in enumerate(some):
                    one.put_ahead(by + i)
                return bool(load() != given)
            return False

        if not found or differs([], 0):  # what draws, by itself
            return None
        for by in _AHEAD:
            if differs(found, by):
                return next((one.path for one in found if differs([one], by)), found[0].path)
    return None


# ---- what there is ----------------------------------------------------------------------------


def _states(roots: Mapping[str, Any]) -> Iterator[tuple[State, Any]]:
    """Find what can be reached, the near first, and what it is like."""
    objects, seen = deque(roots.items()), dict[int, Any]()
    while objects and len(seen) < _MAX_OBJECTS:
        path, value = objects.popleft()
        if type(value) in PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        with Attempt():  # a handle of some kind
            if _is_let_be(value):
                continue
            objects += _parts(path, value)
            for state in (*_named(path, value), *_whole(path, value)):
                kept = state.read()
                if state.has_names:
                    objects += [(f"{state.path}.{name}", part) for name, part in kept.items()]
                yield state, kept


def _is_let_be(value: Any) -> bool:
    if isinstance(value, type):
        return not is_users(value)
    if isinstance(value, ModuleType) or any(value is one for one in _SINGLES):
        return True
    if is_opaque(type(value)) or is_training(value):
        return True
    return any(isinstance(part, Thread | Executor) for _, part in attributes(value))  # writes, too


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return what something consists of, but for what has a name in it."""
    if isinstance(value, dict | list | tuple | set | deque):
        items = value.values() if isinstance(value, dict) else value
        if len(value) > _MAX_ITEMS or PLAIN.issuperset(map(type, items)):
            return []
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        held = ((f"{path}[{key!r:.40}]", item) for key, item in pairs if type(item) not in PLAIN)
        return [*itertools.islice(held, _MAX_HELD), (path, type(value))]
    if isinstance(value, type):
        return [(base.__qualname__, base) for base in value.__bases__]
    parts = [(path, getattr(value, name, None)) for name in _PARTS.get(type(value), ())]
    return [*parts, (type(value).__qualname__, type(value))]


def _named(path: str, value: Any) -> Iterator[State]:
    """Yield what has names: attributes, variables of closures, globals."""
    if isinstance(value, type):
        yield _by_name(
            value.__qualname__,
            lambda: {n: part for n, part in vars(value).items() if not n.startswith("__")},
            functools.partial(type.__setattr__, value),
            functools.partial(type.__delattr__, value),
        )
    elif hasattr(value, "__dict__") or any(attributes(value)):
        yield _by_name(
            path,
            lambda: dict(attributes(value)),
            functools.partial(_assign, value),
            functools.partial(object.__delattr__, value),
        )
    if isinstance(value, FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        yield _by_name(
            path,
            lambda: {n: cell.cell_contents for n, cell in cells.items() if is_filled(cell)},
            lambda name, part: setattr(cells[name], "cell_contents", part),
            lambda name: delattr(cells[name], "cell_contents"),
        )
        scope, names = value.__globals__, globals_of(value.__code__)
        yield _by_name(
            home(value.__module__),
            lambda: {n: scope[n] for n in names if n in scope},
            scope.__setitem__,
            scope.__delitem__,
        )


def _assign(value: Any, name: str, part: Any) -> None:
    if isinstance(getattr(type(value), name, None), MemberDescriptorType):  # one of its slots
        object.__setattr__(value, name, part)
    else:
        value.__dict__[name] = part


def _by_name(
    path: str,
    read: Callable[[], dict[str, Any]],
    put: Callable[[str, Any], None],
    drop: Callable[[str], None],
) -> State:
    def write(kept: dict[str, Any]) -> None:
        now = read()
        for name in now.keys() - kept.keys():
            drop(name)
        for name, part in kept.items():
            if name not in now or now[name] is not part:
                put(name, part)

    return State(path, read, write, True)


def _whole(path: str, value: Any) -> Iterator[State]:
    """Yield what is put back as a whole: a container, an array, a generator of random numbers."""
    if isinstance(value, list) and len(value) > _MAX_ITEMS:
        yield State(path, lambda: range(len(value)), functools.partial(_set_length, value))
    elif isinstance(value, dict | list | set | deque | bytearray | array):
        if len(value) <= _MAX_ITEMS:
            yield State(
                path,
                functools.partial(_contents, value),
                functools.partial(_refill, value),
            )
    elif type(value) is np.ndarray:
        if value.nbytes <= _MAX_BYTES and value.flags.writeable and not value.dtype.hasobject:
            yield State(path, value.copy, functools.partial(value.__setitem__, ...))
    elif type(value) in (Tensor, nn.Parameter):
        small = value.is_cpu and value.layout == torch.strided and value.nbytes <= _MAX_BYTES
        if small and not (value.is_inference() or value.is_shared()):
            yield State(path, lambda: value.data.clone(), lambda kept: value.data.copy_(kept))
    elif isinstance(value, GeneratorType) and value.gi_frame is not None:
        yield State(path, lambda: value, lambda kept: None)
    elif isinstance(value, torch.Generator):
        yield State(path, value.get_state, value.set_state)
    elif isinstance(value, np.random.Generator):
        bits = value.bit_generator
        yield State(path, lambda: bits.state, functools.partial(setattr, bits, "state"))
    elif isinstance(value, np.random.RandomState):
        yield State(path, value.get_state, value.set_state)
    elif isinstance(value, random.Random):
        yield State(path, value.getstate, value.setstate)


def _contents(value: Any) -> Any:
    """Return what a container holds; none of its class's code is run."""
    if isinstance(value, dict):
        return dict((OrderedDict if isinstance(value, OrderedDict) else dict).items(value))
    if isinstance(value, set):
        return set(set.__iter__(value))
    if isinstance(value, list | deque):
        base: Any = list if isinstance(value, list) else deque
        return [*base.__iter__(value)]
    return value[:]


def _refill(value: Any, kept: Any) -> None:
    if isinstance(value, dict):
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        base.clear(value)
        for key, item in kept.items():
            base.__setitem__(value, key, item)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, kept)
    elif isinstance(value, deque):
        deque.clear(value)
        deque.extend(value, kept)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), kept)
    else:
        value[:] = kept


def _set_length(value: list[Any], kept: range | int) -> None:
    if isinstance(kept, range):  # what was taken from it stays so
        del value[len(kept) :]
    else:
        value += value[-1:] * (kept - len(value))


# ---- values -----------------------------------------------------------------------------------


def _same(now: Any, kept: Any) -> bool:
    """Whether something is as it was: holds the same objects, or the same bytes."""
    if now is kept or type(now) is not type(kept):
        return now is kept
    if isinstance(now, dict):
        return _same([*now, *now.values()], [*kept, *kept.values()])
    if isinstance(now, list):
        return len(now) == len(kept) and all(map(is_, now, kept))
    if isinstance(now, Tensor):
        return torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (now, kept)))
    if isinstance(now, set | range | bytearray | array):
        return bool(now == kept)
    return pickle.dumps(now) == pickle.dumps(kept)


def _copied(kept: Any) -> Any:
    """Return it with copies of the iterators that it holds."""
    values = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else ()
    if _COPIED.isdisjoint(map(type, values)):
        return kept
    if isinstance(kept, dict):
        return {key: _copy(value) for key, value in kept.items()}
    return [_copy(value) for value in kept]


def _copy(value: Any) -> Any:
    if type(value) not in _COPIED:
        return value
    if type(value) is itertools.count:
        return itertools.count(*_start(value))
    with warnings.catch_warnings(), suppress(TypeError):  # a cycle, in the newest Pythons
        warnings.simplefilter("ignore")
        return copy.copy(value)
    return value


def _start(count: itertools.count[Any]) -> tuple[Any, ...]:
    found = literal_eval(repr(count)[len("count") :])
    return found if isinstance(found, tuple) else (found,)


def _ahead(once: Any, twice: Any, by: int) -> Any:
    """Return what has gone from one value to another, further on; None for what goes nowhere."""
    kind: Any = type(twice)
    if once is twice or type(once) is not kind or kind is bool:
        return None
    if kind is itertools.count:
        start, *step = _start(twice)
        return itertools.count(start + by, *step) if repr(once) != repr(twice) else None
    if kind in _COPIED:
        further = _copy(twice)
        deque(itertools.islice(further, by), maxlen=0)
        return further
    if kind is range:
        return len(twice) + by if len(once) < len(twice) else None
    if isinstance(twice, int | float | np.number):
        return twice + by if once != twice else None
    if isinstance(twice, np.ndarray | Tensor):
        moved = once != twice
        return twice + moved * by if once.shape == twice.shape and moved.any() else None
    if isinstance(twice, dict):
        if len(once) < len(twice):
            return twice | dict.fromkeys(range(len(twice), len(twice) + by), [*twice.values()][-1])
        ahead = {key: _ahead(once.get(key), value, by) for key, value in twice.items()}
        moved = {key: value for key, value in ahead.items() if value is not None}
        return twice | moved if moved else None
    if isinstance(twice, set):
        return {*twice, *range(len(twice), len(twice) + by)} if len(once) < len(twice) else None
    if not issubclass(kind, str | bytes | bytearray | array | list | tuple):
        return None
    if len(once) < len(twice):
        return twice + twice[-1:] * by
    if len(once) > len(twice) or not isinstance(twice, list | tuple):
        return None
    parts = [_ahead(a, b, by) for a, b in zip(once, twice, strict=True)]
    if all(part is None for part in parts):
        return None
    parts = [b if part is None else part for part, b in zip(parts, twice, strict=True)]
    return tuple(parts) if isinstance(twice, tuple) else parts
