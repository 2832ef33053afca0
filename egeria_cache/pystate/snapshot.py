"""What some objects, and all that they hold, are like now: compared, put back in place, put ahead.

What can be reached is looked through the near first: attributes, items, closures, defaults, classes
with what they inherit, and the globals that code of the user's reads and assigns.
"""

from __future__ import annotations

import itertools
import pickle
import types
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.attempt import Attempt
from egeria_cache.kinds import home
from egeria_cache.pystate import objects, places
from egeria_cache.pystate.bytecode import globals_of
from egeria_cache.pystate.content import describe, tensor_digest
from egeria_cache.pystate.copier import Copier
from egeria_cache.pystate.objects import ATOMS, MEMORY, MODELS, Reach
from egeria_cache.pystate.places import Elements, Generator, Place


class Snapshot:
    """What some objects are like now.

    Args:
        roots: (name, object): where to begin.
        held: Further things that may change, with all that they hold.
        reach: How far to look.
        apart: Ids of modules of whose own state others see to what it moves.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]] = (),
        held: Iterable[Place] = (),
        reach: Reach = MODELS,
        apart: Container[int] = (),
    ) -> None:
        self._reach, self.apart = reach, apart
        self._left = reach.max_bytes
        self.places: list[Place] = []
        self._kept: list[Any] = []
        self.alive: dict[int, Any] = {}
        """All that was looked at, by id."""
        self.used_up: str | None = None
        """Name of an iterator that has something left to give: nobody can put it back."""
        pending = deque(roots)
        for place in held:
            pending += self._keep(place)
        self._walk(pending)
        kept = () if reach.sketches else self.places
        tensors = [place.where for place in kept if isinstance(place.where, Tensor)]
        # One each: older releases of PyTorch take no tuple.
        self._versions = [*map(torch.autograd._unsafe_preserve_version_counter, tensors)]

    def _walk(self, pending: deque[tuple[str, Any]]) -> None:
        """Look through all that can be reached, the near first."""
        kinds: set[type] = {dict, list, tuple, set, frozenset}
        while pending and len(self.alive) < self._reach.max_objects:
            path, value = pending.popleft()
            if type(value) in ATOMS and not isinstance(value, objects.CODE_KINDS):
                continue
            if id(value) in self.alive:
                self._again(path, value)
                continue
            self.alive[id(value)] = value
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
            if names or not place.has_names:
                where = place.where
                is_compared = type(where) is type(kept) in (Tensor, np.ndarray)  # without a copy
                if not _same(where if is_compared else place.read(where), kept):
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
        marked = {one.mark: one for one in found if id(one.where) not in self.apart}
        for one in marked.values():  # a run to come may put more into it
            one.twice = Copier()(one.twice)
        return marked

    def _lent(self, place: Place, kept: Any) -> Any:
        """Return it with copies of what cannot be set back."""
        values = kept.values() if isinstance(kept, dict) else kept if type(kept) is list else ()
        kinds = frozenset(map(type, values))
        is_reached = not (self._reach.follows_code or kinds <= ATOMS)
        is_reached &= isinstance(place, places.REACHED)
        if not is_reached and not any(map(objects.is_iterator, kinds)):
            return kept
        if isinstance(kept, list):
            return [_lent("[...]", value, is_reached) for value in kept]
        return {name: _lent(name, value, is_reached) for name, value in kept.items()}

    def _keep(self, place: Place) -> list[tuple[str, Any]]:
        """Keep what a place holds; return what that is."""
        kept = place.read(place.where)
        self.places.append(place)
        self._kept.append(kept)
        if isinstance(place, places.Sketch):
            return [(place.path, part) for part in (kept or ((), []))[1]]
        if not isinstance(place, places.Named):
            return []
        return [(f"{place.path}.{name}", part) for name, part in kept.items()]

    def _look(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keep one object; yield what else it holds."""
        for place in self._places(path, value):
            yield from self._keep(place)
        if isinstance(value, objects.CONTAINERS):
            yield from self._items(path, value)
        elif isinstance(value, type):
            yield from ((base.__qualname__, base) for base in value.__bases__)
        elif isinstance(value, local):
            yield path, vars(value)
        else:
            yield from ((path, part) for part in places.parts_of(value))

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
        if isinstance(value, type):
            if follows:
                yield places.OfClass(value.__qualname__, value)
            return
        if isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield places.Cell(f"{path}.{name}", cell)
            for scope, names in globals_of(value) if follows else ():
                yield places.Names(home(scope.get("__name__", "")), scope, names)
        is_far = self._reach.sketches and isinstance(value, Tensor) and not value.is_cpu
        whole = places.place_of(path, value, self._reach.max_items, 0 if is_far else self._left)
        if whole is None and objects.is_iterator(type(value)):
            is_ended = isinstance(value, types.GeneratorType) and value.gi_frame is None
            if not (is_ended or type(value) is itertools.count):
                self.used_up = path
            return
        if self._reach.sketches and (whole is None or isinstance(whole, places.Length)):
            whole = places.sketch_of(path, value)
        if whole is not None:
            is_array = isinstance(whole, Elements) and isinstance(value, Tensor | np.ndarray)
            self._left -= value.nbytes if is_array else 0
            yield whole
        is_ours = isinstance(value, objects.StandIn) and not value.is_copied
        if not (is_ours or isinstance(value, Tensor)) and objects.has_attributes(value):
            yield places.Attributes(path, value)


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
        """What tells the place from others, a variable like its cell; see `Code.unread`."""
        is_all = self.key is None or isinstance(self.place, places.Cell)
        return id(self.where) if is_all else (id(self.where), self.key)

    def has_gone_on(self) -> bool:
        """Whether it is where it can be put ahead from."""
        if isinstance(self.place, Generator):
            return type(self.twice) is bytes and self.once != self.twice
        return ahead(self.once, self.twice, 1, wholly=self.wholly) is not None

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
        return objects.iterator_copy(value)
    is_kept = not objects.leads_out(value) or isinstance(value, (*MEMORY, local))
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
    if isinstance(now, tuple):
        return len(now) == len(kept) and all(map(_same, now, kept))
    if isinstance(now, Tensor):  # what is no number differs from itself, and not its bytes
        return torch.equal(now, kept) or tensor_digest(now) == tensor_digest(kept)
    if isinstance(now, np.ndarray):
        return bool(now.shape == kept.shape and now.tobytes() == kept.tobytes())
    if isinstance(now, set | bytearray | array):
        return bool(now == kept)
    return pickle.dumps(now) == pickle.dumps(kept)


def ahead(once: Any, twice: Any, by: int, *, wholly: bool = False) -> Any:
    """Return what has gone from one value to another, further on; None for what goes nowhere.

    Args:
        once: What it was.
        twice: What it is.
        by: How many calls to put it ahead.
        wholly: Only what is numbers, or tensors, all of which move; these are put ahead whole.
    """
    kind: Any = type(twice)
    if wholly and not _counts(once, twice):
        return None
    if wholly and isinstance(twice, np.ndarray | Tensor):
        return twice + by
    if once is None and kind in (int, float, list):
        once = kind()
    if once is twice or type(once) is not kind or kind is bool:
        return None
    if kind is itertools.count:
        start, *step = objects.start_of(twice)
        return itertools.count(start + by, *step) if repr(once) != repr(twice) else None
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
        parts = {key: ahead(once.get(key), value, by) for key, value in twice.items()}
        moved = {key: value for key, value in parts.items() if value is not None}
        return twice | moved if moved else None
    if isinstance(twice, set):
        return {*twice, *range(len(twice), len(twice) + by)} if len(once) < len(twice) else None
    is_row = issubclass(kind, str | bytes | bytearray | array | list | tuple)
    return _row_ahead(once, twice, by, wholly=wholly) if is_row else None


def _row_ahead(once: Any, twice: Any, by: int, *, wholly: bool) -> Any:
    """Return one that grows with more of its last item, or what has moved in it further on."""
    if len(once) < len(twice):
        return twice + ([_another(twice[-1], by)] if type(twice) is list else twice[-1:]) * by
    if len(once) > len(twice) or isinstance(twice, str):
        return None
    parts = [ahead(a, b, by, wholly=wholly) for a, b in zip(once, twice, strict=True)]
    if all(part is None for part in parts):
        return None
    parts = [b if part is None else part for part, b in zip(parts, twice, strict=True)]
    if isinstance(twice, array):
        return array(twice.typecode, parts)
    if isinstance(twice, bytes | bytearray):
        return type(twice)(part % 256 for part in parts)
    return tuple(parts) if isinstance(twice, tuple) else parts


def _another(one: Any, by: int) -> Any:
    """Return what a log might get from another call: who asks which word it is, reads that."""
    if type(one) is dict:
        return {key: _another(part, by) for key, part in one.items()}
    if type(one) in (list, tuple):
        return type(one)(_another(part, by) for part in one)
    if isinstance(one, str):
        return objects.unreadable(str)
    further = by if by & 1 else -by
    if isinstance(one, np.ndarray | np.number) and one.dtype.kind in "iufc":
        return one + np.asarray(further).astype(one.dtype)
    return one + further if isinstance(one, Tensor) or type(one) in (int, float) else one


def _counts(once: Any, twice: Any) -> bool:
    """Whether it is numbers, or tensors of them, and all of these are others; or more of them."""
    if isinstance(twice, list | tuple):
        once = twice[:0] if once is None else once
        more = twice[len(once) :]
        if more:
            return _is_alike(once, twice[: len(once)]) and all(map(_is_record, more))
        return len(once) == len(twice) and all(map(_counts, once, twice))
    if isinstance(twice, Tensor | np.ndarray):
        is_number = twice.dtype not in (torch.bool, np.bool_, np.object_)
        return is_number and not _is_alike(once, twice)
    return type(twice) in (int, float) and once != twice


def _is_record(one: Any) -> bool:
    """Whether it is what a log gets: numbers, tensors, the names of layers."""
    if isinstance(one, dict | list | tuple):
        return all(map(_is_record, one.values() if isinstance(one, dict) else one))
    return type(one) is str or _counts(None, one)


def _is_alike(a: Any, b: Any) -> bool:
    return _same(a, b) or describe(a) == describe(b)
