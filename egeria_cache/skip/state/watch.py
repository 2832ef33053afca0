"""What Python state decides what a frozen prefix computes, for `guards.py` to compare with it.

All that may change is laid out, once: the values in every watched module's `__dict__`, its
parameters, buffers, children and hooks, and what lists, dicts and plain objects among them hold.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import _lru_cache_wrapper, partial
from itertools import chain, product
from operator import attrgetter
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.modules.module as registry
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from egeria_cache import pystate
from egeria_cache.attempt import Attempt
from egeria_cache.kinds import is_installed
from egeria_cache.pystate import LEADS, PLAIN, Code, describe, digest, own_dict, own_slots
from egeria_cache.skip.model.calls import ForwardSlot
from egeria_cache.skip.model.fsdp import home_of, is_fsdps, is_mark

_MAX_VALUES = 20_000
"""Values inside of containers and objects that are laid out; beyond it they are not looked into."""
_SMALL_BYTES = 1 << 15
"""An array up to this size is compared whole with every batch; of a larger one 16 elements are."""
_MAX_DEPTH = 12
"""Containers, and objects of the user's; others count for three."""
TABLES = dict, MappingProxyType
_LOCKS = type(threading.Lock())
NOTHING = object()
Modules = list[tuple[str, nn.Module]]
"""(name, module)"""
Around = list[tuple[str, nn.Module, Iterable[str]]]
"""(name, module, names in it)"""
_SLOTS = ("_parameters", "_buffers", "_modules")
_BASES = attrgetter("__bases__")
_BACKENDS = attrgetter("cudnn.benchmark", "cudnn.deterministic", "cudnn.enabled", "mkldnn.enabled")
_ASKED = torch.are_deterministic_algorithms_enabled, torch.get_num_threads
"""Settings of PyTorch that code may ask for; a call has the precision in its signature."""
_LOOKED_INTO = nn.Module, Optimizer, LRScheduler, BuiltinMethodType
"""What code names that is no value, and none of the user's own, and is looked into."""
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"train", "forward", "_compiled_call_impl"}
"""What every module has; it is watched in ways of its own, or decides nothing."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = registry._global_forward_hooks, registry._global_forward_pre_hooks
"""Those that PyTorch calls for every module."""


def watched_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its class, not PyTorch, gave it."""
    own = ((key, value) for key, value in vars(module).items() if key not in OF_EVERY_MODULE)
    return {k: one for k, one in own if not (is_mark(k) or isinstance(one, ForwardSlot))}


class Layout:
    """What is watched of a prefix as it is now: live containers, and a look at each array and
    attribute apart. The arguments are those of `PrefixGuard`.
    """

    def __init__(self, modules: Modules, around: Around, code: Code) -> None:
        self._code, self._apart = code, code.unread
        self.live: list[tuple[str, Any]] = []
        """(what it is, a container that is compared by the values that it holds now)."""
        self.looks: list[tuple[str, Callable[[], Any]]] = []
        self.named: list[tuple[str, Callable[[], Any]]] = []
        """The same for names that are looked up in several places, which takes longer."""
        self.tensors: list[tuple[str, Tensor]] = []
        self.places: dict[int, tuple[Any, list[str]]] = {}
        """By id: where names stand, and which."""
        self.passed: dict[int, Any] = {}
        """By id: where some of these are looked up before, and do not stand."""
        self.absent: list[tuple[Any, str]] = []
        """Where a name would be found that stands nowhere."""
        self._spaces: dict[type, Any] = {}
        self._seen: set[Any] = {*code.unread}
        self._pending: deque[tuple[str, Any, int]] = deque()
        self._depth = 0
        self._num = 0
        self._run = {id(module) for _, module, *_ in (*modules, *around)}
        for name, module in modules:
            self._add_module(name, module)
        for name, module, keys in around:
            self._add_around(name, module, {*keys, "forward"} if name else {*keys})
        self._add_code()
        kinds = {type(module) for _, module, *_ in (*modules, *around)}
        for kind, key in product(kinds, ("forward", "__call__")):
            self.look_up(f"{kind.__qualname__}.{key}", key, self.spaces(kind))
        self.looks.append(("a global hook", global_hooks))
        while self._pending and self._num <= _MAX_VALUES:  # the near first
            where, value, self._depth = self._pending.popleft()
            self._look_inside(where, value)

    def _add_module(self, name: str, module: nn.Module) -> None:
        """Lay out all of a skipped module."""
        self.lay_out(name, module, vars(module))
        self.live += ((name, vars(module)[slot]) for slot in _SLOTS)
        for key, tensor in own_tensors(module):
            self._look_at_read(f"{name}.{key}", tensor, _beside(tensor))
        self.live += ((f"a hook of {name!r}", vars(module)[slot].values()) for slot in HOOKS)
        for key, value in watched_attributes(module).items():
            self._look_at_held(f"{name}.{key}", value)
        for hook in own_hooks(module):
            self.look_into(f"a hook of {name}", getattr(hook, "__self__", hook))

    def _add_around(self, name: str, module: nn.Module, keys: set[str]) -> None:
        """Lay out what is read of a module that is not skipped."""
        own, children = vars(module), vars(module)["_modules"]
        for key in sorted(keys - {"_modules"}):
            where = f"{name}.{key}" if name else key
            if (child := children.get(key)) is not None and id(child) not in self._run:
                # Of what runs behind the boundary no more is read than that it is there.
                self.looks.append(
                    (where, partial(lambda own, key: type(own["_modules"].get(key)), own, key))
                )
                continue
            places = [own, *(own[slot] for slot in _SLOTS), *self.spaces(type(module))]
            self.look_up(where, key, places)  # in PyTorch's order
            self._look_at_held(where, own.get(key))
        if "_modules" in keys:
            where = f"the children of {name!r}" if name else "the children of the model"
            self.looks.append((where, partial(own.get, "_modules")))
            self.looks.append((where, partial(tuple, children.values())))

    def _add_code(self) -> None:
        """Lay out what the code reads beside its arguments: globals and closures; and the code."""
        code = self._code
        self.looks += ((f"torch.{f.__name__}", f) for f in _ASKED if f.__name__ in code.names)
        if not code.names.isdisjoint(("backends", "cudnn", "mkldnn")):
            self.looks.append(("torch.backends", partial(_BACKENDS, torch.backends)))
        for (_, key), scope in code.globals.items():
            self.look_up(f"the global {key!r}", key, [scope])
            self.look_at_named(f"the global {key!r}", scope.get(key))
        for module in code.libraries.values():
            space = vars(module)
            for key in sorted(code.names & space.keys()):
                self.look_up(f"{module.__name__}.{key}", key, [space])
        for kind, key in code.named:
            self._look_in_class(kind, key)
        for cell in code.cells:
            self.looks.append(("a closure", partial(_content, cell)))
            self.look_at_named("a closure", _content(cell))
        for one in code.given:
            self.look_at_named("what a call is given", one)
        for function in code.functions.values():
            if held := pystate.attributes_held(function):
                self.look_into(function.__qualname__, held)
            self.looks.append((f"the code of {function.__qualname__}", _code_of(function)))
            for value in _code_of(function)()[1:]:
                self.look_at_named(f"a default of {function.__qualname__}", value)

    def look_at_named(self, where: str, value: Any) -> None:
        """Look into what some code names; of the user's own objects and classes, at what it names
        of them.
        """
        if not pystate.has_settings(value):
            is_plain = pystate.is_value(value) or pystate.is_standard(type(value))
            if is_plain or isinstance(value, _LOOKED_INTO):
                self.look_into(where, value)
            return
        if id(value) in self._apart:
            return
        if not isinstance(value, type):
            self.looks.append((where, partial(type, value)))
            if (own := own_dict(value)) is not None:
                self.looks.append((where, partial(self._code.names.intersection, own)))
        self._look_at_class(value)
        self._look_at(where, value, self._code.held(value))

    def _look_at_class(self, value: Any) -> None:
        """Look at what the code names of an object's class, or of a class."""
        kind = value if isinstance(value, type) else type(value)
        if (kind, kind is value) in self._seen:
            return
        self._seen.add((kind, kind is value))
        for key in self._code.in_class_of(value):
            self._look_in_class(kind, key)

    def _look_in_class(self, kind: type, key: str) -> None:
        self.look_up(where := f"{kind.__qualname__}.{key}", key, self.spaces(kind))
        self._look_at_held(where, pystate.in_class(kind, key))

    def _look_at_held(self, where: str, value: Any) -> None:
        """Look at what a module, or a class, holds: of objects of the user's at what code names; of
        those of a data class at all, for what it has generated reads all.
        """
        is_named = pystate.has_settings(value) and not is_dataclass(value)
        (self.look_at_named if is_named else self.look_into)(where, value)

    def _look_at(self, where: str, value: Any, held: Mapping[str, Any]) -> None:
        """Lay out what an object holds under some names, but for what decides nothing."""
        for key, part in held.items():
            if (id(value), key) not in self._apart:
                self.looks.append((f"{where}.{key}", partial(_attribute, value, key)))
                self.look_into(f"{where}.{key}", part)

    def _look_at_read(self, where: str, value: Any, own: Mapping[str, Any]) -> None:
        """Lay out what the code names of a module's, or a tensor's, own attributes."""
        self._look_at(where, value, {key: own[key] for key in own if key in self._code.names})

    def look_into(self, where: str, value: Any, step: int = 1) -> None:
        """Lay out what a value holds, if it can change in place, when its turn comes."""
        depth = self._depth + step
        if depth <= _MAX_DEPTH and type(value) not in PLAIN and id(value) not in self._seen:
            self._seen.add(id(value))
            self._pending.append((where, value, depth))

    def _look_inside(self, where: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append((where, value))
            self._look_at_read(where, value, _beside(value))
        elif isinstance(value, np.ndarray):
            self.looks.append((where, _array_look(value)))
        elif isinstance(value, LEADS):
            self.looks.append((where, partial(pystate.led_to, value)))
            self.look_into(where, pystate.led_to(value))
        elif pystate.outside_state(value) is not None:
            self.looks.append((where, partial(pystate.outside_state, value)))
        elif isinstance(value, (*TABLES, list, tuple, set, deque)):
            items = values_of(value)
            if isinstance(value, TABLES):
                apart = self._apart_in(value)
                keys_of = partial(_keys_but, apart) if apart else tuple
                self.looks.append((where, partial(keys_of, value)))
                items = chain.from_iterable(pair for pair in value.items() if pair[0] not in apart)
                self.lay_out(where, value, value)
            elif not isinstance(value, tuple):
                self.live.append((where, value))
            self._num += len(value)
            for item in items:
                self.look_into(where, item)
        elif isinstance(value, MethodType | BuiltinMethodType | partial):
            for part in gc.get_referents(value):
                self.look_into(where, part)
        elif isinstance(value, _lru_cache_wrapper):
            kept = gc.get_referents(value)
            for part in chain(kept, *(one.values() for one in kept if isinstance(one, dict))):
                if isinstance(part, Tensor | np.ndarray) or pystate.has_settings(part):
                    self.look_into(where, part)
        elif isinstance(value, _LOCKS):
            if "locked" in self._code.names:
                self.looks.append((where, value.locked))
        elif isinstance(value, nn.Module):
            self._look_around(where, value)
        elif isinstance(value, ModuleType | type | FunctionType):
            return
        else:
            self._look_into_object(where, value)

    def _look_around(self, where: str, module: nn.Module) -> None:
        """Lay out what is read of a module that is none of the model's, and holds it, or trains."""
        if id(module) in self._code.inside or id(module) in self._code.others:
            return
        for part in module.modules():
            if id(part) not in self._code.inside:  # of the model others see to that
                self.tensors += [(f"{where}.{key}", one) for key, one in own_tensors(part)]
        self._look_at_read(where, module, watched_attributes(module))

    def _look_into_object(self, where: str, value: Any) -> None:
        if pystate.has_settings(value):
            self._look_at_class(value)
        if isinstance(value, Optimizer):  # and not what it trains
            self.live += ((where, group) for group in value.param_groups)
        elif isinstance(value, LRScheduler):
            self.live.append((where, vars(value)))
        elif (own := own_dict(value)) is not None and not pystate.is_beyond(value):
            if (named := self._code.named_of(value)) is not None:
                self._look_at(where, value, named)
            elif apart := self._apart_in(value):
                self.looks.append((where, partial(_keys_but, apart, own)))
                self._look_at(where, value, own)
            else:
                self.look_into(where, own, 2 * is_installed(type(value)))
        else:
            self._look_at(where, value, own_slots(value))

    def _apart_in(self, value: Any) -> set[Any]:
        """Return the names in it that decide nothing."""
        marks = (mark for mark in self._apart if isinstance(mark, tuple))
        return {key for holder, key in marks if holder == id(value)}

    def spaces(self, kind: type) -> list[Any]:
        """Return what a class and its bases hold, each as one object for all who ask."""
        for base in (bases := pystate.bases_of(kind)):
            if base not in self._spaces and not is_installed(base):
                self.looks.append((f"what {base.__qualname__} inherits", partial(_BASES, base)))
        return [self._spaces.setdefault(base, vars(base)) for base in bases]

    def look_up(self, where: str, key: str, places: Sequence[Any]) -> None:
        """Lay out what a name stands for, in the first place that has it."""
        self.named.append((where, partial(_first, places, key)))
        for i, place in enumerate(places):
            if key in place:
                self.places.setdefault(id(place), (place, []))[1].append(key)
                self.passed |= {id(one): one for one in places[:i]}
                return
        self.absent += ((place, key) for place in places)

    def lay_out(self, where: str, holder: Any, own: Mapping[Any, Any]) -> None:
        """Lay out the attributes of a module, or a dict, but for what decides nothing."""
        read = [key for key in own if (id(holder), key) not in self._apart]
        if len(read) == len(own):
            self.live.append((where, own))
        else:
            self.looks += ((f"{where}.{key}", partial(own.get, key)) for key in read)


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of a module's own parameters and buffers."""
    both = chain(module._parameters.items(), module._buffers.items())
    return [(key, tensor) for key, tensor in both if tensor is not None]


def _beside(tensor: Tensor) -> dict[str, Any]:
    return ({"grad": tensor.grad} if tensor.is_leaf else {}) | vars(tensor)


def _keys_but(apart: set[Any], table: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(key for key in table if key not in apart)


def values_of(container: Any) -> Any:
    """Return what a container holds; of one with names, not these."""
    return container.values() if isinstance(container, TABLES) else container


def _array_look(array: np.ndarray) -> Callable[[], Any]:
    if array.dtype == object or array.nbytes <= _SMALL_BYTES:
        return lambda: (array.shape, array.tobytes())
    step = max(1, array.size // 16)
    return lambda: (array.shape, array.flat[::step].tobytes())


_THEMSELVES = (
    nn.Module, FunctionType, MethodType, type, ModuleType, staticmethod, classmethod, property
)  # fmt: skip


def is_alike(now: Any, then: Any) -> bool:
    """Whether two objects hold the same. Modules, and functions of other code, are themselves."""
    if type(now) is not type(then):
        return False
    if type(now).__module__.startswith("egeria_cache."):  # what holds a module in inference mode
        return True
    if isinstance(now, _THEMSELVES):
        return bool(now == then) or (isinstance(now, FunctionType) and _is_made_again(now, then))
    if isinstance(now, partial):
        now, then = ((one.func, *one.args, one.keywords) for one in (now, then))
    if isinstance(now, tuple):
        both = zip(now, then, strict=False)
        return len(now) == len(then) and all(a is b or is_alike(a, b) for a, b in both)
    if isinstance(now, Tensor):
        joins_training = now.requires_grad and not then.requires_grad
        return not joins_training and now.shape == then.shape and digest(now) == digest(then)
    with Attempt():
        text, kind = describe(now), type(now)
        says_more = text != f"={kind.__qualname__}".encode() or issubclass(kind, set | frozenset)
        return (says_more or own_dict(now) is not None) and text == describe(then)
    return False


def _is_made_again(now: FunctionType, then: FunctionType) -> bool:
    """Whether one `def` or `lambda` was run twice, around the same cells and defaults."""
    if now.__code__ is not then.__code__ or any((vars(now), vars(then), now.__kwdefaults__)):
        return False
    held = ((f.__globals__, *(f.__closure__ or ()), *(f.__defaults__ or ())) for f in (now, then))
    return len({tuple(map(id, parts)) for parts in held}) == 1


def _first(places: Sequence[Any], key: str) -> Any:
    for place in places:  # asked of each name in every step
        if key in place:
            return place[key]
    return NOTHING


def _attribute(value: Any, key: str) -> Any:
    if key == "grad" and isinstance(value, Tensor):
        return value.grad
    own = own_dict(value)
    return own[key] if own and key in own else own_slots(value).get(key)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _code_of(function: FunctionType) -> Callable[[], Any]:
    return lambda: (
        function.__code__, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    )  # fmt: skip


# ---- hooks of the user on modules of the prefix: they read features, count, or edit ------------


def hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the forward hooks of these modules, and those that PyTorch calls for every module."""
    return [*global_hooks(), *chain.from_iterable(map(own_hooks, modules))]


def own_hooks(module: nn.Module) -> list[Any]:
    """Return the forward hooks of one module, but FSDP's."""
    hooks = (hook for slot in HOOKS for hook in vars(module)[slot].values())
    return [hook for hook in hooks if not is_fsdps(hook)]


def global_hooks() -> list[Any]:
    """Return those that PyTorch calls for every module, but its own, which look on."""
    return [hook for hooks in GLOBAL_HOOKS for hook in hooks.values() if _is_users(hook)]


def has_user_hooks(module: nn.Module) -> bool:
    """Whether calls of this module fire hooks that are no library's own, nor ours."""
    return any(map(_is_users, own_hooks(module)))


def has_hooks_inside(module: nn.Module, counted: Callable[..., Any] = has_user_hooks) -> bool:
    """Whether one below it has such hooks: they fire only if the module runs."""
    return any(counted(m) for m in module.modules() if m is not module)


def hook_of_training(module: nn.Module) -> str | None:
    """Return the name of a forward hook whose code asks whether the module trains.

    What it does in training alone (NEFTune's noise) would be off in a module held in inference
    mode. PyTorch's own hooks are meant for both modes.
    """
    functions = chain.from_iterable(map(pystate.functions_of, own_hooks(module)))
    return next((one.__qualname__ for one in functions if _asks_for_training(one)), None)


def _asks_for_training(function: FunctionType, depth: int = 2) -> bool:
    """Whether its code does, or that of a function that it names."""
    if (function.__module__ or "").partition(".")[0] == "torch":
        return False
    if "training" in function.__code__.co_names:
        return True
    with suppress(ValueError):  # what it closes over is not there yet
        named = inspect.getclosurevars(function)
        helpers = (*named.nonlocals.values(), *named.globals.values()) if depth else ()
        inner = chain.from_iterable(map(pystate.functions_of, helpers))
        return any(_asks_for_training(one, depth - 1) for one in inner)
    return False


def _is_users(hook: Any) -> bool:
    return not pystate.is_library(home_of(hook))
