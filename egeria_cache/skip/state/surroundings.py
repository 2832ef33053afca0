"""What a model's code may touch outside of the model: globals, class attributes, global hooks.

Found by what the code of its forwards and hooks reads and assigns, through the helpers that they
call, as far as the code is the user's own: what libraries keep in their globals is their affair.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch.nn.modules.module as registry
from torch import nn

from egeria_cache.pystate import (
    RandomState,
    Remembered,
    entries,
    is_library,
    is_put_back,
    names_in,
    own_dict,
    texts_in,
)
from egeria_cache.skip.state.watch import watched_attributes

_MAX_FUNCTIONS = 4000
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BY_TEXT = "globals", "getattr", "setattr", "vars"
"""With these, code finds by a text what it names."""
_CODE = (FunctionType, MethodType, functools.partial)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class World:
    """All that twins of a model share with it, as it was at one moment."""

    generators: RandomState
    outside: Remembered

    def restore(self, *, for_a_copy: bool = False) -> None:
        """Make it the present one; iterators can only be as they were for a copy of the model."""
        self.outside.restore(for_a_copy=for_a_copy)
        self.generators.restore()


class Surroundings:
    """Finds what the code of a model names.

    Args:
        model: The model.
        shared: Modules that are not copied for a rehearsal.
    """

    def __init__(self, model: nn.Module, shared: Iterable[nn.Module] = ()) -> None:
        self._shared = list(shared)
        self._functions: dict[int, FunctionType] = {}
        self._classes: dict[int, type] = {}
        self._slots: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._hooks = [getattr(registry, name) for name in _GLOBAL_HOOKS]
        self._of_modules: list[Any] = []
        """Their hooks, and what they hold that is not copied with them."""
        for hooks in self._hooks:
            self._visit_all(hooks.values())
        classes = set[type]()
        for module in model.modules():
            own = module.__dict__
            classes.add(type(module))
            classes.update(map(type, own.values()))
            for name in entries(module):
                self._visit(own.get(name))
            self._of_modules += filter(is_put_back, own.values())
            for value in own.values():
                self._visit_all(_callables(value))
            for name in _HOOKS:
                self._visit_all(own.get(name, {}).values())
                self._of_modules += own.get(name, {}).values()
        self._visit_all(classes)

    def now(self) -> World:
        """Remember what they hold at present, and the random generators."""
        roots = [os.environ, *self._shared, *self._roots()]
        outside = Remembered(roots, self._slots.values(), self._classes.values())
        return World(RandomState.now(), outside)

    def __bool__(self) -> bool:
        """Whether there is anything beside modules to remember."""
        return bool(self._roots() or self._slots or self._classes)

    def but_modules(self) -> Remembered:
        """Remember what code of the model may touch outside of it, and what its hooks hold."""
        return Remembered(
            self._roots(), self._slots.values(), self._classes.values(), modules=False
        )

    def _roots(self) -> list[Any]:
        return [*self._functions_with_state(), *self._global_hooks(), *self._of_modules]

    def _functions_with_state(self) -> list[FunctionType]:
        return [
            f for f in self._functions.values() if f.__closure__ or f.__defaults__ or f.__dict__
        ]

    def _global_hooks(self) -> list[Any]:
        return [hook for hooks in self._hooks for hook in hooks.values()]

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._visit(value)

    def _visit(self, value: Any) -> None:
        """Look at the code behind a function, a class, or an object that is called."""
        pending = [value]
        while pending and len(self._functions) < _MAX_FUNCTIONS:
            pending.extend(self._behind(pending.pop()))

    def _behind(self, value: Any) -> Iterator[Any]:
        if isinstance(value, type):
            if id(value) not in self._classes:
                yield from self._behind_class(value)
        elif isinstance(value, FunctionType):
            if id(value) not in self._functions and not is_library(value.__module__):
                self._functions[id(value)] = value
                yield from self._behind_code(value)
        elif isinstance(value, functools.partial):
            yield value.func
        elif isinstance(value, MethodType):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset)
        elif isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif not isinstance(value, ModuleType | nn.Module) and callable(value):
            yield type(value)

    def _behind_class(self, cls: type) -> Iterator[Any]:
        for base in cls.__mro__:
            if id(base) in self._classes or is_library(base.__module__):
                continue
            self._classes[id(base)] = base
            yield from list(vars(base).values())

    def _behind_code(self, function: FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue
        yield from _callables(vars(function).get("registry"))  # of a single dispatch
        names, scope = names_in(function.__code__), function.__globals__
        by_text = not set(names.all).isdisjoint(_BY_TEXT)
        texts = set(texts_in(function.__code__)) if by_text else set[str]()
        for name in (*names.loaded, *names.stored, *(texts & scope.keys())):
            yield from self._behind_name(scope, name, texts.union(names.all))

    def _behind_name(self, where: dict[str, Any], name: str, names: set[str]) -> Iterator[Any]:
        value = where.get(name)
        if isinstance(value, ModuleType):
            if not is_library(value.__name__):
                inner = vars(value)
                for other in names & inner.keys():
                    if not isinstance(inner[other], ModuleType):
                        yield from self._behind_name(inner, other, set())
        elif isinstance(value, type | FunctionType):
            yield value
        else:
            self._slots[id(where), name] = where, name
            yield type(value)
            yield from _callables(value)  # a table of functions, a namespace, what a decorator made
            if not isinstance(value, functools._lru_cache_wrapper):  # which remembers its results
                yield from _callables(own_dict(value))


def _callables(value: Any) -> list[Any]:
    """Return a function kept as an attribute, or those in a container."""
    if isinstance(value, Mapping):
        value = list(value.values())
    found = value if isinstance(value, list | tuple) else [value]
    return [item for item in found if isinstance(item, _CODE)]


def what_code_keeps(model: nn.Module) -> tuple[Remembered, ...]:
    """Remember the attributes of a model's modules, and what its code may touch outside of it.

    Parameters, buffers, children and modes are not among it.
    """
    slots = [(vars(m), key) for m in model.modules() for key in watched_attributes(m)]
    return Surroundings(model).but_modules(), Remembered(slots=slots, modules=False)
