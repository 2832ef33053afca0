"""What an object is, by content: a print for everything that can be reached from it.

Data sets, their transforms and collate functions decide what a sample is. The walk is that of a
`Snapshot`; what it comes by is printed instead of kept. The result is a flat mapping from a
readable path to a print, so that two portraits can say *where* they differ.

What trains is no data: optimizers, loaders, hooks, and an object that holds one of them. A model of
which nothing trains, and that a data set or its transform has, is a part of that. A model that
trains, and what no code names of an object that merely lies within its reach (a configuration, a
data module), may decide a sample or not: it is looked at, but a sample has the last word
(`fingerprint.py`).
"""

from __future__ import annotations

import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from inspect import getattr_static
from itertools import islice
from operator import attrgetter, methodcaller
from threading import local
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import Dataset

from egeria_cache.attempt import Attempt
from egeria_cache.kinds import LIBRARIES, is_installed, kind_name
from egeria_cache.pystate import content, objects, places
from egeria_cache.pystate.bytecode import code_text, names_in, texts_in
from egeria_cache.pystate.content import digest
from egeria_cache.pystate.objects import ATOMS, MEMORY, Reach, is_installed_code, own_attributes
from egeria_cache.pystate.places import LEADS, Attributes, Generator, Names, Place, Sketch
from egeria_cache.pystate.snapshot import Snapshot

_ALL = Reach(lambda value: False, 20_000, 1 << 14, 4096, 1 << 22, sketches=True)
_OWN = ("fingerprint", "_fingerprint")
"""What a data set says of itself."""
_SHOWN = (*places.BUFFERS, local, *LEADS)
_NO_OBJECTS = (
    Tensor, np.ndarray, np.generic, Mapping, Sequence, AbstractSet, property, classmethod, *_SHOWN
)  # fmt: skip
_FOLLOWED = ("torch.utils.data", "typing", "abc", "collections.abc")
"""Whose classes call no method of a user's data set but those that Python names."""
_HOLDING = (types.MethodType, property, types.MemberDescriptorType, *LEADS)
_ENVIRONMENT = frozenset({"environ", "getenv"})
"""With these, texts of code may be names of variables of the environment."""
_GETTERS = attrgetter, methodcaller
_DATA = frozenset({Tensor, np.ndarray, tuple, list, dict})
"""Kinds of which most of a data set's objects are."""


def is_below(path: str, tops: AbstractSet[str]) -> bool:
    """Whether a path is one of `tops`, or leads through one of them."""
    return path in tops or any(path.startswith((f"{top}.", f"{top}[")) for top in tops)


class Portrait(Snapshot):
    """Prints of all that a snapshot comes by.

    Args:
        roots: Objects by name; of the one named "data set" every attribute counts.
        thorough: Read all of long arrays and lists, as a comparison with another process needs, and
            keep nothing. A quick portrait is a snapshot: as long as it `has_moved` not, another
            portrait would be the same, except for what a glance passes over (see `is_whole`); it
            holds within this process only.
    """

    def __init__(self, roots: Mapping[str, Any], *, thorough: bool = True) -> None:
        self.roots = roots
        self._keeps = not thorough
        self._vouched: set[int] = set()
        """Data sets that say themselves what they are."""
        self._made_anew: set[int] = set()
        """What pickling has made, and what that holds: it has no identity."""
        self._told: set[str] = set()
        """Paths of what the print of a container says already."""
        self.is_whole = True
        """Whether all of it is kept: as long as it `has_moved` not, nothing of it has."""
        settings = getattr(os.environ, "_data", {})
        held = places.Items("the environment", settings), places.Items("", roots)
        super().__init__(held=held, reach=_ALL)
        self.prints: dict[str, int] = {}
        """Path -> print."""
        self.doubtful: set[str] = set()
        """Paths of objects that may decide nothing, with all that is below them."""
        self._is_thorough = thorough
        self._bytes_left = content.THOROUGH_BYTES
        self._paths: dict[int, str] = {}
        self._met_again = list[tuple[str, str]]()
        """(path, another path to the same)."""
        self._codes, self._held_methods = list[types.CodeType](), set[int]()
        """Code that was met, and ids of that which is met in another place as well."""
        self._names = set[str]()
        """In the code that was met."""
        self._data_sets: list[tuple[str, Any]] = []
        self._within_reach: dict[int, bool] = {}
        """Whether what has this id was reached by way of code, and belongs to no data set."""
        self._is_told = False
        for name, value in roots.items():
            if not self._is_noted(name, value):
                self._within_reach[id(value)] = name != "data set"
                self._walk(pending := deque([(name, value)]))
                self.is_whole &= not pending
        self._doubt_unnamed()

    def differences(
        self, after: Portrait, leave_out: AbstractSet[str], grown: AbstractSet[str] = frozenset()
    ) -> list[str]:
        """Return the paths that differ, except for those in `leave_out` and all below them, and for
        what there is more or less of in those that have `grown`.
        """
        before, now = self.prints, after.prints
        paths = dict.fromkeys((*before, *now))
        moved = (p for p in paths if before.get(p) != now.get(p) and not is_below(p, leave_out))
        stays = before.keys() & now.keys()
        return [p for p in moved if not (p in grown if p in stays else is_below(p, grown))]

    def _note(self, path: str, what: Any) -> None:
        found = what
        if not isinstance(what, int):
            text = what if isinstance(what, bytes) else what.encode("utf-8", "replace")
            found = xxhash.xxh3_64_intdigest(text)
        if path in self.prints:
            found = xxhash.xxh3_64_intdigest(f"{self.prints[path]},{found}".encode())
        self.prints[path] = found

    def _is_noted(self, path: str, value: Any) -> bool:
        """Note a value that holds no other; False if it is not one. Nothing says nothing: what is
        opened or filled lazily leaves no trace before or after.
        """
        if type(value) not in ATOMS or isinstance(value, objects.CODE_KINDS):
            return False
        if isinstance(value, types.ModuleType):
            self._note(path, f"{value.__name__} {getattr(value, '__version__', '')}")
        elif value is not None:
            self._note(path, content.plain_print(value) or _text(value))
        return True

    def _again(self, path: str, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._held_methods.add(id(value.__code__))
        known = self._paths.get(id(value), path)
        self._met_again.append((known, path))
        if known != path and path not in self._told:
            plain = None if content.is_long(value) else content.plain_print(value)
            self._note(path, f"as {known}" if plain is None else plain)

    def _is_mute(self, value: Any) -> bool:
        if type(value) in _DATA or isinstance(value, _SHOWN):
            return False
        if objects.is_opaque(type(value)) or value is os.environ:
            return True
        return objects.is_training(value) and not isinstance(value, nn.Module)

    def _look(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        within = self._within_reach.get(id(value), False)
        self._paths[id(value)] = path
        is_code = isinstance(value, types.FunctionType | types.MethodType)
        is_data = type(value) in _DATA
        self._keeps = not (self._is_thorough or (not is_data and objects.holds_threads(value)))
        is_object = not (is_data or isinstance(value, _NO_OBJECTS))
        is_set = is_object and not isinstance(value, type) and objects.is_data_set(value)
        is_set |= isinstance(value, Dataset)
        if within and is_object and not is_set and not callable(value):
            held, named = own_attributes(value), _named(self._names, [type(value)])
            unnamed = (f"{path}.{name}" for name in held if name not in named)
            self.doubtful.update(unnamed if held else (path,))
        if isinstance(value, nn.Module) and not objects.is_frozen(value):
            self.doubtful.add(path)
        if is_set and is_object:
            self._data_sets.append((path, value))
        below: list[tuple[str, Any]] = []
        own = _own_fingerprint(value) if is_set else None
        if own is not None:
            self._vouched.add(id(value))
            self.is_whole = False
            if not self._is_noted(f"{path}.fingerprint", own):
                below.append((f"{path}.fingerprint", own))
        self._is_told = path in self._told or self._print(path, value)
        if self._is_thorough and isinstance(value, Tensor):
            return
        if not objects.ends(value):
            below += super()._look(path, value)
        is_within = is_code or (within and not is_set)
        self._within_reach.setdefault(id(type(value)), is_within)
        if id(value) in self._made_anew:
            self._made_anew.update(id(part) for _, part in below)
        for at, part in below:
            self._within_reach.setdefault(id(part), is_within)
            yield at, part

    def _doubt_unnamed(self) -> None:
        """Doubt what data sets of the user's own hold, and no code names that loading may run: the
        number of an epoch that a loop sets, say.
        """
        held = {type(value) for _, value in self._data_sets}
        kinds = [kind for kind in held if issubclass(kind, Dataset) or not is_installed(kind)]
        own = (code for code in self._codes if not is_installed_code(code))
        if (
            len(self.alive) >= _ALL.max_objects  # not all of it was met
            or not all(_is_followed(base) for kind in kinds for base in kind.__mro__)
            or any(names_in(code).whole for code in own)
            or any(isinstance(one, _GETTERS) for one in self.alive.values())
        ):
            return
        methods = _methods(kinds)
        ids = {id(code) for codes in methods.values() for code in codes} - self._held_methods
        run = {name for name in methods if name.startswith("__") and name != "__init__"}
        others = (code for code in self._codes if id(code) not in ids)
        named = _named(run.union(*(names_in(code).all for code in others)), kinds)
        made = [(path, one) for path, one in self._data_sets if not is_installed(type(one))]
        unnamed = {f"{p}.{name}" for p, one in made for name in own_attributes(one).keys() - named}
        # What else leads there may be read.
        again = self._met_again if unnamed else ()
        read = {one for one, other in again if not is_below(other, unnamed)}
        self.doubtful |= {path for path in unnamed if not any(is_below(p, {path}) for p in read)}

    def _keep(self, place: Place) -> list[tuple[str, Any]]:
        """Note what the place holds by name; return what else it holds."""
        if isinstance(place, Names) and str(place.where.get("__file__")).startswith(LIBRARIES):
            return []
        is_pickled = objects.is_pickled_otherwise(type(place.where))
        is_vouched = id(place.where) in self._vouched
        if isinstance(place, Attributes):
            if isinstance(place.where, MEMORY) or (is_pickled and not is_vouched):
                return []  # whose memory it is; what it has worked out
        elif isinstance(place, Generator) or (isinstance(place, Sketch) and is_vouched):
            return []  # a draw makes no other data set
        elif not self._keeps and not isinstance(place, places.Named | Sketch):
            return []
        found = super()._keep(place)
        is_lead = isinstance(place.where, (types.FunctionType, *LEADS))
        is_part = isinstance(place, Sketch | places.Length) and not is_lead
        self.is_whole &= self._keeps and not is_part
        if not self._keeps:
            self.places.pop(), self._kept.pop()
        if isinstance(place, Sketch) and not is_lead:
            if not is_pickled:
                return [(at, part) for at, part in found if type(part) not in ATOMS]
            parts = objects.state_of(place.where)
            made = zip(parts, objects.state_of(place.where), strict=True)
            self._made_anew.update(id(part) for part, again in made if part is not again)
            found = [(f"{place.path}.<{i}>", part) for i, part in enumerate(parts)]
        if isinstance(place, Attributes) and is_vouched:
            indices, *own = (f"{place.path}.{name}" for name in ("indices", *_OWN))
            found = [one for one in found if one[0] == indices or _is_active(one[1])]
            found = [one for one in found if one[0] not in own]
        found = [one for one in found if not one[0].endswith(".__module__")]
        return [(at, part) for at, part in found if not self._is_noted(at, part)]

    def _items(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if self._is_told and (self._is_thorough or len(value) > _ALL.max_items):
            return
        self.is_whole &= len(value) <= _ALL.max_held
        mapping = isinstance(value, Mapping)
        pairs = value.items() if mapping else enumerate(value)
        for key, item in islice(pairs, _ALL.max_held):
            name = repr(key)[:80] if type(key) in content.PLAIN else kind_name(type(key))
            if not (_is_fixed(item) if self._is_told else self._is_noted(f"{path}[{name}]", item)):
                self._told.update([f"{path}[{name}]"] if self._is_told else [])
                yield f"{path}[{name}]", item

    def _is_brief(self, value: Any) -> bool:
        return not self._is_thorough and content.is_long(value)

    def _spend(self, value: Any, num_bytes: int) -> int:
        """Return how many bytes of a tensor or an array of so many may be read."""
        left = self._bytes_left
        self._bytes_left = max(0, left - num_bytes)
        return 0 if self._is_brief(value) else left

    def _print(self, path: str, value: Any) -> bool:
        """Note what a value is, beside what it holds; return whether its items are told as well."""
        if isinstance(value, Tensor):
            num_bytes = value.nbytes if value.layout == torch.strided else 0
            self._note(path, content.tensor_print(value, self._spend(value, num_bytes)))
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            self._array(path, np.asanyarray(value))
        elif isinstance(value, type):
            self._note(path, kind_name(value))
            if is_installed(value) and not objects.is_standard(value):
                top = value.__module__.partition(".")[0]
                self._note(top, f"{getattr(sys.modules[top], '__version__', '')}")
        elif isinstance(value, types.FunctionType):
            code, names = value.__code__, names_in(value.__code__).all
            self._codes.append(code)
            self._names.update(names)
            self._note(path, code_text(code))
            for name in () if _ENVIRONMENT.isdisjoint(names) else texts_in(code):
                if name in os.environ:
                    self._note(f"the environment[{name!r}]", os.environ[name])
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self._note(path, value.__qualname__)
        elif isinstance(value, AbstractSet):
            self._note(path, "|".join(sorted(map(_text, value))))
            return True
        elif self._is_brief(value):
            length, items = Sketch(path, value).read(value) or (0, [])
            kept = [one if type(one) in content.PLAIN else id(one) for one in items]
            self._note(path, f"{length} {kept}")
            return True
        elif (found := content.plain_print(value)) is not None:
            self._note(path, found)
            return True
        elif isinstance(value, dict | list | tuple | deque | types.MappingProxyType):
            self._note(path, f"{kind_name(type(value))} of {len(value)}")
        elif isinstance(value, (*places.BUFFERS, *MEMORY)):
            self._array(path, places.bytes_in(value))
        elif isinstance(value, _HOLDING) or objects.has_attributes(value):
            self._note(path, kind_name(type(value)))
        else:
            self._foreign(path, value)
        return False

    def _array(self, path: str, array: np.ndarray) -> None:
        self._note(path, content.array_print(array, self._spend(array, array.nbytes)))

    def _foreign(self, path: str, value: Any) -> None:
        """Look at an object without attributes: what it shows, its memory, or what pickling would
        keep.
        """
        kind = kind_name(type(value))
        text = _text(value) if objects.is_standard(type(value)) else kind
        is_moving = objects.is_iterator(type(value))  # where it stands makes no other data set
        self._note(path, kind if is_moving else text)
        self.is_whole = False
        if text != kind or is_moving:
            return
        with Attempt() as tried:
            self._array(path, np.frombuffer(memoryview(value), np.uint8))
        if tried.error is None:
            return
        with Attempt():
            if isinstance(value, torch.Generator):
                self._note(path, value.initial_seed())
            elif isinstance(value, places.GENERATOR_KINDS):
                self._note(path, digest(Generator("", value).read(value)))
            elif self._is_thorough or id(value) in self._made_anew:
                self._note(path, digest(objects.state_of(value)))
            else:
                self._note(path, str(id(value)))


def _methods(kinds: Iterable[type]) -> dict[str, list[types.CodeType]]:
    """Return the code of classes' methods and properties, by name."""
    found = dict[str, list[types.CodeType]]()
    for name, part in (part for kind in kinds for b in kind.__mro__ for part in vars(b).items()):
        code = getattr(getattr(part, "fget", part), "__code__", None)
        if code is not None:
            found.setdefault(name, []).append(code)
    return found


def _named(names: AbstractSet[str], kinds: Iterable[type]) -> set[str]:
    """Return names, and those in the methods of classes that are named so."""
    named, left = {*names}, _methods(kinds)
    while called := named & left.keys():
        named.update(n for name in called for code in left.pop(name) for n in names_in(code).all)
    return named


def _is_followed(kind: type) -> bool:
    return not is_installed(kind) or kind.__module__.startswith(_FOLLOWED)


def _is_fixed(value: Any) -> bool:
    return type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value)))


def _own_fingerprint(value: Any) -> Any:
    """Return what a data set says of itself; None if it does not."""
    for name in _OWN:
        # Not what a wrapper hands on from the data set inside of it.
        if getattr_static(value, name, None) is not None:
            own = getattr(value, name)
            with Attempt():
                return own() if callable(own) else own
    return None


def _is_active(value: Any) -> bool:
    """Whether it does something to samples: code, a data set, or several of them."""
    if isinstance(value, list | tuple):
        return any(map(_is_active, value[:8]))
    return callable(value) or isinstance(value, Dataset)


def _text(value: Any) -> str:
    text = repr(value)
    return kind_name(type(value)) if " at 0x" in text else text
