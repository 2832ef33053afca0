"""The structure of a loader's batch: what its leaves are, and which of them have a row per sample.

`torch.utils._pytree` is not enough here: it would split a list of B strings into B leaves, and it
cannot look into mappings that are not registered (such as `BatchEncoding`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Leaf", "Rows", "Structure", "flatten", "is_rows", "merge_rows", "row_meta", "take_rows"]

Rows = Tensor | list[Any] | tuple[Any, ...]
"""The values of one leaf for a batch: a tensor with a row per sample, or one value per sample."""

Leaf = Any
_SCALARS = (str, bytes, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Structure:
    """How to build a batch from its leaves."""

    rebuild: Callable[[Mapping[str, Leaf]], Any]
    """Leaves by path -> a batch of the original types."""
    paths: tuple[str, ...]
    """Paths of all leaves, in order; the empty path is a batch that is itself one leaf."""


def is_rows(leaf: Leaf, batch_size: int) -> bool:
    """Whether `leaf` holds one row or one plain value per sample."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.shape[0] == batch_size
    return _is_values(leaf, batch_size)


def _is_values(node: Any, batch_size: int) -> bool:
    return (
        type(node) in (list, tuple)
        and len(node) == batch_size
        and all(isinstance(value, _SCALARS) for value in node)
    )


def flatten(batch: Any, batch_size: int) -> tuple[Structure, dict[str, Leaf]]:
    """Split `batch` into its structure and its leaves by path.

    Mappings, sequences, named tuples and dataclasses are looked into; anything else is a leaf, and
    so is a list or tuple of `batch_size` plain values (what collating strings gives).
    """
    leaves: dict[str, Leaf] = {}
    rebuild = _walk(batch, "", batch_size, leaves)
    return Structure(rebuild, tuple(leaves)), leaves


def _walk(
    node: Any, path: str, batch_size: int, leaves: dict[str, Leaf]
) -> Callable[[Mapping[str, Leaf]], Any]:
    if isinstance(node, Tensor) or _is_values(node, batch_size):
        leaves[path] = node
        return lambda values: values[path]
    if isinstance(node, Mapping):
        return _walk_mapping(node, path, batch_size, leaves)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        parts = [
            _walk(v, f"{path}.{k}", batch_size, leaves)
            for k, v in zip(node._fields, node, strict=True)
        ]
        return lambda values: type(node)(*(part(values) for part in parts))
    if type(node) in (list, tuple):
        kind = type(node)
        items = [_walk(v, f"{path}[{i}]", batch_size, leaves) for i, v in enumerate(node)]
        return lambda values: kind(item(values) for item in items)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [f.name for f in dataclasses.fields(node) if f.init]
        fields = {
            name: _walk(getattr(node, name), f"{path}.{name}", batch_size, leaves) for name in names
        }
        kind = type(node)
        return lambda values: kind(**{name: part(values) for name, part in fields.items()})
    leaves[path] = node
    return lambda values: values[path]


def _walk_mapping(
    node: Mapping[Any, Any], path: str, batch_size: int, leaves: dict[str, Leaf]
) -> Callable[[Mapping[str, Leaf]], Any]:
    parts = {k: _walk(v, f"{path}[{k!r}]", batch_size, leaves) for k, v in node.items()}
    if type(node) is dict:
        return lambda values: {k: part(values) for k, part in parts.items()}
    # Any other mapping may carry attributes of its own: copy it, without keeping its tensors alive.
    shell: Any = copy.copy(node)
    for key in parts:
        shell[key] = None

    def rebuild(values: Mapping[str, Leaf]) -> Any:
        clone = copy.copy(shell)
        for key, part in parts.items():
            clone[key] = part(values)
        return clone

    return rebuild


def take_rows(rows: Rows, mask: np.ndarray) -> Rows:
    """Return the rows where the boolean `mask` is True, in order."""
    if isinstance(rows, Tensor):
        return rows[torch.from_numpy(np.flatnonzero(mask)).to(rows.device)]
    return type(rows)(value for value, keep in zip(rows, mask, strict=True) if keep)


def merge_rows(mask: np.ndarray, where_true: Rows, where_false: Rows) -> Rows:
    """Interleave two sets of rows: row i comes from `where_true` if mask[i], else `where_false`."""
    if isinstance(where_true, Tensor) and isinstance(where_false, Tensor):
        true_at = torch.from_numpy(np.flatnonzero(mask)).to(where_true.device)
        false_at = torch.from_numpy(np.flatnonzero(~mask)).to(where_true.device)
        out = torch.empty(
            (len(mask), *where_true.shape[1:]), dtype=where_true.dtype, device=where_true.device
        )
        out.index_copy_(0, true_at, where_true)
        out.index_copy_(0, false_at, where_false)
        return out
    yes, no = iter(_values(where_true)), iter(_values(where_false))
    kind = list if isinstance(where_false, Tensor) else type(where_false)
    return kind(next(yes) if hit else next(no) for hit in mask)


def _values(rows: Rows) -> Sequence[Any]:
    return list(rows.unbind(0)) if isinstance(rows, Tensor) else rows


def row_meta(rows: Tensor) -> Tensor:
    """Return a meta tensor that stands for one row, shape (1, ...)."""
    return torch.empty((1, *rows.shape[1:]), dtype=rows.dtype, device="meta")
