"""What an object is, by content: a print for everything that can be reached from it.

Data sets, their transforms and collate functions decide what a sample is. They are walked: through
attributes, containers, closures, defaults, bound objects, the code of functions and classes, and
the globals that code outside of libraries reads. The result is a flat mapping from a readable path
to a print, so that two portraits can say *where* they differ.

What trains is no data: models, optimizers, loaders, hooks, and an object that holds one of them. A
model of which nothing trains, and that a data set or its transform has, is a part of that.
Any other object that merely lies within reach of some code (a configuration, a data module) may
decide a sample or not: it is looked at, but a sample has the last word (`fingerprint.py`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from egeria_cache.attempt import Attempt
from egeria_cache.kinds import home, is_installed, kind_name
from egeria_cache.pystate import prints as content
from egeria_cache.pystate.bytecode import code_text, is_installed_code, names_in, texts_in
from egeria_cache.pystate.foreign import (
    is_data_set,
    is_frozen,
    is_opaque,
    is_pickled_otherwise,
    is_standard,
    is_training,
    own_attributes,
    state_of,
)
from egeria_cache.pystate.places import LEADS

MAX_NODES = 20_000
"""Objects that are looked at; what lies beyond is left out."""
MAX_ITEMS = 4096
"""Of a container whose elements have to be looked at one by one."""
MAX_DEPTH = 24
_OWN = ("fingerprint", "_fingerprint")
"""What a data set says of itself."""


class Portrait(NamedTuple):
    """What was seen."""

    prints: dict[str, int]
    """Path -> 64-bit print."""
    doubtful: frozenset[str]
    """Paths of objects that may decide nothing, with all that is below them."""

    def differences(self, after: Portrait, leave_out: AbstractSet[str]) -> list[str]:
        """Return the paths that differ, except for those in `leave_out` and all below them."""
        before, now = self.prints, after.prints
        if before == now:
            return []
        paths = dict.fromkeys((*before, *now))
        moved = [path for path in paths if before.get(path) != now.get(path)]
        return [path for path in moved if not is_below(path, leave_out)]


def portrait(roots: Mapping[str, Any], *, thorough: bool = True) -> Portrait:
    """Look at everything that can be reached from `roots`.

    Args:
        roots: Objects by name; of the one named "data set" every attribute counts.
        thorough: Read all of long arrays and lists, as a comparison with another process needs. A
            quick portrait holds within this process only.
    """
    walk = _Walk(thorough)
    for name, value in roots.items():
        with walk.within_reach(name != "data set"):
            walk.visit(name, value, 0)
    return Portrait(walk.prints, frozenset(walk.doubtful))


def _behind(value: Any) -> Any:
    """Return what a context variable or a weak reference leads to now."""
    return value.get(None) if isinstance(value, ContextVar) else value()


def is_below(path: str, tops: AbstractSet[str]) -> bool:
    """Whether a path is one of `tops`, or leads through one of them."""
    return path in tops or any(path.startswith((f"{top}.", f"{top}[")) for top in tops)


class _Walk:
    def __init__(self, thorough: bool) -> None:
        self.prints: dict[str, int] = {}
        self.doubtful: set[str] = set()
        self._is_within_reach = False
        """Whether what is visited was reached by way of code, and belongs to no data set."""
        self._thorough = thorough
        self._bytes_left = content.THOROUGH_BYTES
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # an object that dies would give its id to another

    @contextmanager
    def within_reach(self, is_so: bool = True) -> Iterator[None]:
        """Visit what lies within reach of code, or what belongs to a data set."""
        before, self._is_within_reach = self._is_within_reach, is_so
        try:
            yield
        finally:
            self._is_within_reach = before

    def visit(self, path: str, value: Any, depth: int) -> None:
        if value is None:
            return  # nothing: what is opened or filled lazily leaves no trace before or after
        if type(value) in content.PLAIN:
            self.prints[path] = content.plain_print(value) or 0
            return
        known = self._seen.get(id(value))
        if known is not None or len(self.prints) > MAX_NODES or depth > MAX_DEPTH:
            self._note(path, f"as {known}")
            return
        self._seen[id(value)] = path
        self._alive.append(value)
        try:
            self._look(path, value, depth)
        except (RuntimeError, TypeError, ValueError, AttributeError, OSError):
            self.prints.pop(path, None)  # it cannot be looked at: a handle of some kind

    def _note(self, path: str, text: str | bytes) -> None:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        self.prints[path] = xxhash.xxh3_64_intdigest(data)

    def _look(self, path: str, value: Any, depth: int) -> None:
        if not self._thorough and content.is_long(value):
            self.prints[path] = content.long_print(value)
        elif isinstance(value, Tensor):
            num_bytes = value.nbytes if value.layout == torch.strided else 0
            self.prints[path] = content.tensor_print(value, self._spend(num_bytes))
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            self._array(path, np.asanyarray(value))
        elif isinstance(value, LEADS):
            self.visit(f"{path}.<value>", _behind(value), depth + 1)
        elif isinstance(value, type):
            self._class(path, value, depth)
        elif isinstance(value, ModuleType):
            self._note(path, f"{value.__name__} {getattr(value, '__version__', '')}")
        elif callable(value) and self._function(path, value, depth):
            pass
        elif isinstance(value, Mapping | Sequence | AbstractSet | np.ndarray):
            self._container(path, value, depth)
        else:
            self._object(path, value, depth)

    def _array(self, path: str, array: np.ndarray) -> None:
        self.prints[path] = content.array_print(array, self._spend(array.nbytes))

    def _spend(self, num_bytes: int) -> int:
        """Return how many bytes may be read, for a value of so many."""
        left = self._bytes_left
        self._bytes_left = max(0, left - num_bytes)
        return left

    # ---- containers ---------------------------------------------------------------------------

    def _container(self, path: str, value: Any, depth: int) -> None:
        found = content.plain_print(value)
        if found is not None:
            self.prints[path] = found
            return
        self._note(path, f"{kind_name(type(value))} of {len(value)}")
        if isinstance(value, Mapping):
            for i, (key, item) in enumerate(islice(value.items(), MAX_ITEMS)):
                text = (
                    repr(key)[:80] if type(key) in content.PLAIN else f"{i}: {kind_name(type(key))}"
                )
                self.visit(f"{path}[{text}]", item, depth + 1)
        elif isinstance(value, AbstractSet):
            self._note(path, "|".join(sorted(map(_text, value))))
        else:
            for i in range(0, len(value), max(1, len(value) // MAX_ITEMS)):
                self.visit(f"{path}[{i}]", value[i], depth + 1)
        if type(value) not in (dict, list, tuple):
            self._attributes(path, value, depth)

    # ---- code ---------------------------------------------------------------------------------

    def _function(self, path: str, value: Callable[..., Any], depth: int) -> bool:
        """Look at a function of some kind; False if it is an object that can be called."""
        if isinstance(value, functools.partial):
            self._note(path, "partial")
            for name in ("func", "args", "keywords"):
                self.visit(f"{path}.{name}", getattr(value, name), depth + 1)
        elif isinstance(value, MethodType):
            self._note(path, "method")
            self.visit(f"{path}.{value.__name__}", value.__func__, depth + 1)
            with self.within_reach():
                self.visit(f"{path}.__self__", value.__self__, depth + 1)
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            self._note(path, value.__qualname__)
            if not isinstance(value.__self__, ModuleType | None):
                self.visit(f"{path}.__self__", value.__self__, depth + 1)
        elif isinstance(value, FunctionType):
            with self.within_reach():
                self._python_function(path, value, depth)
        elif isinstance(inner := getattr(value, "__wrapped__", None), FunctionType):
            with self.within_reach():
                self._python_function(path, inner, depth)
        else:
            return False
        return True

    def _python_function(self, path: str, function: FunctionType, depth: int) -> None:
        code = function.__code__
        self.prints[path], names, settings = _look_at_code(code)
        for name, part in (
            ("defaults", function.__defaults__),
            ("kwdefaults", function.__kwdefaults__),
            ("attributes", function.__dict__),
        ):
            if part:
                self.visit(f"{path}.<{name}>", part, depth + 1)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.visit(f"{path}.<{name}>", cell.cell_contents, depth + 1)
            except ValueError:  # not assigned yet
                self._note(f"{path}.<{name}>", "empty")
        for name in names:
            value = function.__globals__.get(name, function)
            if not (value is function or value is os.environ or isinstance(value, ModuleType)):
                self.visit(f"{home(function.__module__)}.{name}", value, depth + 1)
        for name in settings:
            if name in os.environ:
                self._note(f"the environment[{name!r}]", os.environ[name])

    def _class(self, path: str, kind: type, depth: int) -> None:
        """Add a class: its name, and the code and plain values of all that it inherits from; the
        version of what is installed.
        """
        self._note(path, kind_name(kind))
        for base in kind.__mro__[:-1]:
            if is_standard(base) or is_opaque(base):
                continue
            if is_installed(base):
                top = base.__module__.partition(".")[0]
                self._note(top, f"{getattr(sys.modules[top], '__version__', '')}")
                continue
            for name, part in vars(base).items():
                inner = part.__func__ if isinstance(part, staticmethod | classmethod) else part
                inner = inner.fget if isinstance(inner, property) else inner
                if isinstance(inner, FunctionType) or (
                    not name.startswith("__") and _is_value(inner)
                ):
                    self.visit(f"{kind_name(base)}.{name}", inner, depth + 1)

    # ---- objects ------------------------------------------------------------------------------

    def _object(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if is_opaque(kind):
            return
        if is_training(value) and (self._is_within_reach or not is_frozen(value)):
            return
        if is_data_set(value):
            with self.within_reach(False):
                self._parts(path, value, depth)
        elif self._is_within_reach and not callable(value):
            self.doubtful.add(path)
            self._parts(path, value, depth)
        else:
            self._parts(path, value, depth)

    def _parts(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        self._note(path, kind_name(kind))
        if isinstance(value, torch.Generator):
            self._note(path, f"generator {value.initial_seed()}")
            return
        if not is_standard(kind):
            self.visit(kind_name(kind), kind, depth + 1)
        elif kind is not SimpleNamespace and " at 0x" not in (text := repr(value)):
            self._note(path, text)
            return
        own = _own_fingerprint(value)
        if own is not None:
            self.visit(f"{path}.fingerprint", own, depth + 1)
        if own is None and is_pickled_otherwise(kind):
            for i, part in enumerate(state_of(value)):
                self.visit(f"{path}.<{i}>", part, depth + 1)
        elif not self._attributes(path, value, depth, vouched=own is not None):
            self._foreign(path, value, depth)

    def _attributes(self, path: str, value: Any, depth: int, *, vouched: bool = False) -> bool:
        """Visit the attributes; False if there can be none.

        Of an object with a fingerprint of its own only code, other data sets and indices count.
        """
        found = False
        for name, part in own_attributes(value).items():
            found = True
            if not vouched or name == "indices" or (name not in _OWN and _is_active(part)):
                self.visit(f"{path}.{name}", part, depth + 1)
        return found or hasattr(value, "__dict__")

    def _foreign(self, path: str, value: Any, depth: int) -> None:
        """Look at an object of an extension: its memory, or what pickling would keep."""
        try:
            view = memoryview(value)
        except TypeError:
            view = None
        if view is not None and view.contiguous:
            self._array(path, np.frombuffer(view, np.uint8))
        elif self._thorough:
            for i, part in enumerate(state_of(value)):
                self.visit(f"{path}.<{i}>", part, depth)
        else:
            self._note(path, str(id(value)))


def _own_fingerprint(value: Any) -> Any:
    """Return what a data set says of itself; None if it does not."""
    if not is_data_set(value):
        return None
    for name in _OWN:
        # Not what a wrapper hands on from the data set inside of it.
        if name in getattr(value, "__dict__", {}) or any(
            name in base.__dict__ for base in type(value).__mro__
        ):
            own = getattr(value, name)
            with Attempt():
                return own() if callable(own) else own
    return None


def _is_active(value: Any) -> bool:
    """Whether it does something to samples: code, a data set, or several of them."""
    if isinstance(value, list | tuple):
        return any(map(_is_active, value[:8]))
    return callable(value) or isinstance(value, Dataset)


def _is_value(value: Any) -> bool:
    return type(value) in content.PLAIN or isinstance(value, list | tuple | dict | np.ndarray)


def _text(value: Any) -> str:
    text = repr(value)
    return kind_name(type(value)) if " at 0x" in text else text


_CODE: dict[int, tuple[CodeType, int, tuple[str, ...], tuple[str, ...]]] = {}
"""Code by its identity, which keeping it here makes last: its print, what globals it reads, and
what may be variables of the environment."""


def _look_at_code(code: CodeType) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    known = _CODE.get(id(code))
    if known is None:
        digest = xxhash.xxh3_64_intdigest(code_text(code))
        read = () if is_installed_code(code) else names_in(code).loaded
        settings = () if {"environ", "getenv"}.isdisjoint(names_in(code).all) else texts_in(code)
        known = _CODE[id(code)] = code, digest, read, settings
    return known[1:]
