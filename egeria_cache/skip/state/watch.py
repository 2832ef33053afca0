"""Watch the Python state that decides what a frozen prefix computes, for microseconds a batch.

All that may change is laid out as one flat list: the values in every watched module's `__dict__`,
its parameters, buffers, children and hooks, and what lists, dicts and plain objects among them
hold. As long as nothing changed, comparing it is a walk in C, 20 ns a value.
"""

from __future__ import annotations

import gc
import marshal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import _lru_cache_wrapper, partial
from itertools import chain, product, zip_longest
from operator import contains, itemgetter, methodcaller
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from egeria_cache.attempt import Attempt, is_beside
from egeria_cache.pystate import (
    LEADS,
    Code,
    attributes_held,
    bases_of,
    describe,
    digest,
    has_settings,
    in_class,
    is_beyond,
    is_value,
    led_to,
    outside_state,
    own_dict,
    own_slots,
)
from egeria_cache.skip.model.calls import ForwardSlot
from egeria_cache.skip.model.fsdp import marks
from egeria_cache.skip.state.hooks import GLOBAL_HOOKS, HOOKS, global_hooks, hooks_of, own_hooks

_MAX_VALUES = 20_000
"""Values inside of containers and objects that are laid out; beyond it they are not looked into."""
_MAX_DEPTH = 4
_SMALL_BYTES = 1 << 12
"""An array up to this size is compared whole with every batch; of a larger one 16 elements are."""
_TABLES = dict, MappingProxyType
_SLOTS = ("_parameters", "_buffers", "_modules")
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"train", "forward", "_compiled_call_impl"}
"""What every module has; it is watched in ways of its own, or decides nothing."""
_MOOT: dict[str, Any] = {
    "training": nn.Module,  # held modules are put back, whoever set it
    "_is_full_backward_hook": nn.Module,
    "p": nn.modules.dropout._DropoutNd,
    "momentum": nn.modules.batchnorm._NormBase,
}
"""What decides nothing in inference mode, in which skipped modules are, if it is PyTorch's code
alone that reads it: schedules go through all of a model.
"""
_get, _call = itemgetter.__call__, methodcaller("__call__")


def watched_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its class, not PyTorch, gave it."""
    theirs = marks()
    return {
        key: value
        for key, value in vars(module).items()
        if key not in OF_EVERY_MODULE and key not in theirs and not isinstance(value, ForwardSlot)
    }


class _Layout:
    """Lays values out: live containers, and a look at each array and attribute apart."""

    def __init__(self, code: Code, objects: Mapping[int, frozenset[str]]) -> None:
        self._code, self._apart, self._objects = code, code.unread, objects
        self.live: list[tuple[str, Any]] = []
        """(what it is, a container that is compared by the values that it holds now)."""
        self.looks: list[tuple[str, Callable[[], Any]]] = []
        self.named: list[tuple[str, Callable[[], Any]]] = []
        """The same for names that are looked up in several places, which takes longer."""
        self.tensors: list[tuple[str, Tensor]] = []
        self.places: dict[int, tuple[Any, list[str]]] = {}
        """By id: where names are looked up, and those that stand there now."""
        self.absent: list[tuple[Any, str]] = []
        """Where a name would be found that stands nowhere."""
        self._spaces: dict[type, Any] = {}
        self._seen: set[Any] = {*code.unread}
        self._num = 0

    def add_code(self) -> None:
        """Lay out what the code reads beside its arguments: globals and closures."""
        code = self._code
        for (_, key), scope in code.globals.items():
            self.looks.append((f"the global {key!r}", partial(scope.get, key)))
            self.look_at_named(f"the global {key!r}", scope.get(key))
        for kind, key in code.named:
            self.look_up(f"{kind.__qualname__}.{key}", key, self.spaces(kind))
            self.look_into(f"{kind.__qualname__}.{key}", in_class(kind, key))
        for cell in code.cells:
            self.looks.append(("a closure", _cell(cell)))
            self.look_at_named("a closure", _cell(cell)())

    def look_at_named(self, where: str, value: Any) -> None:
        """Look into what some code names; of the user's own objects and classes, at what it names
        of them.
        """
        if not has_settings(value):
            if is_value(value) or isinstance(value, nn.Module):
                self.look_into(where, value)
            return
        if id(value) in self._apart:
            return
        kind = value if isinstance(value, type) else type(value)
        if kind is not value:
            self.looks.append((where, partial(type, value)))
        for key in self._code.in_class_of(value):
            self.look_up(f"{kind.__qualname__}.{key}", key, self.spaces(kind))
            self.look_into(f"{kind.__qualname__}.{key}", in_class(kind, key))
        self._look_at(where, value, self._code.held(value))

    def _look_at(
        self, where: str, value: Any, held: Mapping[str, Any], depth: int = _MAX_DEPTH
    ) -> None:
        """Lay out what an object holds under some names, but for what decides nothing."""
        for key, part in held.items():
            if (id(value), key) not in self._apart:
                self.looks.append((f"{where}.{key}", partial(_attribute, value, key)))
                self.look_into(f"{where}.{key}", part, depth)

    def look_into(self, where: str, value: Any, depth: int = _MAX_DEPTH) -> None:
        """Lay out what a value holds, if it can change in place."""
        if _is_plain(value) or id(value) in self._seen or depth == 0 or self._num > _MAX_VALUES:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append((where, value))
        elif isinstance(value, np.ndarray):
            self.looks.append((where, _array_look(value)))
        elif isinstance(value, LEADS):
            self.looks.append((where, partial(led_to, value)))
            self.look_into(where, led_to(value), depth)
        elif outside_state(value) is not None:
            self.looks.append((where, partial(outside_state, value)))
        elif isinstance(value, (*_TABLES, list, tuple, set, deque)):
            if isinstance(value, _TABLES):
                self.looks.append((where, partial(tuple, value)))
            if not isinstance(value, tuple):
                self.live.append((where, value))
            self._num += len(value)
            keys = list(value) if isinstance(value, _TABLES) else ()
            for item in [*keys, *_values(value)]:
                self.look_into(where, item, depth - 1)
        elif isinstance(value, MethodType | partial):
            for part in gc.get_referents(value):
                self.look_into(where, part, depth)
        elif isinstance(value, _lru_cache_wrapper):
            for part in gc.get_referents(value):
                if isinstance(part, Tensor | np.ndarray):
                    self.look_into(where, part)
        elif isinstance(value, nn.Module):
            self._look_around(where, value)
        elif isinstance(value, ModuleType | type | FunctionType):
            return
        else:
            self._look_into_object(where, value, depth)

    def _look_around(self, where: str, module: nn.Module) -> None:
        """Lay out what is read of a module that is none of the model's, and holds it, or trains."""
        if id(module) in self._code.inside or id(module) in self._code.others:
            return
        named = chain(module.named_parameters(), module.named_buffers())
        self.tensors += [(f"{where}.{key}", t) for key, t in named if not t.requires_grad]
        own = watched_attributes(module)
        self._look_at(where, module, {key: own[key] for key in own if key in self._code.names})

    def _look_into_object(self, where: str, value: Any, depth: int) -> None:
        if isinstance(value, Optimizer):  # and not what it trains
            self.live += ((where, group) for group in value.param_groups)
        elif isinstance(value, LRScheduler):
            self.live.append((where, vars(value)))
        elif (own := own_dict(value)) is not None and not is_beyond(value):
            named = self._objects.get(id(value))
            if named is None and not any((id(value), key) in self._apart for key in own):
                self.look_into(where, own, depth)
            else:
                keys = own if named is None else sorted(named)
                self._look_at(where, value, {key: own.get(key) for key in keys}, depth - 1)
        else:
            self._look_at(where, value, own_slots(value), depth - 1)

    def spaces(self, kind: type) -> list[Any]:
        """Return what a class and its bases hold, each as one object for all who ask."""
        return [self._spaces.setdefault(base, vars(base)) for base in bases_of(kind)]

    def look_up(self, where: str, key: str, places: Sequence[Any]) -> None:
        """Lay out what a name stands for, in the first place that has it."""
        self.named.append((where, partial(_first, places, key)))
        for place in places:
            _, keys = self.places.setdefault(id(place), (place, []))
            if key in place:
                keys.append(key)
                return
        self.absent += ((place, key) for place in places)

    def lay_out(self, where: str, module: nn.Module) -> None:
        """Lay out the attributes of a module, but for what decides nothing."""
        own = vars(module)
        read = [key for key in own if (id(module), key) not in self._apart]
        if len(read) == len(own):
            self.live.append((where, own))
        else:
            self.looks += ((f"{where}.{key}", partial(own.get, key)) for key in read)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, _TABLES) else container


def _apart(container: Any) -> list[Any]:
    """Return what it holds, apart from what stands before if something can be put first."""
    values = _values(container)
    is_named = isinstance(container, dict) and not isinstance(next(iter(values)), nn.Module)
    return [values] if is_named else [_END, values]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _is_number(value: Any, is_loose: bool | None) -> bool:
    """Whether it is a number, or a tuple of some; of those of PyTorch's own layers, which take 1
    for True, if it may be 0.0 or -0.0.
    """
    if type(value) is tuple:
        return all(_is_number(one, is_loose) for one in value)
    return type(value) in ((float, complex) if is_loose else (bool, int, float, complex))


def _array_look(array: np.ndarray) -> Callable[[], Any]:
    if array.dtype == object or array.nbytes <= _SMALL_BYTES:
        return lambda: (array.shape, array.tobytes())
    step = max(1, array.size // 16)
    return lambda: (array.shape, array.flat[::step].tobytes())


class StateWatch:
    """Remembers the Python state around a prefix as it is now, and says what changed.

    Args:
        modules: (name, module) of the skipped modules: everything about them is watched.
        around: (name, module, names): of code that surrounds the boundary only what was seen to be
            read before it returned, be it an attribute, a child, or of the class.
        code: The functions that they run.
        objects: By id of an object that modules hold (a configuration): the attributes of it that
            are read, where that is known. The others decide nothing.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        around: Iterable[tuple[str, nn.Module, Iterable[str]]] = (),
        code: Code | None = None,
        objects: Mapping[int, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self._modules, self._around = list(modules), list(around)
        self._objects = objects
        self._code = code or Code()
        self.rebound = False
        """Whether objects were replaced by equal ones since this was last set to False."""
        self.renew()

    def renew(self) -> None:
        """Take the present state as the one to keep."""
        layout = _Layout(self._code, self._objects)
        self.has_hooks = bool(hooks_of(module for _, module in self._modules))
        for name, module in self._modules:
            layout.lay_out(name, module)
            layout.live += ((name, vars(module)[slot]) for slot in _SLOTS)
            layout.live += ((f"a hook of {name!r}", vars(module)[slot].values()) for slot in HOOKS)
            for key, value in watched_attributes(module).items():
                layout.look_into(f"{name}.{key}", value)
            for hook in own_hooks(module):
                layout.look_into(f"a hook of {name}", getattr(hook, "__self__", hook))
        for name, module, keys in self._around:
            for key in sorted({*keys} - {"_modules"}):
                layout.look_up(f"{name}.{key}" if name else key, key, _places(module, layout))
                layout.look_into(f"{name}.{key}" if name else key, vars(module).get(key))
            if "_modules" in keys:
                where = f"the children of {name!r}" if name else "the children of the model"
                layout.looks.append((where, partial(_children, module)))
        layout.add_code()
        for function in self._code.functions.values():
            if held := attributes_held(function):
                layout.look_into(function.__qualname__, held)
            layout.looks.append((f"the code of {function.__qualname__}", _code_of(function)))
            for value in _code_of(function)()[1:]:
                layout.look_at_named(f"a default of {function.__qualname__}", value)
        for kind, key in product({type(m) for _, m in self._modules}, ("forward", "__call__")):
            layout.look_up(f"{kind.__qualname__}.{key}", key, layout.spaces(kind))
        layout.looks.append(("a global hook", global_hooks))
        self._layout = layout
        # Most hooks' and buffers' dicts are empty: whether they still are is told in 8 ns.
        self._held = [list(_values(container)) for _, container in layout.live]
        self._empty = [container for _, container in layout.live if not container]
        self._empty += (hooks for hooks in GLOBAL_HOOKS if not hooks)
        self._watched = [module for _, module in self._modules]
        layers = {id(vars(module)) for module in self._watched if _is_a(nn.Module, module)}
        full = [container for _, container in layout.live if container]
        full.sort(key=lambda container: id(container) not in layers)
        settings = chain.from_iterable(each for each in full if id(each) in layers)
        loose = [False, *(key not in self._code.names for key in settings)]
        self._iterables = [part for each in full for part in _apart(each)]
        self._seen = [look() for _, look in layout.looks]
        has_global = any(GLOBAL_HOOKS)
        self._looks = [look for _, look in layout.looks if has_global or look is not global_hooks]
        self._named = [look() for _, look in layout.named]
        places = layout.places.values()
        self._places = [place for place, _ in places]
        self._sizes = list(map(len, self._places))
        self._getters = [itemgetter(*keys, keys[0]) for _, keys in places if keys]
        self._found = [place for place, keys in places if keys]
        self._values = self._look()
        both = enumerate(zip_longest(self._values, loose))
        self._numbers = itemgetter(0, 0, *(i for i, each in both if _is_number(*each)))
        # What differs where equal numbers do: 1 and True, 1.0 and 1, 0.0 and -0.0.
        self._exactly = marshal.dumps(self._numbers(self._values), _PLAINLY)
        self._classed = [module for _, module, *_ in (*self._modules, *self._around)]
        self._kinds = list(map(type, self._classed))
        self._absent = list(zip(*layout.absent, strict=True)) or [(), ()]

    def _moot(self) -> set[tuple[int, str]]:
        """Return what decides nothing: (id of a held module's attributes, key)."""
        names = self._code.names
        return {
            (id(vars(module)), key)
            for module in self._watched
            if id(module) not in self._code.others
            for key, kind in _MOOT.items()
            if kind is nn.Module or (_is_a(kind, module) and key not in names)
        }

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of those found inside attributes, containers and objects."""
        return self._layout.tensors

    def _look(self) -> list[Any]:
        """Return all that is there now: it begins with a number."""
        standing = map(_get, self._getters, self._found)
        seen = map(_call, self._looks)
        return [0, *chain.from_iterable(self._iterables), *seen, *chain.from_iterable(standing)]

    def changed(self) -> str | None:
        """Name what changed; values that are equal again count as unchanged. None if nothing."""
        try:
            values = self._look()
            if (
                not any(self._empty)
                and not any(map(contains, *self._absent))
                and values == self._values
                and marshal.dumps(self._numbers(values), _PLAINLY) == self._exactly
                and list(map(len, self._places)) == self._sizes
                and list(map(type, self._classed)) == self._kinds
            ):
                return None
        except Exception as error:  # a comparison of arrays, or a container that shrank meanwhile
            if not is_beside(error):
                raise
        return self._explain()

    def _explain(self) -> str | None:
        """Compare value by value, by content; take over what is only another object."""
        moot = self._moot()
        for (where, container), held in zip(self._layout.live, self._held, strict=True):
            keys = list(container) if isinstance(container, _TABLES) else []
            found = zip_longest(keys, list(_values(container)), held, fillvalue=_NOTHING)
            for key, now, then in found:
                if not (now is then or (id(container), key) in moot or _same(now, then)):
                    return f"{_quoted(_path(where, key))} changed"
        looks = chain(self._layout.looks, self._layout.named)
        for (where, look), seen in zip(looks, chain(self._seen, self._named), strict=True):
            now = look()
            if now is not seen and not _same(now, seen):
                return f"{_quoted(where)} changed"
        if list(map(type, self._classed)) != self._kinds:
            return "a module of the prefix has another class"
        self.renew()
        self.rebound = True
        return None


_PLAINLY = 2
"""The version of `marshal` in which bytes tell nothing of who else holds a value."""
_NOTHING = object()
_END = (_NOTHING,)
"""Stands before a container: what moved out of it into the one before is noticed."""


def _is_a(kind: type, module: nn.Module) -> bool:
    """Whether it is a layer of PyTorch's own, of that kind."""
    return isinstance(module, kind) and type(module).__module__.startswith("torch.nn.modules.")


def _path(where: str, key: Any) -> str:
    return where if key is _NOTHING else f"{where}.{key}" if where else str(key)


def _quoted(where: str) -> str:
    return where if " " in where else repr(where)


_THEMSELVES = (
    nn.Module, FunctionType, MethodType, type, ModuleType, staticmethod, classmethod, property
)  # fmt: skip


def _same(now: Any, then: Any) -> bool:
    """Whether two objects hold the same. Modules, and functions of other code, are themselves."""
    if type(now) is not type(then):
        return False
    if type(now).__module__.startswith("egeria_cache."):  # what holds a module in inference mode
        return True
    if isinstance(now, _THEMSELVES):
        return bool(now == then) or (isinstance(now, FunctionType) and _is_made_again(now, then))
    if isinstance(now, tuple):
        both = zip(now, then, strict=False)
        return len(now) == len(then) and all(a is b or _same(a, b) for a, b in both)
    if isinstance(now, partial):
        pairs = (now.func, then.func), *zip(now.args, then.args, strict=False)
        same = len(now.args) == len(then.args) and now.keywords == then.keywords
        return same and all(a is b or _same(a, b) for a, b in pairs)
    if isinstance(now, Tensor):
        joins_training = now.requires_grad and not then.requires_grad
        return not joins_training and now.shape == then.shape and digest(now) == digest(then)
    with Attempt():
        return describe(now) == describe(then) and (_is_plain(now) or _has_content(now))
    return False


def _is_made_again(now: FunctionType, then: FunctionType) -> bool:
    """Whether one `def` or `lambda` was run twice, around the same cells and defaults."""
    if now.__code__ is not then.__code__ or any((vars(now), vars(then), now.__kwdefaults__)):
        return False
    held = ((f.__globals__, *(f.__closure__ or ()), *(f.__defaults__ or ())) for f in (now, then))
    return len({tuple(map(id, parts)) for parts in held}) == 1


def _has_content(value: Any) -> bool:
    """Whether `describe` says more of it than its class."""
    return isinstance(
        value, Tensor | np.ndarray | dict | list | tuple | set | frozenset | np.generic
    ) or bool(isinstance(getattr(value, "__dict__", None), dict) or own_slots(value))


def _places(module: nn.Module, layout: _Layout) -> list[Any]:
    """Return where Python and PyTorch look up a name of a module, in order."""
    own = vars(module)
    return [own, *(own[slot] for slot in _SLOTS), *layout.spaces(type(module))]


def _first(places: Sequence[Any], key: str) -> Any:
    for place in places:  # asked of each name in every step
        if key in place:
            return place[key]
    return _NOTHING


def _children(module: nn.Module) -> Any:
    return tuple(module._modules.values())


def _attribute(value: Any, key: str) -> Any:
    own = own_dict(value)
    return own[key] if own and key in own else own_slots(value).get(key)


def _cell(cell: Any) -> Callable[[], Any]:
    def look() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return None

    return look


def _code_of(function: FunctionType) -> Callable[[], Any]:
    return lambda: (
        function.__code__, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    )  # fmt: skip
