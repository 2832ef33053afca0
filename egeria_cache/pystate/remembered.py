"""The little that a rehearsal shares with the user: remembered, and put back in place.

The model's own state needs no list of things to put back, since a rehearsal runs on a copy
(`twin.py`). What is left lies outside of the model, in one place for all copies: the global random
generators, the globals and class attributes that the model's code names, global hooks, and modules
that cannot be copied because they are compiled.
"""

from __future__ import annotations

import builtins
import functools
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache.device import random_states, seed_everywhere, set_random_states
from egeria_cache.pystate.copier import Copier
from egeria_cache.pystate.foreign import (
    ATOMS,
    MEMORY,
    StandIn,
    is_foreign,
    is_library,
    is_outside,
    is_put_back,
    own_dict,
    own_slots,
)

_OURS = ("forward", "train")
"""What stands on a module that is held in inference mode, or attached."""
_MAX_OBJECTS = 100_000
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators that a forward may draw from."""

    cpu: Tensor
    device: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """Copy the present states."""
        return cls(
            torch.get_rng_state(),
            random_states(),
            random.getstate(),
            np.random.get_state(),
        )

    @staticmethod
    def seed(number: int) -> None:
        """Begin all of them anew, somewhere else for every number."""
        seed_everywhere(number)
        random.seed(number)
        np.random.seed(number)

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_rng_state(self.cpu)
        set_random_states(self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def equals(self, other: RandomState) -> bool:
        """Whether the same numbers would be drawn."""
        return (
            torch.equal(self.cpu, other.cpu)
            and all(torch.equal(a, b) for a, b in zip(self.device, other.device, strict=True))
            and self.python == other.python
            and self.numpy[2:] == other.numpy[2:]
            and np.array_equal(self.numpy[1], other.numpy[1])
        )


class Remembered:
    """The content of everything that can be reached from some objects, to be put back in place.

    Args:
        roots: Modules, containers, functions (what their closures hold), objects.
        slots: Single entries of dicts, a global number say.
        classes: Classes, whose attributes are looked at.
        modules: Whether to look into modules.
    """

    def __init__(
        self,
        roots: Iterable[Any] = (),
        slots: Iterable[tuple[dict[str, Any], str]] = (),
        classes: Iterable[type] = (),
        *,
        modules: bool = True,
    ) -> None:
        self._modules = modules
        self._seen: dict[int, Any] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._num_bytes = 0
        self._versions: list[Tensor] = []
        self._outside: list[tuple[types.CellType | dict[str, Any], str, Any]] = []
        self._slots = [(where, key, where.get(key, _MISSING)) for where, key in slots]
        self._classes = [(cls, _data(cls)) for cls in classes]
        for where, key, value in self._slots:
            is_builtin = value is _MISSING
            self._note_outside(where, key, getattr(builtins, key, None) if is_builtin else value)
        pending = [*roots, *(value for _, _, value in self._slots)]
        pending += [value for _, data in self._classes for value in data.values()]
        while pending:
            pending.extend(self._look(pending.pop()))
        # One each: older releases of PyTorch take no tuple.
        self._preserved = [*map(torch.autograd._unsafe_preserve_version_counter, self._versions)]

    def restore(self, *, for_a_copy: bool = False) -> None:
        """Put back what differs. May be called again and again.

        Args:
            for_a_copy: Put copies in the place of what has its state outside (iterators, files), as
                it was: that itself cannot be set back. Without it, it stands in its place again.
        """
        for where, key, value in self._slots:
            if where.get(key, _MISSING) is not value:
                _set(where, key, value)
        for cls, data in self._classes:
            now = _data(cls)
            for key in now.keys() - data.keys():
                delattr(cls, key)
            for key, value in data.items():
                if now.get(key, _MISSING) is not value:
                    setattr(cls, key, value)
        for value, content in self._contents:
            _put_back(value, content)
        if for_a_copy:
            for place, key, kept in self._outside:
                _fill(place, key, Copier()(kept))
        for preserved in self._preserved:
            preserved.__exit__(None, None, None)

    def moved(self, of: Callable[[Any], Any]) -> list[Moved]:
        """Return what is another now, of what can be counted on.

        Args:
            of: Returns the copy that was run of what was copied, else the thing itself.
        """
        found = [Moved(where, key, value) for where, key, value in self._slots]
        for cls, data in self._classes:
            found += [Moved(cls, key, data.get(key)) for key in _data(cls)]
        for value, content in self._contents:
            found += _entries(value, content, of)
        return [one for one in found if one.has_moved(of)]

    def _look(self, value: Any) -> Iterable[Any]:
        """Remember one object; return what it holds."""
        if type(value) in ATOMS or id(value) in self._seen or len(self._seen) > _MAX_OBJECTS:
            return ()
        self._seen[id(value)] = value  # keeps its id its own
        if isinstance(value, Tensor):
            return self._look_at_tensor(value)
        if isinstance(value, types.FunctionType):
            if is_library(value.__module__):
                return ()
            return [cell for cell in value.__closure__ or () if _is_filled(cell)] + [
                value.__defaults__, value.__kwdefaults__, value.__dict__,
            ]  # fmt: skip
        if isinstance(value, types.CellType):
            self._contents.append((value, value.cell_contents))
            self._note_outside(value, "", value.cell_contents)
            return (value.cell_contents,)
        if isinstance(value, functools.partial):
            return (value.func, *value.args, *value.keywords.values())
        if isinstance(value, nn.Module):
            if not self._modules:
                return ()
            content = {key: part for key, part in vars(value).items() if key not in _OURS}
            self._contents.append((value, content))
            return content.values()
        if isinstance(value, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
            return (value.__self__,)
        if isinstance(value, StandIn) and not value.is_copied:
            return (value.before,)
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState):
            self._contents.append((value, _state_of(value)))
            return ()
        if isinstance(value, random.Random):
            self._contents.append((value, value.getstate()))
            return ()
        if isinstance(value, np.ndarray):
            self._num_bytes += value.nbytes
            if self._num_bytes <= _MAX_BYTES and value.flags.writeable:
                self._contents.append((value, value.copy()))
            return ()
        if isinstance(value, MEMORY):
            self._contents.append((value, bytes(value)))
            return ()
        if isinstance(value, threading.local):
            return (vars(value),)
        if isinstance(value, weakref.ref):
            return (value(),)
        if isinstance(value, dict):
            self._contents.append((value, dict(value)))
            return [*value.keys(), *value.values()]
        if isinstance(value, list | set | deque):
            self._contents.append((value, list(value)))
            return value
        if isinstance(value, tuple | frozenset):
            return value
        if is_foreign(value) and not (isinstance(value, StandIn) or is_put_back(value)):
            return ()
        own, slots = dict(own_dict(value) or {}), own_slots(value)
        if own_dict(value) is not None or slots:
            self._contents.append((_Own(value, slots), {**own, **slots}))
        return [*own.values(), *slots.values()]

    def _note_outside(self, where: types.CellType | dict[str, Any], key: str, value: Any) -> None:
        if is_outside(value) and not isinstance(value, (*MEMORY, threading.local)):
            self._outside.append((where, key, Copier()(value)))

    def _look_at_tensor(self, value: Tensor) -> Iterable[Any]:
        plain = type(value) is Tensor and value.layout == torch.strided and not value.is_meta
        if plain and not (value.is_inference() or value.requires_grad):
            self._num_bytes += value.nbytes
            if self._num_bytes <= _MAX_BYTES:
                self._contents.append((value, value.detach().clone()))
                self._versions.append(value)
        return ()


@dataclass(slots=True)
class Moved:
    """What code has written outside of the model: a number, a tensor, a list that grew."""

    where: Any
    """A dict, class, object, cell, list, tensor, array."""
    key: Any
    """None for what is moved as a whole."""
    before: Any
    now: Any = None
    is_replayed: bool = False
    """Whether it moves on hits as well."""

    @property
    def name(self) -> str:
        """What it is called, if it has a name."""
        kind = type(self.where).__name__
        return repr(self.key) if isinstance(self.key, str) else f"a {kind} outside of the model"

    def is_past(self, other: Moved) -> bool:
        """Whether another run moved it further."""
        return _differ(other.now, self.now)

    @property
    def mark(self) -> Any:
        """What tells the place from others; see `Code.unread`."""
        return id(self.where) if self.key is None else (id(self.where), self.key)

    def has_moved(self, of: Callable[[Any], Any]) -> bool:
        """Whether it is another now, and can be put ahead."""
        where = of(self.where)
        if isinstance(where, types.CellType):
            self.now = where.cell_contents
        elif self.key is not None:
            self.now = _held_by(where).get(self.key)
        elif isinstance(where, Tensor):
            self.now = where.detach().clone()
        else:
            self.now = where.copy() if isinstance(where, np.ndarray) else list(where)
        if not _differ(self.before, self.now):
            return False
        if isinstance(self.before, list) and isinstance(self.now, list):
            pairs = list(zip(self.before, self.now, strict=False))
            if len(self.now) > len(self.before):
                return not any(_differ(a, b) for a, b in pairs)
            return len(self.now) == len(pairs) and all(_differ(a, b) for a, b in pairs)
        return _is_number(self.now)

    def put_ahead(self, calls: int, of: Callable[[Any], Any]) -> None:
        """Let it be what it might be so many calls later."""
        where = of(self.where)
        if isinstance(self.now, list) and len(self.now) > len(self.before or ()):
            later: Any = self.now + self.now[-1:] * calls
        else:
            later = _later(self.now, calls)
        if self.key is None:
            _put_back(where, later)
        elif isinstance(where, dict):
            where[self.key] = later
        elif isinstance(where, type):
            setattr(where, self.key, later)
        else:
            object.__setattr__(where, self.key, later)


def _held_by(where: Any) -> Mapping[Any, Any]:
    """Return what stands in a dict, a class or an object, by name; runs no code of the user's."""
    if isinstance(where, dict | type):
        return where if isinstance(where, dict) else vars(where)
    return {**own_slots(where), **(own_dict(where) or {})}


def _differ(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is not b
    if isinstance(a, Tensor):
        return a.shape != b.shape or not torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return not np.array_equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) != len(b) or any(map(_differ, a, b))
    return type(a) in ATOMS and bool(a != b)


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    if isinstance(value, Tensor):
        return value.dtype != torch.bool and type(value) is Tensor
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf"
    return type(value) in (int, float)


def _later(value: Any, calls: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_later(one, calls) for one in value)
    return value + calls


def _entries(value: Any, content: Any, of: Callable[[Any], Any]) -> list[Moved]:
    """Return what one object held, entry by entry."""
    if isinstance(value, _Own):
        where, names = value.of, {**(own_dict(of(value.of)) or {}), **own_slots(of(value.of))}
        return [Moved(where, key, content.get(key)) for key in names]
    if isinstance(value, dict):
        return [Moved(value, key, content.get(key)) for key in of(value)]
    kinds = (types.CellType, list, deque, Tensor, np.ndarray)
    return [Moved(value, None, content)] if isinstance(value, kinds) else []


def _data(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are neither code nor the interpreter's own."""
    code = (types.FunctionType, staticmethod, classmethod, property, type,
            types.MemberDescriptorType, types.GetSetDescriptorType)  # fmt: skip
    return {
        key: value
        for key, value in vars(cls).items()
        if not isinstance(value, code) and not (key.startswith("__") and key.endswith("__"))
    }


@dataclass(frozen=True, slots=True)
class _Own:
    """Stands for what an object holds itself."""

    of: Any
    slots: Mapping[str, Any]


class _Missing:
    pass


_MISSING = _Missing()


def _set(where: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        where.pop(key, None)
    else:
        where[key] = value


def _fill(where: types.CellType | dict[str, Any], key: str, value: Any) -> None:
    if isinstance(where, dict):
        where[key] = value
    else:
        where.cell_contents = value


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


def _put_back(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if value.shape != content.shape or not torch.equal(value, content):
            with torch.no_grad():
                if value.shape != content.shape:
                    value.data = content.clone()
                value.data.copy_(content)
    elif isinstance(value, torch.Generator | np.random.RandomState):
        value.set_state(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, MEMORY):
        memoryview(value).cast("B")[:] = content
    elif isinstance(value, types.CellType):
        value.cell_contents = content
    elif isinstance(value, _Own):
        own = own_dict(value.of)
        if own is not None:
            _put_back_dict(own, {k: part for k, part in content.items() if k not in value.slots})
        for name, item in value.slots.items():
            if getattr(value.of, name, None) is not item:
                object.__setattr__(value.of, name, item)
    elif isinstance(value, nn.Module):
        own = vars(value)
        ours = {key: own[key] for key in (*_OURS, *("training",) * ("train" in own)) if key in own}
        _put_back_dict(own, content | ours)
    elif isinstance(value, dict):
        _put_back_dict(value, content)
    elif isinstance(value, set):
        if len(value) != len(content) or not value.issuperset(content):
            set.clear(value)
            set.update(value, content)
    elif len(value) != len(content) or any(map(is_not, value, content)):
        value.clear()
        value.extend(content)


def _put_back_dict(value: dict[Any, Any], content: dict[Any, Any]) -> None:
    same = len(value) == len(content)
    same = same and not any(map(is_not, value.keys(), content.keys()))
    if not same or any(map(is_not, value.values(), content.values())):
        value.clear()
        value.update(content)


@contextmanager
def stashed(model: nn.Module) -> Iterator[None]:
    """Put back the model's state and the random generators when the block ends.

    For forwards that only the user's own code can start, so that they cannot run on a copy.
    """
    state, rng = Remembered([model]), RandomState.now()
    try:
        yield
    finally:
        state.restore()
        rng.restore()
