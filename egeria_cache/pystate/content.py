"""What tensors and Python values hold: digests that are the same in every run.

A digest is never made from an address or an `id`. What has no content of its own (a lock, a file,
an object of C) counts by its class alone.

Short prints: whole content is hashed as long as it is cheap (`THOROUGH_BYTES`); what lies beyond is
looked at in many places. xxh3 reads about 10 GB/s; `marshal`, which writes nested lists of plain
values in C, about a hundred million values in ten seconds.
"""

from __future__ import annotations

import enum
import marshal
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from egeria_cache.kinds import kind_name
from egeria_cache.pystate.objects import is_foreign, is_outside, outside_state, own_attributes
from egeria_cache.pystate.places import GENERATOR_KINDS, LEADS, Generator, led_to, parts_of

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis)})
LONG = 1 << 20
"""Bytes of an array, or elements of a list, above which a quick look does not read all of it."""
THOROUGH_BYTES = 1 << 30
NUM_CHUNKS, CHUNK_BYTES = 512, 4096
_MADE_IN_PYTHON = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: a class made by a `class` statement (some of C are, too)."""
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device,
           torch.Size, enum.Enum)  # fmt: skip
_MAX_TEXTS = 20_000
_BY_NAME = (ModuleType, nn.Module, FunctionType, BuiltinFunctionType, MethodType,
            random.SystemRandom)  # fmt: skip


def digest(value: Any) -> str:
    """Return a hash of what a Python value holds: numbers, texts, arrays, containers, objects."""
    return xxhash.xxh3_128_hexdigest(describe(value))


def describe(value: Any) -> bytes:
    """Return bytes that differ where values differ in content; containers are looked into."""
    if isinstance(value, _SIMPLE):
        return _simple(value)
    texts = Content(value).texts
    return b";".join(b"%s=%s" % (path.encode(), text) for path, text in texts.items())


class Content:
    """What a value holds, part by part.

    Args:
        value: Any.
        depth: How far to look.
        into_foreign: Whether to look into what belongs to other worlds.
    """

    def __init__(self, value: Any, depth: int = 12, *, into_foreign: bool = True) -> None:
        self.texts: dict[str, bytes] = {}
        """Path -> what is there, in short. Items of mappings are in their order."""
        self.arrays: set[str] = set()
        """Paths of tensors and arrays."""
        self.is_all = True
        """Whether this is all of it: plain values in containers and plain objects."""
        self._into_foreign = into_foreign
        self._around = set[int]()
        """Ids of what is being looked into."""
        self._add("", value, depth)

    def _add(self, path: str, value: Any, depth: int) -> None:
        is_far = depth == 0 or id(value) in self._around or len(self.texts) > _MAX_TEXTS
        if isinstance(value, _SIMPLE):
            self.texts[path] = _simple(value)
        elif isinstance(value, Tensor | np.ndarray):
            self._add_array(path, value)
        elif isinstance(value, LEADS):
            self._add(path, led_to(value), depth)
        elif is_far or isinstance(value, (type, *_BY_NAME)):
            self.is_all = False
            is_named = isinstance(value, _BY_NAME) and hasattr(value, "__name__")
            kind = value if isinstance(value, type) else type(value)
            self.texts[path] = value.__name__.encode() if is_named else kind_name(kind).encode()
            self._add_beside(path, () if is_far else parts_of(value), depth - 1)
        else:
            self.texts[path] = type(value).__qualname__.encode()
            self._around.add(id(value))
            self._add_parts(path, value, depth - 1)
            self._around.discard(id(value))

    def _add_array(self, path: str, value: Any) -> None:
        self.arrays.add(path)
        if isinstance(value, Tensor):
            self.texts[path] = tensor_digest(value).encode()
            self.is_all &= type(value) is Tensor and value.layout == torch.strided
        else:
            is_plain = value.dtype != object
            data = value.tobytes() if is_plain else repr(value.tolist()).encode()
            head = f"array:{value.dtype}{value.shape}:".encode()
            self.texts[path] = head + xxhash.xxh3_128_digest(data)
            self.is_all &= is_plain

    def _add_parts(self, path: str, value: Any, depth: int) -> None:
        plain = plain_print(value)
        if plain is not None:
            self.texts[path] += str(plain).encode()
        elif isinstance(value, Mapping):
            for i, (key, item) in enumerate(value.items()):
                self._add(f"{path}[{i}", key, depth)
                self._add(f"{path}[{i}]", item, depth)
        elif isinstance(value, set | frozenset):
            self.texts[path] += b",".join(sorted(map(describe, value)))
        elif isinstance(value, list | tuple | deque):
            self.texts[path] += str(len(value)).encode()
            for i, item in enumerate(value):
                self._add(f"{path}[{i}]", item, depth)
        elif self._into_foreign or not is_foreign(value) or is_outside(value):
            self._add_object(path, value, depth)
        if isinstance(value, (partial, Mapping, set, frozenset, list, tuple, deque)):
            self._add_beside(path, [*parts_of(value), *own_attributes(value).values()], depth)
        if not isinstance(value, dict | list | tuple | set | frozenset):
            self.is_all &= _is_plain_object(value)

    def _add_beside(self, path: str, parts: Iterable[Any], depth: int) -> None:
        """Add what code is bound to, and attributes of containers; where it looks into foreign
        things, that may be a trainer's all.
        """
        for i, part in enumerate(() if self._into_foreign else parts):
            self._add(f"{path}<{i}>", part, depth)

    def _add_object(self, path: str, value: Any, depth: int) -> None:
        held: Any = outside_state(value)
        if isinstance(value, GENERATOR_KINDS):
            held = Generator("", value).read(value)
        elif held is None:
            held = own_attributes(value)
            # What holds nothing and has no methods is there to be told from others.
            self.is_all &= bool(held) or any(name[:2] != "__" for name in dir(type(value)))
        if isinstance(held, dict):
            for name, part in held.items():
                self._add(f"{path}.{name}", part, depth)
        else:
            self._add(f"{path}.<state>", held, depth)


def _simple(value: Any) -> bytes:
    return f"{type(value).__name__}:{value!r}".encode("utf-8", "replace")


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object of a Python class all of whose state is in its `__dict__`."""
    bases = type(value).__mro__[:-1]
    is_plain = all("__dict__" in vars(base) or not vars(base).get("__slots__") for base in bases)
    heap = all(bool(base.__flags__ & _MADE_IN_PYTHON) for base in bases)
    return is_plain and heap and not callable(value) and type(value).__dictoffset__ != 0


def tensor_digest(tensor: Tensor) -> str:
    """Return the hash of dtype, shape and bytes, all of them (about 10 GB/s on the CPU)."""
    return f"{tensor_print(tensor, sys.maxsize):032x}"


def plain_print(value: Any) -> int | None:
    """Return the print of a plain value or a container of nothing else; None for what is not."""
    kind = type(value)
    if kind in PLAIN or kind is range:
        text = value if kind is bytes else f"{kind.__name__}{value!r}".encode("utf-8", "replace")
        return xxhash.xxh3_64_intdigest(text)
    parts = (value, value.values()) if kind is dict else (value,)
    if kind in (list, tuple, dict) and all(map(_holds_plain, parts)):
        with suppress(ValueError):  # deeper inside lies something else
            # Version 2: no references, which would depend on who else holds the parts.
            return xxhash.xxh3_64_intdigest(marshal.dumps(value, 2))
    return None


def _holds_plain(values: Any) -> bool:
    """Whether elements are plain, or lists and tuples whose elements are, as far as is seen."""
    kinds, held = set(map(type, values)), PLAIN | {list, tuple}
    inner = chain.from_iterable(v for v in values if type(v) in (list, tuple))
    return kinds <= PLAIN or (kinds <= held and held.issuperset(map(type, inner)))


def is_long(value: Any) -> bool:
    """Whether reading all of it takes a time that is felt."""
    layout = value.layout if isinstance(value, Tensor) else torch.strided
    if isinstance(value, np.ndarray | Tensor) and layout == torch.strided:
        return value.nbytes > LONG
    return type(value) in (list, tuple, dict) and len(value) > LONG >> 6


def tensor_print(tensor: Tensor, limit: int = THOROUGH_BYTES) -> int:
    """Return the print of a tensor of any kind; above `limit` bytes, of parts of it."""
    what = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.layout}"
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        parts = [tensor_print(part, limit) for part in _parts_of(tensor)]
        return xxhash.xxh3_128_intdigest(f"{what}{parts}".encode())
    tensor = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    data = tensor if tensor.is_contiguous() else tensor.contiguous()
    flat = data.reshape(-1).view(torch.uint8)
    if flat.numel() > limit and not flat.is_cpu:
        flat = flat[:: max(1, flat.numel() // (NUM_CHUNKS * CHUNK_BYTES))]
    return _bytes_print(what, flat.cpu().numpy(), limit)


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that pickling makes another one of; none of what has no data."""
    if tensor.is_meta or tensor.is_mkldnn:
        return []
    _, parts, *_ = tensor.detach().__reduce_ex__(2)
    return [part for part in tree_leaves(parts) if isinstance(part, Tensor)]


def array_print(array: np.ndarray, limit: int = THOROUGH_BYTES) -> int:
    """Return the print of an array without objects; above `limit` bytes, of parts of it."""
    what = f"{array.dtype}{array.shape}"
    if isinstance(array, np.memmap):
        path = Path(str(array.filename))
        state = path.stat() if path.exists() else None
        what += f"{path}{state and (state.st_size, state.st_mtime_ns)}"
        limit = min(limit, LONG)
    if not array.flags.c_contiguous:
        array = array[:: max(1, array.nbytes // max(limit, LONG))]
    return _bytes_print(what, np.ascontiguousarray(array).reshape(-1).view(np.uint8), limit)


def _bytes_print(what: str, flat: np.ndarray, limit: int) -> int:
    digest = xxhash.xxh3_128(what.encode())
    if flat.nbytes <= max(limit, NUM_CHUNKS * CHUNK_BYTES):
        digest.update(flat.data)
    else:
        for start in np.linspace(0, flat.nbytes - CHUNK_BYTES, NUM_CHUNKS).astype(int):
            digest.update(flat[start : start + CHUNK_BYTES].data)
    return digest.intdigest()


def leaf_print(leaf: Any) -> int | None:
    """Return the print of a leaf of a sample; None for a plain container of other things.

    Raises:
        TypeError: It holds something without bytes.
    """
    if type(leaf) in PLAIN:
        return plain_print(leaf)
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        return tensor_print(leaf)
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise TypeError(f"{type(leaf).__name__} has no bytes to compare")
    return array_print(array)
