"""What tells one data set from another, without reading all of it.

Part of a generation's content address: the classes, their code, their lengths and index lists, the
transforms in words, the collate function's code, and a few dozen samples byte by byte. Whatever
cannot be told apart this way is what `sample_version`, a `fingerprint` of the data set's own, and
the audit are for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.batch import flatten

__all__ = ["fingerprint", "same_bytes"]

NUM_SAMPLES = 32


def fingerprint(
    dataset: Any, collate: Callable[..., Any], load: Callable[[list[int]], list[Any]]
) -> str:
    """Return text that differs between data sets that give other samples.

    Args:
        dataset: The data set; its own `fingerprint` attribute or method replaces the samples.
        collate: The loader's collate function.
        load: Loads samples by index, each under its own seed.
    """
    digest = hashlib.blake2b(digest_size=12)
    _describe_callable(digest, collate)
    _describe_dataset(digest, dataset)
    own = getattr(dataset, "fingerprint", None)
    length = len(dataset)
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}[{length}]"
    if own is not None:
        digest.update(str(own() if callable(own) else own).encode())
        return f"{name}:{digest.hexdigest()}"
    try:
        indices = np.unique(np.linspace(0, length - 1, min(length, NUM_SAMPLES)).astype(int))
        for sample in load(indices.tolist()):
            _describe_sample(digest, sample)
    except Exception:
        # Not indexed by 0..n-1, or samples of a kind we cannot read: nothing is reused by another
        # run, rather than something that may be another's.
        digest.update(os.urandom(16))
    return f"{name}:{digest.hexdigest()}"


def _describe_dataset(digest: Any, dataset: Any) -> None:
    """Add classes, code, transforms and index lists, through data sets that wrap others."""
    while dataset is not None:
        digest.update(f"{type(dataset).__module__}.{type(dataset).__qualname__}".encode())
        for method in ("__getitem__", "__getitems__"):
            _describe_callable(digest, getattr(type(dataset), method, None))
        attributes = getattr(dataset, "__dict__", {})
        for key, value in sorted(attributes.items()):
            if key == "indices":
                digest.update(np.asarray(list(value)).tobytes())
            elif callable(value):
                digest.update(key.encode())
                _describe_callable(digest, value)
        dataset = attributes.get("dataset")


def _describe_callable(digest: Any, function: Any) -> None:
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        _describe_code(digest, code)
        return
    digest.update(type(function).__qualname__.encode())
    text = repr(function)
    if " at 0x" not in text:
        digest.update(text.encode())


def _describe_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _describe_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def _describe_sample(digest: Any, sample: Any) -> None:
    _, leaves = flatten(sample, -1)
    for path, leaf in leaves.items():
        digest.update(path.encode())
        if isinstance(leaf, str | bytes | int | float | bool | type(None)):
            digest.update(repr(leaf).encode())
            continue
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(_as_bytes(leaf).numpy().tobytes())
            continue
        array = np.asarray(leaf)
        if array.dtype == object:
            raise TypeError(f"{type(leaf).__name__} at {path!r} has no bytes to compare")
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of any dtype hold the same, NaNs included."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(_as_bytes(left), _as_bytes(right))
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
