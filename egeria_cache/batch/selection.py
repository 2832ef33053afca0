"""Which rows of a batch a function of the loop takes: slices, chunks, another order.

The same function is asked of the row numbers: what it gives there are the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows that are taken from a batch."""

    parts: Sequence[tuple[np.ndarray, Callable[[Tensor], Tensor]]]
    """Their positions, and what takes them from a tensor."""
    is_tuple: bool
    """Whether the function gives several tensors."""
    rest: Any = None
    """What is indexed further, behind the rows; None if nothing is."""


_INDEX = {Tensor.__getitem__}
_PARTS = {
    Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.tensor_split, torch.tensor_split,
    torch.functional.split,
}  # fmt: skip
_ONE = {
    Tensor.narrow, torch.narrow, Tensor.index_select, torch.index_select, Tensor.flip, torch.flip,
    Tensor.roll, torch.roll, Tensor.flipud, torch.flipud,
}  # fmt: skip


def selected_rows(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], leaf: Tensor
) -> Selection | None:
    """Return the rows that `func(leaf, *args, **kwargs)` takes; None if that is not what it does.

    Raises:
        Exception: The function does, too.
    """
    if not leaf.dim() or func not in _INDEX | _PARTS | _ONE:
        return None
    if func in _INDEX:
        return _indexed(args[0], leaf.shape[0])
    if not _is_along_rows(func, args, kwargs, leaf.dim()):
        return None
    found = func(torch.arange(leaf.shape[0]), *args, **kwargs)
    if isinstance(found, Tensor):
        return Selection([(found.numpy(), partial(_call, func, args, kwargs, None))], False)
    parts = [(rows.numpy(), partial(_call, func, args, kwargs, i)) for i, rows in enumerate(found)]
    return Selection(parts, True)


def _indexed(index: Any, num_rows: int) -> Selection | None:
    first, rest = index, None
    if isinstance(index, tuple):
        if not index:
            return None
        first, rest = index[0], (slice(None), *index[1:]) if len(index) > 1 else None
    if isinstance(first, np.ndarray):
        first = torch.from_numpy(first)
    is_list = isinstance(first, list) and all(type(i) in (int, bool) for i in first)
    if isinstance(first, slice):
        if first == slice(None):
            return None
    elif isinstance(first, Tensor):
        if first.dim() != 1 or type(first) is not Tensor or first.requires_grad:
            return None
    elif not is_list:
        return None
    if rest is not None and any(isinstance(i, Tensor | list | np.ndarray) for i in rest):
        return None  # several lists of indices are taken together
    host = first.cpu() if isinstance(first, Tensor) else first
    rows = torch.arange(num_rows)[host]
    at = rows if isinstance(first, Tensor | list) else first
    return Selection([(rows.numpy(), partial(_take, at))], False, rest)


def _take(at: Any, tensor: Tensor) -> Tensor:
    index = at.to(tensor.device) if isinstance(at, Tensor) else at
    return tensor[index]


def _call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    nth: int | None,
    tensor: Tensor,
) -> Tensor:
    found = func(tensor, *args, **kwargs)
    result: Tensor = found if nth is None else found[nth]
    return result


def _is_along_rows(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], num_dims: int
) -> bool:
    """Whether the dimension that it works on is the batch's, and that one alone."""
    name = func.__name__
    if name == "flipud":
        return True
    if name in ("flip",):
        dims = kwargs.get("dims", args[0] if len(args) == 1 else args)
    elif name in ("narrow", "index_select"):
        dims = kwargs.get("dim", args[0] if args else None)
    elif name == "roll":
        dims = kwargs.get("dims", args[1] if len(args) > 1 else (0 if num_dims == 1 else None))
    else:
        dims = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    dims = list(dims) if isinstance(dims, list | tuple) else [dims]
    return dims in ([0], [-num_dims])
