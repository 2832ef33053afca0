"""What some objects, and all that they hold, are like now: compared, put back in place, put ahead.

What can be reached is looked through the near first: attributes, items, closures, defaults, classes
with what they inherit, and the globals that code of the user's reads and assigns.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import types
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from operator import is_
from threading import Thread, local
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache.attempt import Attempt
from egeria_cache.kinds import home
from egeria_cache.pystate.ahead import ahead, same_content
from egeria_cache.pystate.bytecode import globals_of, is_installed_code
from egeria_cache.pystate.copier import Copier
from egeria_cache.pystate.foreign import (
    ATOMS,
    MEMORY,
    SHARED,
    StandIn,
    is_beyond,
    is_frozen,
    is_iterator,
    is_library,
    is_opaque,
    is_training,
    is_users,
    iterator_copy,
    leads_out,
    own_dict,
    runs_out,
    slots_of,
)
from egeria_cache.pystate.places import (
    LEADS,
    Attributes,
    Cell,
    Elements,
    Generator,
    Length,
    Named,
    Names,
    OfClass,
    Parts,
    Place,
    Sketch,
    led_to,
    place_of,
    sketch_of,
)

_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_PARTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_METHODS, ("__func__", "__self__")),
    (types.FunctionType, ("__defaults__", "__kwdefaults__")),
    (functools.partial, ("func", "args", "keywords")),
    (property, ("fget", "fset")),
    (staticmethod | classmethod, ("__func__",)),
)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
CODE_KINDS = (types.FunctionType, type, property, staticmethod, classmethod)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far is looked, and how much of what is found is kept."""

    lets_be: Callable[[Any], bool]
    max_objects: int = 100_000
    max_items: int = 1 << 30
    """Of a container that is kept whole."""
    max_held: int = 1 << 30
    """Of its items that are looked into."""
    max_bytes: int = 256 << 20
    """Of all tensors and arrays together."""
    follows_code: bool = True
    sketches: bool = False
    """Whether what cannot be kept is looked at here and there; nothing is put back."""


def _is_beyond_models(value: Any) -> bool:
    if isinstance(value, types.FunctionType | type):
        return is_library(value.__module__)
    if isinstance(value, functools._lru_cache_wrapper):  # it runs once for us and the user
        return True
    if isinstance(value, Tensor) and value.requires_grad:
        return True
    looked_at = (StandIn, local, *MEMORY, *_CONTAINERS)
    return not isinstance(value, looked_at) and is_beyond(value)


def _is_beyond_values(value: Any) -> bool:
    return isinstance(value, nn.Module) or _is_beyond_models(value)


def ends(value: Any) -> bool:
    """Whether it leads to nothing of the user's."""
    if isinstance(value, type):
        return not is_users(value)
    is_function = isinstance(value, types.FunctionType)
    return is_function and is_installed_code(value.__code__) and not value.__closure__


def holds_threads(value: Any) -> bool:
    """Whether an object has threads of its own, which write to it, too."""
    held = (own_dict(value) or {}).values()
    return any(isinstance(part, Thread | Executor) for part in held)


def _is_beyond_data(value: Any) -> bool:
    if isinstance(value, Tensor):  # what other processes may write to is not put back
        return not value.is_cpu or value.is_shared()
    if isinstance(value, SHARED) or ends(value) or is_opaque(type(value)):
        return True
    return holds_threads(value) or (is_training(value) and not is_frozen(value))


MODELS = Reach(_is_beyond_models, follows_code=False)
"""All that the code of a model may touch."""
CODE = Reach(_is_beyond_values, 20_000, max_held=64, max_bytes=0)
"""The same, but for modules, and the code that finds it."""
DATA = Reach(_is_beyond_data, 1024, 4096, 64, 1 << 20)
"""What loading samples may move; a larger array is data."""


class Snapshot:
    """What some objects are like now.

    Args:
        roots: (name, object): where to begin.
        places: Further things that may change, with all that they hold.
        reach: How far to look.
        apart: Ids of modules of whose own state others see to what it moves.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]] = (),
        places: Iterable[Place] = (),
        reach: Reach = MODELS,
        apart: Container[int] = (),
    ) -> None:
        self._reach, self.apart = reach, apart
        self._left = reach.max_bytes
        self.places: list[Place] = []
        self._kept: list[Any] = []
        self._alive: dict[int, Any] = {}
        self.used_up: str | None = None
        """Name of an iterator that `runs_out`: nobody can put it back."""
        pending = deque(roots)
        for place in places:
            pending += self._keep(place)
        self._walk(pending)
        kept = () if reach.sketches else self.places
        tensors = [place.where for place in kept if isinstance(place.where, Tensor)]
        # One each: older releases of PyTorch take no tuple.
        self._versions = [*map(torch.autograd._unsafe_preserve_version_counter, tensors)]

    def _walk(self, pending: deque[tuple[str, Any]]) -> None:
        """Look through all that can be reached, the near first."""
        kinds: set[type] = {dict, list, tuple, set, frozenset}
        while pending and len(self._alive) < self._reach.max_objects:
            path, value = pending.popleft()
            if type(value) in ATOMS and not isinstance(value, CODE_KINDS):
                continue
            if id(value) in self._alive:
                self._again(path, value)
                continue
            self._alive[id(value)] = value
            if self._is_mute(value):
                continue
            if self._reach.follows_code and type(value) not in kinds:
                kinds.add(type(value))
                pending.append((type(value).__qualname__, type(value)))
            with Attempt():  # it may be a handle of some kind
                if not self._reach.lets_be(value):
                    pending += self._look(path, value)

    def _is_mute(self, value: Any) -> bool:
        """Whether nothing of it counts, nor of its class."""
        return False

    def _again(self, path: str, value: Any) -> None:
        """Something is held by another thing, too."""

    @property
    def objects(self) -> Iterable[Any]:
        """All that was looked at."""
        return self._alive.values()

    def put_back(self, *, copies: bool = False) -> None:
        """Have them be like that again; as often as need be.

        Args:
            copies: Have copies stand in the place of iterators, which cannot be set back, and what
                leads out of the process be out of reach of a model's code. Without it, they stand
                in their place again.
        """
        for place, kept in zip(self.places, self._kept, strict=True):
            new = self._lent(place, kept) if copies else kept
            with Attempt():
                if not _same(place.read(place.where), new):
                    place.write(place.where, new)
        for version in self._versions:
            version.__exit__(None, None, None)

    def has_moved(self, *, names: bool = True) -> bool:
        """Whether they are not like that; without `names`, containers and arrays alone."""
        for place, kept in zip(self.places, self._kept, strict=True):
            look = place.look if isinstance(place, Elements) else place.read
            if (names or not place.has_names) and not _same(look(place.where), kept):
                return True
        return False

    def now(self, of: Callable[[Any], Any] = lambda where: where) -> list[Any]:
        """Return what they, or the copies `of` them, are like by now."""
        return [self._lent(place, place.read(of(place.where))) for place in self.places]

    def moved(self, once: list[Any], twice: list[Any], *, wholly: bool = False) -> Iterator[Moved]:
        """Yield what differs between two such times, and can be put ahead: `wholly`, or at all."""
        for place, before, after in zip(self.places, once, twice, strict=True):
            parts = [Moved(place, None, before, after, wholly)]
            if place.has_names or (wholly and isinstance(after, dict)):
                parts = [Moved(place, key, before.get(key), after[key], wholly) for key in after]
            for part in parts:
                with Attempt():
                    if part.has_gone_on():
                        yield part

    def moved_whole(self, of: Callable[[Any], Any]) -> dict[Any, Moved]:
        """Return what has moved since, every part of it, with all that is put ahead with it.

        Args:
            of: Returns the copy that was run of what was copied, else the thing itself.
        """
        found = self.moved(self._kept, self.now(of), wholly=True)
        return {one.mark: one for one in found if id(one.where) not in self.apart}

    def _lent(self, place: Place, kept: Any) -> Any:
        """Return it with copies of what cannot be set back."""
        values = kept.values() if isinstance(kept, dict) else kept if type(kept) is list else ()
        kinds = frozenset(map(type, values))
        is_reached = place.is_reached and not (self._reach.follows_code or kinds <= ATOMS)
        if not is_reached and not any(map(is_iterator, kinds)):
            return kept
        if isinstance(kept, list):
            return [_lent("[...]", value, is_reached) for value in kept]
        return {name: _lent(name, value, is_reached) for name, value in kept.items()}

    def _keep(self, place: Place) -> list[tuple[str, Any]]:
        """Keep what a place holds; return what that is."""
        kept = place.read(place.where)
        self.places.append(place)
        self._kept.append(kept)
        if isinstance(place, Sketch):
            return [(place.path, part) for part in (kept or ((), []))[1]]
        if not isinstance(place, Named):
            return []
        return [(f"{place.path}.{name}", part) for name, part in kept.items()]

    def _look(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keep one object; yield what else it holds."""
        for place in self._places(path, value):
            yield from self._keep(place)
        if isinstance(value, (Tensor, *_CONTAINERS)):
            if not isinstance(value, Tensor):
                yield from self._items(path, value)
            return
        for kinds, names in _PARTS:
            if isinstance(value, kinds):
                yield from ((path, getattr(value, name, None)) for name in names)
        if isinstance(value, type):
            yield from ((base.__qualname__, base) for base in value.__bases__)
        elif isinstance(value, LEADS):
            yield path, led_to(value)
        elif isinstance(value, local):
            yield path, vars(value)

    def _items(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        mapping = isinstance(value, dict | types.MappingProxyType)
        items = value.values() if mapping else value
        if len(value) > self._reach.max_items or ATOMS.issuperset(map(type, items)):
            return
        pairs = value.items() if mapping else enumerate(value)
        held = ((f"{path}[{key!r:.40}]", item) for key, item in pairs if type(item) not in ATOMS)
        yield from itertools.islice(held, self._reach.max_held)

    def _places(self, path: str, value: Any) -> Iterator[Place]:
        follows = self._reach.follows_code
        if type(value) in (tuple, frozenset):
            return
        if isinstance(value, type):
            if follows:
                yield OfClass(value.__qualname__, value)
            return
        if isinstance(value, types.FunctionType):
            if self._reach.sketches and not is_installed_code(value.__code__):
                yield Parts(path, value)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield Cell(f"{path}.{name}", cell)
            for scope, names in globals_of(value) if follows else ():
                yield Names(home(scope.get("__name__", "")), scope, names)
        is_far = self._reach.sketches and isinstance(value, Tensor) and not value.is_cpu
        whole = place_of(path, value, self._reach.max_items, 0 if is_far else self._left)
        if whole is None and is_iterator(type(value)):
            self.used_up = path if runs_out(value) else self.used_up
            return
        if self._reach.sketches and (whole is None or isinstance(whole, Length)):
            whole = sketch_of(path, value)
        if whole is not None:
            is_array = isinstance(whole, Elements) and isinstance(value, Tensor | np.ndarray)
            self._left -= value.nbytes if is_array else 0
            yield whole
        if isinstance(value, Tensor) or (isinstance(value, StandIn) and not value.is_copied):
            return
        if own_dict(value) is not None or slots_of(value):
            yield Attributes(path, value)


@dataclass(slots=True)
class Moved:
    """What was one thing, and is another after it was moved."""

    place: Place
    key: Any
    """None for what is moved as a whole."""
    once: Any
    twice: Any
    wholly: bool = False
    """Whether it is put ahead with all that it holds: none of it is watched if nothing comes of
    that."""
    replayed: Moved | None = None
    """The same of a hit, if it moves there as well."""

    @property
    def where(self) -> Any:
        """The dict, class, object, cell, list, tensor or array that holds it."""
        return self.place.where

    @property
    def path(self) -> str:
        """Where it is."""
        return self.place.path + (f".{self.key}" if self.key else "")

    @property
    def name(self) -> str:
        """What it is called, if it has a name."""
        kind = type(self.place.where).__name__
        return repr(self.key) if isinstance(self.key, str) else f"a {kind} outside of the model"

    @property
    def mark(self) -> Any:
        """What tells the place from others; see `Code.unread`."""
        return self.place.mark(self.key)

    def has_gone_on(self) -> bool:
        """Whether it is where it can be put ahead from."""
        if isinstance(self.place, Generator):
            return type(self.twice) is bytes and self.once != self.twice
        return ahead(self.once, self.twice, 1, wholly=self.wholly) is not None

    def is_past(self, other: Moved) -> bool:
        """Whether another run moved it further."""
        return not same_content(other.twice, self.twice)

    def put_ahead(self, by: int, of: Callable[[Any], Any] = lambda where: where) -> None:
        """Let it be what it might be so many calls later."""
        where = of(self.place.where)
        if isinstance(self.place, Generator):
            self.place.write(where, self.twice)
            if by:
                self.place.seed(where, by)
            return
        later = ahead(self.once, self.twice, by, wholly=self.wholly)
        if self.key is not None:
            later = self.place.read(where) | {self.key: later}
        self.place.write(where, later)


def _lent(name: Any, value: Any, is_reached: bool) -> Any:
    if not is_reached:
        return iterator_copy(value)
    is_kept = not leads_out(value) or isinstance(value, (*MEMORY, local))
    return value if is_kept else Copier()({name: value})[name]


def _same(now: Any, kept: Any) -> bool:
    """Whether something is as it was: holds the same objects, or the same bytes."""
    if now is kept or type(now) is not type(kept):
        return now is kept
    if type(now) in ATOMS:
        return bool(now == kept)
    if isinstance(now, dict | list):
        if len(now) != len(kept) or not all(map(is_, now, kept)):
            return False
        return isinstance(now, list) or all(map(is_, now.values(), kept.values()))
    if isinstance(now, Tensor):
        if torch.equal(now, kept):
            return True
        may_be_nan = now.shape == kept.shape and now.is_floating_point()
        return may_be_nan and torch.allclose(now, kept, 0.0, 0.0, equal_nan=True)
    if isinstance(now, np.ndarray):
        return bool(now.shape == kept.shape and now.tobytes() == kept.tobytes())
    if isinstance(now, tuple):
        return len(now) == len(kept) and all(map(_same, now, kept))
    if isinstance(now, set | bytearray | array):
        return bool(now == kept)
    return pickle.dumps(now) == pickle.dumps(kept)
