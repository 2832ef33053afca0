"""What tensors and Python values hold: digests that are the same in every run.

A digest is never made from an address or an `id`. What has no content of its own (a lock, a file,
an object of C) counts by its class alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from egeria_cache.kinds import kind_name
from egeria_cache.pystate.foreign import outside_state, own_slots

_MADE_IN_PYTHON = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: a class made by a `class` statement (some of C are, too)."""


def digest(value: Any) -> str:
    """Return a hash of what a Python value holds: numbers, texts, arrays, containers, objects."""
    return xxhash.xxh3_128_hexdigest(describe(value))


def describe(value: Any, depth: int = 6) -> bytes:
    """Return bytes that differ where values differ in content; containers are looked into."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__}:{value!r}".encode()
    if isinstance(value, Tensor):
        return b"tensor:" + tensor_digest(value).encode()
    if isinstance(value, np.ndarray):
        data = repr(value.tolist()).encode() if value.dtype == object else value.tobytes()
        return f"array:{value.dtype}{value.shape}:".encode() + xxhash.xxh3_128_digest(data)
    if isinstance(value, np.generic | torch.dtype | torch.device | torch.Size | enum.Enum):
        return repr(value).encode()
    if isinstance(value, type):
        return kind_name(value).encode()
    if isinstance(value, ModuleType | nn.Module | FunctionType | MethodType):
        return str(getattr(value, "__name__", type(value).__qualname__)).encode()
    kind = type(value).__qualname__.encode()
    if depth == 0:
        return kind
    if isinstance(value, Mapping):
        items = [describe(k, depth - 1) + b"=" + describe(v, depth - 1) for k, v in value.items()]
        return kind + b"{" + b",".join(items) + b"}"
    if isinstance(value, set | frozenset):
        return kind + b"{" + b",".join(sorted(describe(v, depth - 1) for v in value)) + b"}"
    if isinstance(value, list | tuple):
        return kind + b"[" + b",".join(describe(v, depth - 1) for v in value) + b"]"
    inside = getattr(value, "__dict__", None)
    inside = inside if isinstance(inside, dict) else outside_state(value) or own_slots(value)
    return kind + (b"" if inside is None else describe(inside, depth - 1))


def is_content(value: Any, depth: int = 6) -> bool:
    """Whether `describe` says all of a value: plain values in containers and plain objects."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum):
        return True
    if depth == 0 or isinstance(value, type | ModuleType | nn.Module) or callable(value):
        return False
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout == torch.strided
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    if isinstance(value, np.generic | torch.dtype | torch.device | torch.Size):
        return True
    if type(value) in (dict, list, tuple, set, frozenset):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return all(is_content(part, depth - 1) for part in parts)
    # An object of a Python class all of whose state is in its `__dict__`.
    state, bases = getattr(value, "__dict__", None), type(value).__mro__[:-1]
    is_plain = all("__dict__" in vars(base) or not vars(base).get("__slots__") for base in bases)
    heap = all(bool(base.__flags__ & _MADE_IN_PYTHON) for base in bases)
    return bool(is_plain and heap and isinstance(state, dict) and is_content(state, depth - 1))


def tensor_digest(tensor: Tensor) -> str:
    """Return the hash of dtype, shape and bytes (about 10 GB/s on the CPU)."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}"
    state = xxhash.xxh3_128(head.encode())
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().cpu()
        plain = (plain if plain.layout == torch.strided else plain.to_dense()).contiguous()
        if plain.numel() and not plain.is_meta:
            plain = plain.resolve_conj().resolve_neg()
            state.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
