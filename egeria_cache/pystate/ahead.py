"""What counts, further on: as it would be after more calls of what has moved it."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.pystate.foreign import ATOMS, start_of


def ahead(once: Any, twice: Any, by: int, *, wholly: bool = False) -> Any:
    """Return what has gone from one value to another, further on; None for what goes nowhere.

    Args:
        once: What it was.
        twice: What it is.
        by: How many calls to put it ahead.
        wholly: Only what moves in every part of it; all of it is put ahead.
    """
    if wholly:
        return _all_ahead(once, twice, by) if _counts(once, twice) else None
    return _ahead(once, twice, by)


def same_content(a: Any, b: Any) -> bool:
    """Whether two values are one, or equal numbers, texts, arrays, or lists of such."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, Tensor | np.ndarray):
        return a.shape == b.shape and bool((a == b).all())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_content, a, b))
    return type(a) not in ATOMS or bool(a == b)


def _counts(once: Any, twice: Any) -> bool:
    """Whether it is another, and nothing of it is only looked up."""
    if same_content(once, twice):
        return False
    if isinstance(once, list) and isinstance(twice, list):
        pairs = list(zip(once, twice, strict=False))
        if len(twice) > len(once):
            return all(itertools.starmap(same_content, pairs))
        if len(twice) < len(once) or any(itertools.starmap(same_content, pairs)):
            return False
    return _is_number(twice)


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    if isinstance(value, Tensor):
        return value.dtype != torch.bool and type(value) is Tensor
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf"
    return type(value) in (int, float)


def _all_ahead(once: Any, twice: Any, by: int) -> Any:
    if isinstance(twice, list) and len(twice) > len(once or ()):
        return twice + twice[-1:] * by
    if isinstance(twice, list | tuple):
        return type(twice)(_all_ahead(one, one, by) for one in twice)
    return twice + by


def _ahead(once: Any, twice: Any, by: int) -> Any:
    """Return what has gone from one value to another, further on; None for what goes nowhere."""
    kind: Any = type(twice)
    if once is twice or type(once) is not kind or kind is bool:
        return None
    if kind is itertools.count:
        start, *step = start_of(twice)
        return itertools.count(start + by, *step) if repr(once) != repr(twice) else None
    if kind is range:
        return len(twice) + by if len(once) < len(twice) else None
    if isinstance(twice, int | float | np.number):
        return twice + by if once != twice else None
    if isinstance(twice, np.ndarray | Tensor):
        moved = once != twice
        return twice + moved * by if once.shape == twice.shape and moved.any() else None
    if isinstance(twice, dict):
        if len(once) < len(twice):
            return twice | dict.fromkeys(range(len(twice), len(twice) + by), [*twice.values()][-1])
        ahead = {key: _ahead(once.get(key), value, by) for key, value in twice.items()}
        moved = {key: value for key, value in ahead.items() if value is not None}
        return twice | moved if moved else None
    if isinstance(twice, set):
        return {*twice, *range(len(twice), len(twice) + by)} if len(once) < len(twice) else None
    if not issubclass(kind, str | bytes | bytearray | array | list | tuple):
        return None
    if len(once) < len(twice):
        return twice + twice[-1:] * by
    if len(once) > len(twice) or isinstance(twice, str):
        return None
    parts = [_ahead(a, b, by) for a, b in zip(once, twice, strict=True)]
    if all(part is None for part in parts):
        return None
    parts = [b if part is None else part for part, b in zip(parts, twice, strict=True)]
    if isinstance(twice, array):
        return array(twice.typecode, parts)
    if isinstance(twice, bytes | bytearray):
        return type(twice)(part % 256 for part in parts)
    return tuple(parts) if isinstance(twice, tuple) else parts
