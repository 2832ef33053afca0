"""What a model's code may touch outside of the model: globals, class attributes, global hooks.

Found by what the code of its forwards and hooks reads and assigns, through the helpers that they
call, as far as the code is the user's own: what libraries keep in their globals is their affair.
The model's own state is not among it: a dry run runs on a copy (`prove/model_copy.py`).
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch.nn.modules.module as registry
from torch import nn

from egeria_cache.pystate import (
    CODE,
    MODELS,
    Names,
    OfClass,
    RandomState,
    Reach,
    Snapshot,
    entries,
    found_in,
    is_installed_code,
    is_library,
    is_put_back,
)
from egeria_cache.skip.model.calls import ForwardSlot
from egeria_cache.skip.state.watch import watched_attributes

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class World:
    """All that copies of a model share with it, as it was at one moment."""

    generators: RandomState
    outside: Snapshot
    modules: frozenset[str] = field(default_factory=lambda: frozenset(sys.modules))

    def restore(self, *, for_a_copy: bool = False) -> None:
        """Make it the present one; iterators can only be as they were for a copy of the model."""
        path = [*sys.path]
        self.outside.put_back(copies=for_a_copy)
        self.generators.restore()
        if not all(map(is_library, sys.modules.keys() - self.modules)):
            sys.path[:] = path  # a module that was imported may have added to it, once


def _is_users(entry: Any) -> bool:
    return not isinstance(entry, ForwardSlot)


def _has_state(one: FunctionType) -> bool:
    return any((one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__))


class Surroundings:
    """Finds what the code of a model names.

    Args:
        model: The model.
        shared: Modules that are not copied for a dry run.
    """

    def __init__(self, model: nn.Module, shared: Iterable[nn.Module] = ()) -> None:
        self._shared, self._own = list(shared), frozenset(map(id, model.modules()))
        self._outside = Reach(self._is_beyond, follows_code=False)
        self._hooks = [getattr(registry, name) for name in _GLOBAL_HOOKS]
        self._of_modules: list[Any] = []
        """Their hooks, and what they hold that is not copied with them."""
        code = [hook for hooks in self._hooks for hook in hooks.values()]
        for module in model.modules():
            own = module.__dict__
            held = watched_attributes(module).values()
            code += [type(module), *held]
            there = (own[name] for name in entries(module) if name in own)
            code += [inspect.unwrap(one, stop=_is_users) for one in there]
            for name in _HOOKS:
                self._of_modules += own.get(name, {}).values()
            found = (one for value in held for one in found_in(value))
            self._of_modules += (m for m in found if isinstance(m, nn.Module) or is_put_back(m))
        seen = Snapshot((("", one) for one in [*code, *self._of_modules]), reach=CODE)
        self._places = [one for one in seen.places if isinstance(one, Names | OfClass)]
        found = (one for one in seen.objects if isinstance(one, FunctionType))
        self._functions = [f for f in found if _has_state(f) or not is_installed_code(f.__code__)]

    def now(self) -> World:
        """Remember what they hold at present, and the random generators."""
        roots = [os.environ, sys.path, *self._shared, *self._roots()]
        return World(RandomState.now(), self._snapshot(roots, self._places, MODELS))

    def but_modules(self, moving: Sequence[tuple[nn.Module, str]]) -> Snapshot:
        """Remember what code of the model may touch outside of it, what its hooks hold, and some
        attributes of modules.
        """
        own = [Names("", vars(module), (key,)) for module, key in moving]
        return self._snapshot(self._roots(), [*self._places, *own], self._outside)

    def _is_beyond(self, value: Any) -> bool:
        """Whether it is a module of the model, or what no forward of a frozen front writes to."""
        is_own = isinstance(value, nn.Parameter) or id(value) in self._own
        return is_own or MODELS.lets_be(value)

    def _roots(self) -> list[Any]:
        hooks = (hook for each in self._hooks for hook in each.values())
        return [*self._functions, *hooks, *self._of_modules]

    def _snapshot(
        self, roots: Iterable[Any], places: Iterable[Names | OfClass], reach: Reach
    ) -> Snapshot:
        return Snapshot((("", root) for root in roots), places, reach, self._own)
