"""The code that a module's forward is made of: what it does belongs to the content address.

From a class's `forward` the functions that it names are followed: methods of the same class, and
functions of the same globals, but not into PyTorch itself (its version is in the address). Globals
and closures that they read are watched: plain values, and what the code names of objects and
classes of the user's own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from egeria_cache.kinds import is_installed
from egeria_cache.pystate import objects
from egeria_cache.pystate.bytecode import Names, code_text, names_in
from egeria_cache.pystate.content import PLAIN, describe
from egeria_cache.pystate.objects import in_class, is_installed_code, is_library, own_attributes
from egeria_cache.pystate.places import LEADS, parts_of

_MAX_FUNCTIONS = 512
_MAX_HELD, _MAX_DEPTH = 256, 4
"""Items of a container that is searched for functions, and how deep."""
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "functools", "egeria_cache", "egeria_core")
_READS = {"__getattr__", "__getattribute__", "__getitem__"}
"""What an object that has them runs when it is read, under whatever name."""
_MAKES = "__new__", "__init__", "forward"
"""What is run when a class is called, or applied: a function of autograd."""
_RUNS = (
    *_READS, "__call__", "__enter__", "__exit__", "__next__", "__array__", "__get__",
    "__torch_function__",
    "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__matmul__", "__rmatmul__",
    *({n for kind in (int, dict) for n in dir(kind) if n.startswith("__")} - {*dir(object)}),
)  # fmt: skip
"""What is run when an object is used, which no name in the code says: operators, conversions."""
_PLAIN = (
    bool, int, float, Sequence, Mapping, Set, np.ndarray, Tensor, functools.partial, *LEADS,
    types.FunctionType, types.MethodType, functools._lru_cache_wrapper,
)  # fmt: skip
_OF_TENSORS = frozenset(dir(Tensor))
Entry = tuple[types.FunctionType, type | None]
"""A function, and the class in which it finds names."""


@dataclass(slots=True)
class Code:
    """Functions that a forward runs, and what they name beside them."""

    functions: dict[int, types.FunctionType] = field(default_factory=dict)
    """By id, in the order in which they were found."""
    globals: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    """(id of globals, name in them) -> these globals."""
    found: dict[tuple[int, type | None], Any] = field(default_factory=dict)
    """By id, and the class of whose methods a function may be: what it finds there, in closures and
    in what modules hold, while it is followed."""
    named: list[tuple[type, str]] = field(default_factory=list)
    """(class of a module, name that its code finds in it)."""
    cells: list[Any] = field(default_factory=list)
    """Closure cells."""
    names: frozenset[str] = frozenset()
    """All names in it, those of attributes as well."""
    inside: frozenset[int] = frozenset()
    """Ids of the model's modules."""
    others: dict[int, nn.Module] = field(default_factory=dict)
    """By id, modules that are none of these, and that it may run; none that train."""
    libraries: dict[int, types.ModuleType | type] = field(default_factory=dict)
    """By id, those of PyTorch, say, in which it finds names, and the class of tensors."""
    whole: set[Any] = field(default_factory=set)
    """Ids of globals that it reads under names that cannot be told; None if it reads objects so."""
    until: Mapping[types.CodeType, int] = field(default_factory=dict)
    """Offset of the call behind which nothing counts of some code."""
    unread: Mapping[Any, Any] = field(default_factory=dict)
    """What of this decides nothing: by id of a cell or a container, or (id of globals, of a class
    or of an object, name)."""
    given: Sequence[Any] = ()
    """What a call is given to be run, and what that is bound to."""

    def names_in(self, function: types.FunctionType) -> Names:
        """Return the names in one of its functions, as far as that counts."""
        return names_in(function.__code__, self.until.get(function.__code__))

    def digest(self) -> str:
        """Return a hash of all code, with defaults and the values that it names."""
        total = xxhash.xxh3_128()
        for function in self.functions.values():
            total.update(code_text(function.__code__))
            defaults = function.__defaults__, function.__kwdefaults__
            total.update(describe((*defaults, objects.attributes_held(function))))
        found = [(name, scope.get(name)) for (_, name), scope in self.globals.items()]
        found += ((f"{one.__qualname__}.{name}", in_class(one, name)) for one, name in self.named)
        found += (("", cell.cell_contents) for cell in self.cells)
        found += (("", one) for one in self.given)
        for name, value in found:
            total.update(name.encode() + self._describe(value))
        return total.hexdigest()

    def _describe(self, value: Any) -> bytes:
        if not has_settings(value):
            return describe(value if is_value(value) or not own_attributes(value) else type(value))
        kind = _kind(value)
        found = {name: in_class(kind, name) for name in self.in_class_of(value)}
        return describe((kind, found, self.held(value)))

    def in_class_of(self, value: Any) -> list[str]:
        """Return what it reads of an object's class, or of a class, that is not installed, and what
        Python asks for.
        """
        kind = _kind(value)
        if is_installed(kind):
            return []
        asked = {*self.names_of(value), *_RUNS, *(_MAKES if isinstance(value, type) else ())}
        found = self.read_of(kind, asked)
        return [name for name in found if not _is_generated(in_class(kind, name))]

    def names_of(self, value: Any) -> frozenset[str]:
        """Return the names under which it may read of an object's class, or of a class."""
        bases = objects.bases_of(_kind(value)) if None in self.whole else ()
        return self.names.union(*map(vars, bases))

    def read_of(self, kind: type, names: Iterable[str]) -> list[str]:
        """Return the names under which a class has something, and no count."""
        bases = objects.bases_of(kind)
        read = (n for n in sorted(names) if not any((id(base), n) in self.unread for base in bases))
        return [name for name in read if in_class(kind, name) is not None]

    def run_by(self, value: Any, owner: type | None = None) -> Iterator[Entry]:
        """Yield the functions that it may run of what it finds; note the modules."""
        for one in found_in(value):
            if isinstance(one, nn.Module):
                yield from self._run_by_module(one)
            elif isinstance(one, types.ModuleType):
                if _is_library(one.__name__):
                    self.libraries[id(one)] = one
                else:
                    names = *sorted(self.names), "__getattr__"
                    self.note(vars(one), names, whole=None in self.whole)
            elif not has_settings(one):
                yield from ((found, owner) for found in functions_of(one))
            else:
                parts = [in_class(kind := _kind(one), name) for name in self.in_class_of(one)]
                self.found |= {(id(part), kind): part for part in parts if has_settings(part)}
                yield from ((found, kind) for part in parts for found in functions_of(part))

    def note(self, scope: dict[str, Any], names: Iterable[str], *, whole: bool = False) -> None:
        """Note globals that it reads: under these names, or all data."""
        own = scope.items() if whole or id(scope) in self.whole else ()
        plain = [(key, one) for key, one in own if not (key[:2] == "__" or callable(one))]
        data = [key for key, one in plain if is_value(one) or has_settings(one)]
        for name in (name for name in (*names, *data) if name in scope):
            self.found[id(scope[name]), None] = scope[name]
            if not (isinstance(scope[name], types.ModuleType) or scope[name] is sys.modules):
                self.globals[id(scope), name] = scope

    def _run_by_module(self, module: nn.Module) -> Iterator[Entry]:
        parts = list(module.modules())
        if any(id(part) in self.inside for part in parts):  # it is of the model, or around it
            return
        trains = any(parameter.requires_grad for parameter in module.parameters())
        for part in parts:
            flags = [parameter.requires_grad for parameter in part.parameters()]
            if any(flags) or (trains and not flags) or isinstance(part, torch.jit.ScriptModule):
                continue
            self.others[id(part)] = part
            yield from _entered(part, {})

    def named_of(self, value: Any) -> dict[str, Any] | None:
        """Return what it may read of an object of a library's whose code is followed: what it
        names, but for what tensors have as well, and to what properties and tables of its class
        lead from there; all, if names cannot be told. None for other objects.
        """
        kind, own, names = type(value), own_attributes(value), {*self.names}
        if not is_installed(kind) or objects.is_standard(kind) or _is_library(kind.__module__):
            return None
        for base in objects.bases_of(kind):
            for name, part in vars(base).items():
                if isinstance(part, dict):
                    names.update(str(part[key]) for key in part.keys() & self.names)
                elif name in self.names:
                    names.update(n for f in functions_of(part) for n in names_in(f.__code__).all)
        is_all, asked = None in self.whole, names - _OF_TENSORS
        return {name: part for name, part in own.items() if is_all or name in asked}

    def held(self, value: Any) -> dict[str, Any]:
        """Return what it reads of an object; all, if the object has code of its own for that."""
        own = own_attributes(value)
        everything = any(in_class(type(value), name) for name in _READS) or None in self.whole
        names = own.keys() if everything else own.keys() & self.names
        return {name: own[name] for name in sorted(names) if (id(value), name) not in self.unread}


def reached(
    modules: Iterable[nn.Module],
    functions: Iterable[Any] = (),
    unread: Mapping[Any, Any] = types.MappingProxyType({}),
    until: Mapping[types.CodeType, int] = types.MappingProxyType({}),
    forwards: Mapping[int, Any] = types.MappingProxyType({}),
    given: Iterable[Any] = (),
) -> Code:
    """Follow the forwards of these modules, and what else is run: hooks, what modules hold.

    `forwards` has, by id of a module, what its forward is where that is not what is found there;
    `given` what a call brings.
    """
    modules = list(modules)
    inside = frozenset(id(one) for module in modules for one in module.modules())
    bound = [part for one in given for part in (parts_of(one) or [one])]
    code = Code(unread=unread, until=until, inside=inside, given=bound)
    seen = dict[Any, type | None]()
    pending = [entered for module in modules for entered in _entered(module, forwards)]
    entered, before = [*functions, *given, *bound], None
    code.found = {(id(one), None): one for one in entered}
    code.libraries = {id(one): one for one in (builtins, Tensor)}
    while before != (code.names, len(code.found), len(code.whole)):  # what is run depends on all
        before = code.names, len(code.found), len(code.whole)
        others = [(value, owner) for (_, owner), value in code.found.items()]
        pending += (one for other in others for one in code.run_by(*other))
        while pending and len(code.functions) < _MAX_FUNCTIONS:
            function, owner = pending.pop(0)
            if (id(function), owner) in seen or _is_library(function.__module__):
                continue
            seen[id(function), owner] = owner
            code.functions.setdefault(id(function), function)
            _note_named(function, owner, code)
        code.names = frozenset(n for f in code.functions.values() for n in code.names_in(f).all)
        spaces = (vars(one) for one in code.libraries.values())
        theirs = (own[name] for own in spaces for name in code.names & own.keys())
        code.found |= {(id(f), None): f for f in theirs if isinstance(f, types.FunctionType)}
    code.globals = {place: s for place, s in code.globals.items() if place not in unread}
    code.cells = [cell for cell in code.cells if id(cell) not in unread]
    held = (_kind(one) for other in entered for one in found_in(other) if has_settings(one))
    kinds = (*map(type, modules), *(kind for kind in held if not is_installed(kind)))
    owners = dict.fromkeys((*kinds, *filter(None, seen.values())))
    code.named = [(one, name) for one in owners for name in code.read_of(one, code.names_of(one))]
    code.found.clear()
    return code


def _note_named(function: types.FunctionType, owner: type | None, code: Code) -> None:
    """Note what a function names, and what it holds."""
    scope, names = function.__globals__, code.names_in(function)
    of_class = () if owner is None else [in_class(owner, name) for name in names.all]
    code.found |= {(id(one), owner): one for one in of_class if one is not None}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            if name in names.free:
                code.found[id(cell.cell_contents), owner] = cell.cell_contents
                code.cells.append(cell)
    if not is_installed_code(function.__code__):
        code.whole.update(_wholes(function, owner, names))
    code.note(scope, (*names.loaded, *names.imports))
    texts = names.imports if "" in names.whole else ()
    absent = (name for name in (*names.loaded, *texts) if name not in scope)
    code.globals |= {(id(scope), name): scope for name in absent}
    code.note(sys.modules, names.imports)


def _wholes(function: types.FunctionType, owner: type | None, names: Names) -> Iterator[Any]:
    """Yield what a function reads under names that cannot be told; see `Code.whole`. What it reads
    so of the module that it belongs to is noted as it is read.
    """
    itself = tuple[str, ...]()
    if names.whole and owner is not None and issubclass(owner, nn.Module):
        methods = (one for base in objects.bases_of(owner) for one in vars(base).values())
        if any(found is function for one in methods for found in functions_of(one)):
            itself = function.__code__.co_varnames[:1]
    for name in names.whole:
        of = function.__globals__.get(name or "")
        is_known = isinstance(of, types.ModuleType) and _is_library(of.__name__)
        if name not in itself and not is_known:
            yield None if name != "" else id(function.__globals__)


def _entered(module: nn.Module, forwards: Mapping[int, Any]) -> Iterator[Entry]:
    """Yield the functions by which a module is entered."""
    for name in (*objects.entries(module), "__getattr__", "__getattribute__"):
        own = forwards.get(id(module)) if name == "forward" else None
        both = own or module.__dict__.get(name), getattr(type(module), name)
        yield from ((found, type(module)) for one in both for found in functions_of(one))


def found_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yield a value, and what containers and the user's own objects hold, but for plain ones."""
    if type(value) in PLAIN:
        return
    yield value
    if isinstance(value, (types.BuiltinMethodType, functools.partial, *LEADS)):
        value = [one for one in parts_of(value) if not isinstance(one, types.ModuleType)]
    held = own_attributes(value) if has_settings(value) else value
    if isinstance(value, types.FunctionType):
        held = objects.attributes_held(value)
    is_container = isinstance(held, list | tuple | dict | types.MappingProxyType)
    if depth and is_container and len(held) <= _MAX_HELD:
        for one in list(held if isinstance(held, list | tuple) else held.values()):
            yield from found_in(one, depth - 1)


def has_settings(value: Any) -> bool:
    """Whether it is an object, or a class, of the user's own that may hold settings."""
    kind = _kind(value)
    is_theirs = is_library(kind.__module__) and kind not in (types.SimpleNamespace, Namespace)
    if is_theirs or issubclass(kind, nn.Module | Tensor):
        return False
    return isinstance(value, type) or not (objects.is_foreign(value) or is_value(value))


def _is_generated(part: Any) -> bool:
    """Whether it is a method that a data class has made, which names all of its fields."""
    return isinstance(part, types.FunctionType) and part.__code__.co_filename == "<string>"


def is_value(value: Any) -> bool:
    """Whether all that it holds is looked at; of other things that are no settings, which it is."""
    return isinstance(value, _PLAIN) or objects.outside_state(value) is not None


def _kind(value: Any) -> type:
    return value if issubclass(type(value), type) else type(value)  # `list[int]` is none


def functions_of(value: Any) -> Iterator[types.FunctionType]:
    """Look through what wraps a function."""
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            yield value
            value = getattr(value, "__wrapped__", None)
        elif parts := parts_of(value):
            value = parts[0]
        elif value is None or isinstance(value, type | types.ModuleType):
            return
        else:
            # Not by a `__getattr__` of its own, which may raise anything.
            places = objects.own_dict(value) or {}, *map(vars, type(value).__mro__)
            inner = value.__wrapped__ if any("__wrapped__" in one for one in places) else None
            if isinstance(value, functools.singledispatchmethod):
                inner = value.dispatcher
            value = inner if inner is not None else vars(type(value)).get("__call__")


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
