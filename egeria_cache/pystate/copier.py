"""Copy Python state without running any of the user's code.

No constructor, no `__deepcopy__`, no `__getstate__`: those act (they open, register, draw, count).
Parameters are shared, as are other worlds (`objects.py`); everything else that can change is
copied, aliases and cycles included. What is copied is written to by a dry run in place of the
user's own.
"""

from __future__ import annotations

import array
import copy
import functools
import random
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from egeria_cache.errors import BoundaryError
from egeria_cache.kinds import once_per_class
from egeria_cache.pystate import objects
from egeria_cache.pystate.objects import ATOMS, MEMORY, StandIn, is_foreign, own_dict
from egeria_cache.pystate.places import GENERATOR_KINDS, MUTABLE, Cell, Items, base_of

_MAX_OBJECTS = 300_000
_MAX_BYTES = 2 << 30
_MAX_DEPTH = 150


class Uncopied:
    """Stands on a copy for what has a state and cannot be copied: a running generator, a file."""

    def __init__(self, where: str) -> None:
        self.__dict__["_where"] = where

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name != "__next__":
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *args: Any) -> NoReturn:
        raise BoundaryError(
            f"{self.__dict__['_where']} cannot be copied, so that a dry run would use it up; "
            "keep it out of the model's forward"
        )

    __iter__ = __next__ = __call__ = __enter__ = __setattr__ = __getitem__ = __setitem__ = _refuse


def _whole(value: Tensor) -> Tensor:
    """Return a copy of all the memory that a tensor is a view of, as elements like its own.

    By operators of tensors: storages are copied by none that every device has.
    """
    plain = value.detach().conj() if value.is_conj() else value.detach()
    num = plain.untyped_storage().nbytes() // plain.element_size()
    return plain.as_strided((num,), (1,), 0).clone()


class Copier:
    """Copies objects; whatever is reached twice is copied once.

    Args:
        models: Their parameters, and all that lies in the memory of one, are shared.
        change: Given each parameter and buffer, what a copy has in its place.
    """

    def __init__(
        self, *models: nn.Module, change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._change = change
        self.weights: list[tuple[str, Tensor]] = []
        """(name, parameter) of those that the copies share with the originals."""
        self.pairs: dict[int, tuple[Any, Any]] = {id(one): (one, one) for one in objects.SINGLES}
        """Id of an original -> (it, which keeps the id its own; its copy)."""
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._where: list[str] = []
        self._num_bytes = self._depth = 0
        weights = (p for one in models for p in one.parameters() if type(p) is nn.Parameter)
        self._fixed = {p.untyped_storage()._cdata for p in weights if p.layout == torch.strided}

    def __call__(self, value: Any) -> Any:
        """Return a copy, or `value` itself if it is shared."""
        if type(value) in ATOMS:
            return value
        known = self.pairs.get(id(value))
        if known is not None:
            return known[1]
        if len(self.pairs) > _MAX_OBJECTS or self._depth > _MAX_DEPTH:
            return value
        self._depth += 1
        try:
            return _maker_of(type(value))(self, value)
        finally:
            self._depth -= 1

    def of(self, value: Any) -> Any:
        """Return the copy that was made of `value`; itself if it is shared."""
        return self.pairs.get(id(value), (value, value))[1]

    def _keep(self, value: Any, new: Any) -> Any:
        self.pairs[id(value)] = (value, new)
        return new

    def _path(self) -> str:
        inner = ("_modules", "_buffers", "_parameters")
        return ".".join(key for key in self._where if key not in inner) or "the model"

    # ---- modules and tensors ------------------------------------------------------------------

    def _module(self, value: nn.Module) -> Any:
        if is_shared(value):
            path = self._path()
            self.weights += [(f"{path}.{name}", p) for name, p in value.named_parameters()]
            return self._keep(value, value)
        return self._object(value)

    def _tensor(self, value: Tensor) -> Any:
        if is_lazy(value):  # made by the first call, of the copy as well
            make: Any = type(value)
            like = {"device": value.device, "dtype": value.dtype}
            return self._keep(value, make(requires_grad=value.requires_grad, **like))
        if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf):
            if self._change is not None:
                return self._keep(value, self._change(value))
            self.weights.append((self._path(), value))
            return self._keep(value, value)
        if type(value) is not Tensor or value.is_meta:
            return self._keep(value, value)
        if value.layout != torch.strided or value.is_quantized:
            return self._keep(value, value.detach().clone())
        storage = value.untyped_storage()
        if storage._cdata in self._fixed and self._change is None:
            return self._keep(value, value)
        new = self._in_new_storage(value, storage)
        if self._change is not None:
            new = self._change(new)
        if value.__dict__:
            new.__dict__.update(self(value.__dict__))
        return self._keep(value, new)

    def _in_new_storage(self, value: Tensor, storage: Any) -> Tensor:
        if value.is_inference():
            with torch.inference_mode():
                return value.clone()
        with torch.inference_mode(False):
            if value.requires_grad:  # made from what is trained, which autograd shall know
                with torch.enable_grad():
                    return value.clone()
            key = storage._cdata, value.dtype
            with torch.no_grad():
                if key not in self._storages:
                    self._num_bytes += storage.nbytes()
                    if self._num_bytes > _MAX_BYTES:
                        return value
                    self._storages[key] = _whole(value)
                place = value.shape, value.stride(), value.storage_offset()
                new = self._storages[key].as_strided(*place).detach()
                return new.conj() if value.is_conj() else new

    def _array(self, value: np.ndarray) -> Any:
        base = value.base
        if type(value) not in (np.ndarray, np.recarray, np.matrix):
            return self._keep(value, value)
        if type(base) is np.ndarray and base.base is None:
            start = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
            whole = self(base)
            if whole is not base and base.flags.forc:
                new = np.ndarray(value.shape, value.dtype, whole, start, value.strides)
                return self._keep(value, new.view(type(value)))
        self._num_bytes += value.nbytes
        if self._num_bytes > _MAX_BYTES:
            return value
        new = self._keep(value, value.copy(order="K"))
        if value.dtype == object:
            for i, item in enumerate(value.flat):
                new.flat[i] = self(item)
        return new

    def _generator(self, value: Any) -> Any:
        if isinstance(value, np.random.Generator):
            return self._keep(value, type(value)(self(value.bit_generator)))
        if not isinstance(value, random.Random):
            return self._keep(value, copy.deepcopy(value))
        kind: Any = type(value)
        new = self._keep(value, kind.__new__(kind))  # its constructor may take anything
        new.setstate(value.getstate())
        new.__dict__.update(self._each(value.__dict__))
        return new

    # ---- containers ---------------------------------------------------------------------------

    def _container(self, value: Any) -> Any:
        kind = type(value)
        new = self._keep(value, base_of(kind).__new__(kind))
        if isinstance(value, deque):
            deque.__init__(new, (), value.maxlen)
        elif isinstance(value, defaultdict):
            defaultdict.__init__(new, self(value.default_factory))
        if value:
            items = Items("", value)
            items.write(new, self._each(items.read(value)))
        if kind.__module__ != "builtins" and (own := own_dict(value)):
            object.__getattribute__(new, "__dict__").update(self._each(own))
        return new

    def _each(self, held: Any) -> Any:
        """Return copies of what something holds."""
        if not isinstance(held, dict):
            return type(held)(map(self, held))
        copies = {}
        for key, item in list(held.items()):
            is_named, kind = type(key) is str, type(item)
            key = key if is_named else self(key)
            if kind in ATOMS:
                copies[key] = item
            elif kind is OrderedDict and not (item or item.__dict__):  # a module has ten, of hooks
                copies[key] = self.pairs.setdefault(id(item), (item, OrderedDict()))[1]
            else:
                self._where.append(key if is_named else "[...]")
                copies[key] = self(item)
                self._where.pop()
        return copies

    def _fixed_items(self, value: Any) -> Any:
        """Return a tuple or a frozen set of copies; itself, if all in it is shared."""
        if ATOMS.issuperset(map(type, value)):
            return value
        items = [self(item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        base: Any = tuple if isinstance(value, tuple) else frozenset
        known = self.pairs.get(id(value))  # a cycle through it has made it
        return self._keep(value, base.__new__(type(value), items)) if known is None else known[1]

    # ---- code that is bound to something ------------------------------------------------------

    def _function(self, value: types.FunctionType) -> Any:
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        if not (cells or value.__defaults__ or value.__kwdefaults__ or value.__dict__):
            return value
        new = types.FunctionType(value.__code__, value.__globals__, closure=cells or None)
        self._keep(value, new)
        held = [value.__defaults__, value.__kwdefaults__, *value.__dict__.values()]
        copies = [self(item) for item in held]
        same = all(a is b for a, b in zip(held, copies, strict=True))
        for cell, before in zip(cells, value.__closure__ or (), strict=True):
            for content in Cell("", before).read(before).values():  # none, if it is empty
                cell.cell_contents = self(content)
                same &= cell.cell_contents is content
        if same:  # others compare functions by identity
            return self._keep(value, value)
        new.__defaults__, new.__kwdefaults__ = copies[0], copies[1]
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(new, name, getattr(value, name))
        new.__dict__.update(zip(value.__dict__, copies[2:], strict=True))
        return new

    def _method(self, value: types.MethodType) -> Any:
        new = self(owner := value.__self__)
        if isinstance(owner, StandIn) and not owner.is_copied:  # a dry run runs the model's own
            return new
        return value if new is owner else types.MethodType(self(value.__func__), new)

    def _our_own(self, value: StandIn) -> Any:
        return self._object(value) if value.is_copied else self(value.__wrapped__)

    def _builtin_method(self, value: types.BuiltinMethodType) -> Any:
        new = self(owner := value.__self__)
        if new is owner:
            return value
        return new if isinstance(new, Uncopied) else getattr(new, value.__name__)

    def _partial(self, value: functools.partial[Any]) -> Any:
        owner = getattr(value.func, "__self__", value.func)
        # A handler of `intercept` knows the modules themselves.
        ours = getattr(owner, "__module__", "").startswith(("egeria_cache.", "egeria_core."))
        args = [arg if ours and isinstance(arg, nn.Module) else self(arg) for arg in value.args]
        return self._keep(value, type(value)(self(value.func), *args, **self._each(value.keywords)))

    # ---- what else there is -------------------------------------------------------------------

    def _lock(self, value: Any) -> Any:
        return self._keep(value, value if value.locked() else threading.Lock())

    def _own_lock(self, value: Any) -> Any:
        return self._keep(value, value if value._is_owned() else threading.RLock())

    def _weak(self, value: weakref.ref[Any]) -> Any:
        new = self(target := value())
        return value if new is target else self._keep(value, weakref.ref(new))

    def _other(self, value: Any) -> Any:
        if (passes := _maker_of(value.__class__)) is not Copier._other:  # a proxy
            return passes(self, value)
        if not objects.leads_out(value):
            return value if is_foreign(value) else self._object(value)
        new: Any = Uncopied(f"{self._path()} ({type(value).__name__})")
        if isinstance(value, threading.local):
            new = self._keep(value, type(value)())
            new.__dict__.update(self(value.__dict__))
        elif isinstance(value, bytearray | array.array):
            new = value[:]
        elif isinstance(value, MEMORY):
            make: Any = type(value)  # pickling, and so `copy.copy`, takes none with pointers
            new = make.from_buffer_copy(value)
        elif (copied := objects.iterator_copy(value)) is not value:
            new = copied
        return self._keep(value, new)

    def _object(self, value: Any) -> Any:
        own, slots = own_dict(value), objects.slot_names(type(value))
        if own is None and not slots:
            return value
        base: Any = types.SimpleNamespace if isinstance(value, types.SimpleNamespace) else object
        try:
            new = base.__new__(type(value))
        except TypeError:  # made in C
            return value
        self._keep(value, new)
        if own is not None:
            object.__getattribute__(new, "__dict__").update(self._each(own))
        for name in slots:
            with suppress(AttributeError):  # not set
                object.__setattr__(new, name, self(object.__getattribute__(value, name)))
        return new


@once_per_class
def _maker_of(kind: type) -> Callable[[Copier, Any], Any]:
    return next((make for base, make in _MAKERS if issubclass(kind, base)), Copier._other)


def is_shared(module: nn.Module) -> bool:
    """Whether a module is compiled: a copy would be compiled anew, or cannot be made."""
    is_compiled = isinstance(module, torch.jit.ScriptModule) or objects.is_compiled(module)
    return is_compiled or hasattr(type(module).forward, "_torchdynamo_orig_callable")


_MAKERS: tuple[tuple[Any, Callable[[Copier, Any], Any]], ...] = (
    (MUTABLE, Copier._container), ((tuple, frozenset), Copier._fixed_items),
    (StandIn, Copier._our_own), (nn.Module, Copier._module),
    (Tensor, Copier._tensor), (np.ndarray, Copier._array),
    (GENERATOR_KINDS, Copier._generator), (functools.partial, Copier._partial),
    (weakref.ref, Copier._weak), (types.FunctionType, Copier._function),
    (types.MethodType, Copier._method),
    (types.BuiltinMethodType | types.MethodWrapperType, Copier._builtin_method),
    (type(threading.Lock()), Copier._lock),
    (type(threading.RLock()), Copier._own_lock),
)  # fmt: skip
