"""What lies beyond a model: worlds that a dry run neither copies nor looks into."""

from __future__ import annotations

import array
import contextlib
import copyreg
import ctypes
import enum
import gc
import io
import itertools
import logging
import mmap
import random
import sys
import threading
import types
import warnings
from ast import literal_eval
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from types import BuiltinMethodType, CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.hooks import RemovableHandle

from egeria_cache.device import FOREIGN_PACKAGES
from egeria_cache.kinds import LIBRARIES, is_installed, once_per_class

ATOMS: frozenset[type] = frozenset((
    type(None), bool, int, float, complex, str, bytes, range, slice, type, ModuleType,
    type(Ellipsis), type(NotImplemented), torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, CodeType, FrameType, property, classmethod, staticmethod,
    random.SystemRandom,
))  # fmt: skip
"""Kinds of values that nobody can change."""

_CLASSES = (
    type, ModuleType, enum.Enum, str, bytes, int, float, complex, BaseException, io.IOBase,
    logging.Logger, logging.Handler, logging.LoggerAdapter, threading.Thread, threading.local,
    Dataset, DataLoader, Sampler, Optimizer, LRScheduler,
    torch.jit.ScriptFunction, np.generic, np.dtype,
)  # fmt: skip
_WORLDS = *FOREIGN_PACKAGES, *(f"{name}." for name in (
    "_thread", "accelerate", "asyncio.base_events", "asyncio.base_futures",
    "asyncio.base_subprocess", "asyncio.base_tasks", "asyncio.events", "asyncio.futures",
    "asyncio.tasks", "asyncio.unix_events", "asyncio.windows_events", "asyncio.windows_utils",
    "concurrent", "datetime", "decimal", "deepspeed", "egeria_bench", "egeria_cache", "egeria_core",
    "fractions",
    "h5py", "lightning", "lightning_fabric", "lmdb", "logging", "mlflow", "mmap", "multiprocessing",
    "pathlib", "pytorch_lightning", "ray", "re", "select", "socket", "sqlite3", "subprocess",
    "tempfile", "tensorboard", "tensorboardX", "torch._C", "torch._dynamo", "torch.distributed",
    "torch.optim", "torch.utils.data", "torch.utils.tensorboard", "wandb", "zmq",
))  # fmt: skip
_VALUES = (str, bytes, int, float, complex, tuple, frozenset, np.ndarray)
CODE_KINDS = (types.FunctionType, type, property, staticmethod, classmethod)
CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
_SHARED = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
"""Memory that other processes may write to."""
MEMORY = (array.array, bytearray, *_SHARED)
"""Memory made in C that can be copied."""
_OUTSIDE = {
    "_bz2", "_blake2", "_csv", "_elementtree", "_hashlib", "_lzma", "_md5", "_pickle", "_queue",
    "_sha1", "_sha2", "_sha3", "_sre", "multiprocessing.connection", "multiprocessing.managers",
    "multiprocessing.queues", "multiprocessing.sharedctypes", "multiprocessing.shared_memory",
    "numpy.random.bit_generator", "pyexpat", "socket", "sqlite3", "zlib",
}  # fmt: skip
"""Python modules whose objects lead out of the process, are shared with others, or keep in C what
they were given.
"""
_LIBRARIES = sys.stdlib_module_names | {
    "accelerate", "bitsandbytes", "deepspeed", "diffusers", "egeria_cache", "egeria_core", "einops",
    "huggingface_hub", "lightning", "lightning_fabric", "matplotlib", "numpy", "pandas", "peft",
    "polars", "pyarrow", "pytorch_lightning", "scipy", "sklearn", "timm", "tokenizers", "torch",
    "torchaudio", "torchmetrics", "torchvision", "transformers",
}  # fmt: skip
_OPAQUE = tuple(f"{name}." for name in (
    "egeria_cache", "egeria_core", "threading", "_thread", "weakref", "asyncio", "queue",
    "concurrent", "socket", "_io", "multiprocessing.context", "multiprocessing.queues",
    "multiprocessing.synchronize", "multiprocessing.process", "multiprocessing.managers", "typing",
))  # fmt: skip
"""Modules of the interpreter, and ours, whose objects say nothing about a sample."""
_TRAINING = (Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader)
_TELLING = (RemovableHandle, logging.Logger, logging.LoggerAdapter, logging.Handler)
SINGLES = (random._inst, np.random.mtrand._rand, torch.default_generator)


class StandIn:
    """Stands on a module in place of a method of its own: what we have put there."""

    is_copied = True
    """Whether a copy of the module has one, too; else what is beneath stands there."""
    module: nn.Module
    name: str = ""
    """Of a method by which the module is entered."""
    before: Callable[..., Any] | None
    """What stood there; None where it was the class's own method."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What is beneath."""
        raise NotImplementedError


def entries(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the methods by which a module is entered: `forward`, and another one
    where a cache stands in its place.
    """
    own = module.__dict__.items()
    slots = ((key, value) for key, value in own if isinstance(value, StandIn))
    return ("forward", *(key for key, slot in slots if key == slot.name != "forward"))


def is_compiled(module: nn.Module) -> bool:
    """Whether calls go through torch.compile: then what is inside is not ours to patch."""
    compiled = module.__dict__.get("_compiled_call_impl")
    return compiled is not None or type(module).__name__ == "OptimizedModule"


def is_foreign(value: Any) -> bool:
    """Whether an object belongs to another world: threads, files, data sets, trainers, ourselves.

    Modules never do, whoever wrote them. An object with a finaliser does: a copy that dies would
    close what the original still uses.
    """
    if isinstance(value, nn.Module):
        return False
    cls = type(value)
    if isinstance(value, _CLASSES) or any(value is single for single in SINGLES):
        return True
    if f"{cls.__module__}.".startswith(_WORLDS):
        return cls.__name__ != "Generator"
    return _has_finaliser(cls)


def is_beyond(value: Any) -> bool:
    """Whether an object is of another world, and its attributes are none of ours."""
    return is_foreign(value) and not is_put_back(value)


def is_put_back(value: Any) -> bool:
    """Whether an object that is not copied only has attributes, which can be put back."""
    if isinstance(value, Dataset | Sampler | BaseException | enum.Enum):
        return True
    is_such = not isinstance(value, _CLASSES) and _has_finaliser(type(value))
    is_such |= isinstance(value, _VALUES)  # of a class of the user's these have attributes
    return is_such and not is_library(type(value).__module__)


@once_per_class
def _has_finaliser(cls: type) -> bool:
    return any("__del__" in vars(base) for base in cls.__mro__)


@once_per_class
def is_iterator(kind: type) -> bool:
    """Whether it is a kind of iterators of Python's own."""
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def iterator_copy(value: Any) -> Any:
    """Return a copy of what counts, as it stands; any other iterator itself: from Python 3.14 on
    none can be copied.
    """
    return itertools.count(*start_of(value)) if type(value) is itertools.count else value


def start_of(count: itertools.count[Any]) -> tuple[Any, ...]:
    """Return the next number that it gives, and the step."""
    found = literal_eval(repr(count)[len("count") :])
    return found if isinstance(found, tuple) else (found,)


def is_outside(value: Any) -> bool:
    """Whether what code does to an object is not done to its attributes: iterators, memory made in
    C, what belongs to a thread, files, connections. A dry run uses a copy of it, or none.
    """
    cls = type(value)
    return (
        isinstance(value, (*MEMORY, memoryview, mmap.mmap, threading.local))
        or (hasattr(cls, "__next__") and own_dict(value) is None and not slot_names(cls))
        or _is_far(value)
    )


def _is_far(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        return value not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return type(value).__module__ in _OUTSIDE


def leads_out(value: Any) -> bool:
    """Whether a dry run uses a copy of an object, or none: it is outside, or is not copied itself,
    made in C or of another world, and holds a file or a connection: a writer of tables, say. Or it
    is a handler of logs, or a tuple with such a thing.
    """
    own, held = own_dict(value), list[Any]()
    if isinstance(value, tuple):
        return any(map(leads_out, value))
    if not isinstance(value, (*_CLASSES, *CONTAINERS, Tensor, np.ndarray)):
        if own is None and not slot_names(type(value)):
            held = gc.get_referents(value)
        elif own and is_foreign(value) and not is_opaque(type(value)):
            held = list(own.values())
    held = [one.__self__ if isinstance(one, BuiltinMethodType) else one for one in held]
    return isinstance(value, logging.Handler) or is_outside(value) or any(map(_is_far, held))


def outside_state(value: Any) -> Any:
    """Return what such an object holds now; None if nobody can tell."""
    if isinstance(value, (*MEMORY, memoryview)):
        return bytes(value)
    if isinstance(value, threading.local):
        return dict(vars(value))
    if is_outside(value) and hasattr(type(value), "__next__"):
        with warnings.catch_warnings(), contextlib.suppress(TypeError):
            warnings.simplefilter("ignore")
            return value.__reduce__()[1:]
    return None


def is_library(module: str | None) -> bool:
    """Whether code of this Python module belongs to a library, whose globals are its own."""
    return (module or "").partition(".")[0] in _LIBRARIES


def is_installed_code(code: CodeType) -> bool:
    """Whether it is a library's, or Python's own."""
    return code.co_filename.startswith((*LIBRARIES, "<frozen"))


def own_dict(value: Any) -> dict[str, Any] | None:
    """Return the instance's attributes; None if it has no dict."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def own_attributes(value: Any) -> dict[str, Any]:
    """Return what any object holds by name, in its dict and in slots."""
    return {**(own_dict(value) or {}), **own_slots(value)}


def has_attributes(value: Any) -> bool:
    """Whether it has a dict of them, or holds something in slots."""
    return own_dict(value) is not None or bool(own_slots(value))


def own_slots(value: Any) -> dict[str, Any]:
    """Return what any object holds in slots; none of the standard library's, which keep there what
    they have worked out.
    """
    held = {}
    for name in () if is_standard(type(value)) else slot_names(type(value)):
        with contextlib.suppress(AttributeError):  # not set
            held[name] = object.__getattribute__(value, name)
    return held


@once_per_class
def slot_names(cls: type) -> list[str]:
    """Return the names in `__slots__` of a class and its bases, as pickling finds them."""
    names: list[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    return names


def attributes_held(function: types.FunctionType) -> dict[str, Any]:
    """Return the attributes of a function; of one that a library wraps around another, but for
    what is its own, a memo say.
    """
    own = vars(function)
    if not own or not is_installed_code(function.__code__):
        return own
    return {name: part for name, part in own.items() if not name.startswith("_")}


def in_class(owner: type, name: str) -> Any:
    """Return what a module's class has under a name, as it stands there; None if it has nothing."""
    return next((vars(base)[name] for base in bases_of(owner) if name in vars(base)), None)


def bases_of(owner: type) -> list[type]:
    """Return a class and its bases, up to PyTorch's own, or Python's, and its metaclass."""
    ends = (nn.Module, object)
    bases = list(itertools.takewhile(lambda base: base not in ends, owner.__mro__))
    return bases + [base for base in type.mro(type(owner))[:-2] if not is_installed(base)]


def is_data_set(value: Any) -> bool:
    """Whether it gives samples by index."""
    kind = type(value)
    return isinstance(value, Dataset) or (hasattr(kind, "__getitem__") and hasattr(kind, "__len__"))


def is_training(value: Any) -> bool:
    """Whether an object trains, or tells of it; or holds what does, as trainers and their helpers.

    A module without parameters is a transform, and a data set or a transform that holds a model
    runs it.
    """
    if _is_one_of_training(value) or isinstance(value, _TELLING):
        return True
    if callable(value) or is_data_set(value):
        return False
    held = own_attributes(value).values()
    lists = [part for part in held if type(part) in (list, tuple)]
    return any(map(_is_one_of_training, itertools.chain(held, *lists)))


def _is_one_of_training(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None
    return isinstance(value, _TRAINING)


@once_per_class
def is_opaque(kind: type) -> bool:
    """Whether objects of a class say nothing about a sample."""
    return f"{kind.__module__}.".startswith(_OPAQUE)


@once_per_class
def is_standard(kind: type) -> bool:
    """Whether a class is of the standard library."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


def is_frozen(value: Any) -> bool:
    """Whether it is a model that does not train: one that a data set has is a part of it."""
    return isinstance(value, nn.Module) and not any(p.requires_grad for p in value.parameters())


@once_per_class
def is_pickled_otherwise(kind: type) -> bool:
    """Whether objects of a library's class say themselves what they are made of: tables, say."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    own = any(getattr(kind, name, None) is not getattr(object, name, None) for name in names)
    is_value = issubclass(kind, (Tensor, np.ndarray, np.generic, np.dtype, nn.Module))
    return own and is_installed(kind) and not (is_value or is_standard(kind))


def state_of(value: Any) -> list[Any]:
    """Return what pickling would keep of an object, and not what it has worked out since."""
    parts = value.__reduce_ex__(5)
    if not isinstance(parts, tuple):
        return [parts]
    args, state = (*parts[1:3], None)[:2]
    return [*args, *(state.values() if isinstance(state, dict) else [state])]


@dataclass(frozen=True, slots=True)
class Reach:
    """How far is looked, and how much of what is found is kept."""

    lets_be: Callable[[Any], bool]
    max_objects: int = 100_000
    max_items: int = 1 << 30
    """Of a container that is kept whole."""
    max_held: int = 1 << 30
    """Of its items that are looked into."""
    max_bytes: int = 256 << 20
    """Of all tensors and arrays together."""
    follows_code: bool = True
    sketches: bool = False
    """Whether what cannot be kept is looked at here and there; nothing is put back."""


def _is_beyond_models(value: Any) -> bool:
    if isinstance(value, types.FunctionType | type):
        return is_library(value.__module__)
    if isinstance(value, _lru_cache_wrapper):  # it runs once for us and the user
        return True
    if isinstance(value, Tensor) and value.requires_grad:
        return True
    looked_at = (StandIn, threading.local, *MEMORY, *CONTAINERS)
    return not isinstance(value, looked_at) and is_beyond(value)


def ends(value: Any) -> bool:
    """Whether it leads to nothing of the user's."""
    if isinstance(value, type):
        return is_standard(value) or is_opaque(value) or is_installed(value)
    is_function = isinstance(value, types.FunctionType)
    return is_function and is_installed_code(value.__code__) and not value.__closure__


def holds_threads(value: Any) -> bool:
    """Whether an object has threads of its own, which write to it, too."""
    held = (own_dict(value) or {}).values()
    return any(isinstance(part, threading.Thread | Executor) for part in held)


def is_in_shared_memory(value: Any) -> bool:
    """Whether it lies where other processes may write to it."""
    return value.is_shared() if isinstance(value, Tensor) else isinstance(value, _SHARED)


def _is_beyond_data(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_cpu or is_in_shared_memory(value)  # it is not put back
    if is_in_shared_memory(value) or ends(value) or is_opaque(type(value)):
        return True
    return holds_threads(value) or (is_training(value) and not is_frozen(value))


MODELS = Reach(_is_beyond_models, follows_code=False)
"""All that the code of a model may touch."""
CODE = Reach(
    lambda value: isinstance(value, nn.Module) or _is_beyond_models(value),
    max_objects=20_000, max_held=64, max_bytes=0,
)  # fmt: skip
"""The same, but for modules, and the code that finds it."""
DATA = Reach(_is_beyond_data, 1024, 4096, 64, 1 << 20)
"""What loading samples may move; a larger array is data."""


OF_EVERY_OBJECT = {*dir(object)} - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__", "__repr__",
    "__format__", "__sizeof__", "__setattr__", "__delattr__", "__reduce_ex__", "__dir__",
}  # fmt: skip
"""What has nothing to do with what an object holds."""


def unreadable(kind: type) -> Any:
    """Return what passes for a value of this kind, and has none: whatever asks for it fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise LookupError("it is read")

    def goes_on(self: Any, *others: Any) -> Any:
        return self if all(isinstance(one, int | float) for one in others) else refuse()

    own = (name for name in dir(kind) if name not in OF_EVERY_OBJECT)
    asked: dict[str, Any] = {name: refuse for name in own if callable(getattr(kind, name, None))}
    asked |= dict.fromkeys(_ARITHMETIC & asked.keys(), goes_on)
    return type("Unread", (), asked | {"__bool__": refuse, "__class__": property(lambda _: kind)})()


_ARITHMETIC = {f"__{r}{name}__" for name in ("add", "sub", "mul", "truediv") for r in ("", "r")}
"""What only makes another number of numbers."""
