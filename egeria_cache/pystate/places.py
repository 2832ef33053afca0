"""Where something may change: how to read what stands there, and how to write it back.

No code of the user's is run for it. What has names (attributes, variables, globals) reads as a
dict of them; a container, an array or a generator as a copy of its content.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import random
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from sys import intern
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from egeria_cache.attempt import Attempt
from egeria_cache.kinds import once_per_class
from egeria_cache.pystate import objects
from egeria_cache.pystate.objects import ATOMS, MEMORY

_STAND_INS = ("forward", "train")
"""What stands on a module that is held in inference mode, or attached."""
LEADS: tuple[type, ...] = ContextVar, weakref.ref, weakref.ProxyType, weakref.CallableProxyType
"""Lead to something else."""
MUTABLE = OrderedDict, dict, list, set, deque
BUFFERS = io.BytesIO, io.StringIO
"""Files in memory."""
NUM_SEEN, NUM_FIRST = 256, 4096
"""Items of a long list or array that a glance sees, here and there; of another container."""
SMALL_BYTES = 1 << 16
"""Up to this size it sees all of an array."""


def led_to(value: Any) -> Any:
    """Return what one of `LEADS` leads to; None if that is nothing."""
    with contextlib.suppress(ReferenceError, LookupError):
        if isinstance(value, weakref.ProxyTypes):
            return value.__repr__.__self__
        return value.get() if isinstance(value, ContextVar) else value()
    return None


_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_PARTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_METHODS, ("__func__", "__self__")),
    (types.FunctionType, ("__defaults__", "__kwdefaults__")),
    (functools.partial, ("func", "args", "keywords")),
    (property, ("fget", "fset")),
    (staticmethod | classmethod, ("__func__",)),
)


def parts_of(value: Any) -> list[Any]:
    """Return what code that is bound to something, or one of `LEADS`, consists of."""
    for kinds, names in _PARTS:
        if isinstance(value, kinds):
            return [getattr(value, name, None) for name in names]
    return [led_to(value)] if isinstance(value, LEADS) else []


@dataclass(slots=True)
class Place:
    """One thing whose content may change."""

    path: str
    where: Any

    has_names: ClassVar[bool] = False
    """Whether it holds things of their own, by name."""

    def read(self, where: Any) -> Any:
        """Return what `where` holds, which is this or a copy of it."""
        raise NotImplementedError

    def write(self, where: Any, kept: Any) -> None:
        """Have `where` hold that, if it can be put back."""


class Named(Place):
    """What has names."""

    has_names = True

    def write(self, where: Any, kept: dict[Any, Any]) -> None:
        """Have exactly these names stand for exactly these things."""
        now = self.read(where)
        for name in now.keys() - kept.keys():
            self.drop(where, name)
        for name, part in kept.items():
            if name not in now or now[name] is not part:
                self.put(where, name, part)

    def put(self, where: Any, name: str, part: Any) -> None:
        """Have a name stand for something."""
        where[name] = part

    def drop(self, where: Any, name: str) -> None:
        """Have it stand for nothing."""
        del where[name]


class Attributes(Named):
    """What an object holds: in its dict, and in its slots."""

    def read(self, where: Any) -> dict[str, Any]:
        """Return them; of a module, but for what stands on one that is held."""
        try:
            own = object.__getattribute__(where, "__dict__")
        except AttributeError:
            return objects.own_slots(where)
        held = own | objects.own_slots(where) if objects.slot_names(type(where)) else {**own}
        if isinstance(where, nn.Module):
            ours = (*_STAND_INS, "training") if "train" in held else _STAND_INS
            return {name: part for name, part in held.items() if name not in ours}
        return held

    def write(self, where: Any, kept: dict[str, Any]) -> None:
        """Have it hold that; a module that is held meanwhile, or was, stays in its mode."""
        if isinstance(where, nn.Module) and ("train" in vars(where) or "training" not in kept):
            kept = kept | {"training": where.training}
        super().write(where, kept)

    def put(self, where: Any, name: str, part: Any) -> None:
        """Set an attribute, and call no `__setattr__`."""
        if isinstance(getattr(type(where), name, None), types.MemberDescriptorType):
            object.__setattr__(where, name, part)
        else:
            object.__getattribute__(where, "__dict__")[name] = part

    def drop(self, where: Any, name: str) -> None:
        """Delete one."""
        object.__delattr__(where, name)


class OfClass(Named):
    """The attributes of a class."""

    def read(self, where: type) -> dict[str, Any]:
        """Return all but the interpreter's own; special methods are code like others."""
        own, function = vars(where).items(), types.FunctionType
        return {n: part for n, part in own if n[:2] != "__" or isinstance(part, function)}

    def put(self, where: type, name: str, part: Any) -> None:
        """Set one, and call no metaclass."""
        type.__setattr__(where, name, part)

    def drop(self, where: type, name: str) -> None:
        """Delete one."""
        type.__delattr__(where, name)


@dataclass(slots=True)
class Names(Named):
    """Some entries of a dict: globals that code reads or assigns."""

    names: Iterable[str]

    def read(self, where: dict[str, Any]) -> dict[str, Any]:
        """Return those that there are."""
        return {name: where[name] for name in self.names if name in where}


class Cell(Named):
    """A variable of a closure; the last part of its path is its name."""

    def read(self, where: types.CellType) -> dict[str, Any]:
        """Return it, if it was assigned."""
        try:
            return {intern(self.path.rpartition(".")[2]): where.cell_contents}
        except ValueError:
            return {}

    def put(self, where: types.CellType, name: str, part: Any) -> None:
        """Assign it."""
        where.cell_contents = part

    def drop(self, where: types.CellType, name: str) -> None:
        """Have it be unassigned."""
        del where.cell_contents


@once_per_class
def base_of(kind: type) -> Any:
    """Return the kind of containers whose methods do what none of that class's own does."""
    return next(base for base in MUTABLE if issubclass(kind, base))


class Items(Place):
    """What a container holds; none of its class's code is run."""

    def read(self, where: Any) -> Any:
        """Return its items, in a plain container."""
        base = base_of(type(where))
        if issubclass(base, dict):
            return dict(base.items(where))
        return (set if base is set else list)(base.__iter__(where))

    def write(self, where: Any, kept: Any) -> None:
        """Have it hold these, in their order."""
        base = base_of(type(where))
        if base is list:  # at once: others may read it
            list.__setitem__(where, slice(None), kept)
            return
        base.clear(where)
        if issubclass(base, dict):
            for key, item in kept.items():
                base.__setitem__(where, key, item)
        else:
            (set.update if base is set else deque.extend)(where, kept)


class Length(Place):
    """How long a list is that is too long to be kept."""

    def read(self, where: list[Any]) -> range:
        """Return it as a range of so many."""
        return range(len(where))

    def write(self, where: list[Any], kept: range | int) -> None:
        """Cut it off, or have it be so long, with more of the last; what was taken stays so."""
        if isinstance(kept, range):
            del where[len(kept) :]
        else:
            where += where[-1:] * (kept - len(where))


class Sketch(Place):
    """What shows at once of what is too large to be kept, or is no place: it cannot be put back."""

    def read(self, where: Any) -> tuple[Any, list[Any]] | None:
        """Return what is compared by value, and things by identity; None if nobody can tell."""
        if isinstance(where, types.FunctionType):
            return (), [where.__code__, where.__defaults__, where.__kwdefaults__]
        with Attempt(), torch._C.DisableTorchFunctionSubclass():
            if isinstance(where, Tensor) and where.is_inference():  # it has no version
                where = where.cpu().reshape(-1).view(torch.uint8).numpy()
            if isinstance(where, Tensor):
                place = where.data_ptr() if where.layout == torch.strided else 0
                return (where._version, place, where.shape), []
            if isinstance(where, (np.ndarray, *BUFFERS, *MEMORY)):
                array = where if isinstance(where, np.ndarray) else bytes_in(where)
                some = array.flat[:: array.size // NUM_SEEN if array.nbytes > SMALL_BYTES else 1]
                is_plain = not array.dtype.hasobject
                return ((array.shape, some), []) if is_plain else (array.shape, some.tolist())
            if isinstance(where, LEADS):
                return (), [led_to(where)]
            if isinstance(where, dict | list | set | deque | types.MappingProxyType):
                return len(where), _some_items(where)
            plain, held = list[Any](), list[Any]()
            for part, again in zip(objects.state_of(where), objects.state_of(where), strict=True):
                if part is again and type(part) not in ATOMS:
                    held.append(part)
                else:
                    plain.append(part if type(part) in ATOMS else _anew(part))
            return tuple(plain), held
        return None


def _anew(part: Any) -> str:
    """Say what is made each time it is asked for, and has no identity."""
    items = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return repr(part) if items and ATOMS.issuperset(map(type, items)) else type(part).__name__


def bytes_in(where: Any) -> np.ndarray:
    """Return what a file in memory, or other memory, holds."""
    held = where.getvalue() if isinstance(where, BUFFERS) else memoryview(where)
    return np.frombuffer(held.encode() if isinstance(held, str) else held, np.uint8)


def _some_items(where: Any) -> list[Any]:
    if isinstance(where, list):
        return list.__getitem__(where, slice(None, None, len(where) // NUM_SEEN or 1))
    kind: Any = dict if isinstance(where, dict) else types.MappingProxyType
    parts = (kind.keys(where), kind.values(where)) if isinstance(where, kind) else (where,)
    return [item for part in parts for item in islice(part, NUM_FIRST)]


class Elements(Place):
    """What a tensor, an array, or other memory holds."""

    def read(self, where: Any) -> Any:
        """Return a copy of it."""
        if isinstance(where, Tensor):
            return where.detach().clone()
        if isinstance(where, bytearray | array):
            return where[:]
        return where.copy() if isinstance(where, np.ndarray) else bytes(where)

    def write(self, where: Any, kept: Any) -> None:
        """Copy that into it, of another size where need be."""
        if isinstance(where, Tensor):
            with torch.no_grad():
                if where.shape != kept.shape:
                    where.data = kept.clone()
                where.data.copy_(kept)
        elif isinstance(where, np.ndarray):
            where[...] = kept
        elif isinstance(where, bytearray | array):
            where[:] = kept
        else:
            memoryview(where).cast("B")[:] = kept


_OLD: Any = (random.Random, np.random.RandomState)


class Generator(Place):
    """Where a generator of random numbers is."""

    def read(self, where: Any) -> Any:
        """Return its state, as bytes."""
        if isinstance(where, torch.Generator):
            return where.get_state().numpy().tobytes()
        pickler = pickle.Pickler(found := io.BytesIO())
        pickler.fast = True  # no references, which would depend on who else holds the parts
        pickler.dump(getattr(where, "bit_generator", where).__getstate__())
        return found.getvalue()

    def write(self, where: Any, kept: Any) -> None:
        """Have it go on from there."""
        if isinstance(where, torch.Generator):
            where.set_state(torch.frombuffer(bytearray(kept), dtype=torch.uint8))
        else:
            getattr(where, "bit_generator", where).__setstate__(pickle.loads(kept))

    def seed(self, where: Any, seed: int) -> None:
        """Have it draw others."""
        if isinstance(where, torch.Generator):
            where.manual_seed(seed)
        elif isinstance(where, _OLD):
            where.seed(seed)
        else:
            bits = getattr(where, "bit_generator", where)
            bits.state = type(bits)(seed).state


REACHED = (OfClass, Names, Cell, Items)
"""Where code finds things: globals, variables of closures, of classes; in containers."""
GENERATOR_KINDS = torch.Generator, np.random.Generator, np.random.BitGenerator, *_OLD


def place_of(path: str, value: Any, max_items: int, max_bytes: int) -> Place | None:
    """Return what can be put back of a value as a whole; None if that is nothing, or too much."""
    if isinstance(value, MUTABLE):
        if len(value) <= max_items:
            return Items(path, value)
        return Length(path, value) if isinstance(value, list) else None
    if isinstance(value, Tensor):
        is_dense = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not is_dense or value.is_meta or value.is_inference():
            return None
        return (Sketch if value.nbytes > max_bytes else Elements)(path, value)
    if isinstance(value, np.ndarray):
        is_kept = value.flags.writeable and not value.dtype.hasobject and value.nbytes <= max_bytes
        return Elements(path, value) if is_kept else None
    if isinstance(value, MEMORY):
        return Elements(path, value) if memoryview(value).nbytes <= max_bytes else None
    return Generator(path, value) if isinstance(value, GENERATOR_KINDS) else None


_SKETCHED = (
    Tensor, np.ndarray, *BUFFERS, dict, list, set, deque, types.MappingProxyType,
    types.FunctionType, *MEMORY, *LEADS,
)  # fmt: skip


def sketch_of(path: str, value: Any) -> Sketch | None:
    """Return what a glance sees of what `place_of` keeps nothing of, or only the length."""
    is_shown = isinstance(value, _SKETCHED) or objects.is_pickled_otherwise(type(value))
    return Sketch(path, value) if is_shown else None
