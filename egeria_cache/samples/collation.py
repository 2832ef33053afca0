"""How a collate function pads, found from the function itself: samples collated together and alone.

A batch may then be put together again from stored rows: each padded to the longest of the batch, on
the same side, with the same value. What cannot be told like this is not padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egeria_cache.batch import Axis, Padding, is_rows
from egeria_cache.ragged import Dims, blank
from egeria_cache.samples.content import same_values


class Places(NamedTuple):
    """Where the samples of a batch stand in it."""

    order: list[int]
    """Which sample stands in each row."""
    mixed: frozenset[str]
    """Leaves that are not, row by row, what the samples are alone."""
    made: frozenset[str] = frozenset()
    """Those of them that are as large in company as alone: no padding, nothing along it."""


NOWHERE = Places([], frozenset())
"""They are still to be looked for."""


def find_padding(together: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> Padding | None:
    """Return how the samples of a batch were padded; None if nothing was.

    Args:
        together: The leaves of the batch, by path.
        alone: The leaves of each of its samples, collated alone.
    """
    axes: list[Axis] = []
    values: dict[str, Any] = {}
    for path, whole in together.items():
        rows = [leaves.get(path) for leaves in alone]
        if not isinstance(whole, Tensor) or not is_rows(whole, len(alone)):
            continue
        if not all(isinstance(row, Tensor) and is_rows(row, 1) for row in rows):
            continue
        found = _of_leaf(whole, [row[0] for row in rows])  # type: ignore[index]
        if found is None:
            continue
        dims, value = found
        axes += [Axis(path, dim, left) for dim, left in dims]
        values[path] = value
    return Padding(tuple(axes), values) if axes else None


def find_places(together: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> Places:
    """Find the samples in a batch of them, which its collate function may have sorted.

    Args:
        together: The leaves of the batch, by path.
        alone: The leaves of each of its samples, collated alone, in the order of the sampler.
    """
    size = len(alone)
    rows = {
        path: (whole, [leaves.get(path) for leaves in alone])
        for path, whole in together.items()
        if is_rows(whole, size) and all(is_rows(leaves.get(path), 1) for leaves in alone)
    }
    best: list[int] = list(range(size))
    own = {path for path, pair in rows.items() if _is_own(*pair, best)}
    for path in [path for path in rows if path not in own]:
        order = _order(*rows[path])
        there = {path for path, pair in rows.items() if _is_own(*pair, order)} if order else set()
        if order and len(there) > len(own):
            best, own = order, there
    made = {path for path in rows.keys() - own if _is_as_large(*rows[path])}
    return Places(best, frozenset(together.keys() - own), frozenset(made))


def _is_as_large(whole: Any, rows: Sequence[Any]) -> bool:
    return all(getattr(row, "shape", (1,))[1:] == getattr(whole, "shape", (1,))[1:] for row in rows)


def _is_own(whole: Any, rows: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether each row is the sample that stands there in this order, padded perhaps."""
    values = [rows[i][0] for i in order]
    if not isinstance(whole, Tensor) or not all(isinstance(value, Tensor) for value in values):
        return all(map(same_values, whole, values))
    if all(value.shape == whole.shape[1:] for value in values):
        return all(map(same_values, whole, values))
    return _of_leaf(whole, values) is not None


def _order(whole: Any, rows: Sequence[Any]) -> list[int] | None:
    """Return which sample stands in each row of a leaf, found by what it holds, padded perhaps."""
    values, order, place = [row[0] for row in rows], dict[int, int](), 0
    # The longest first: the beginning of a longer one may be another sample. In what was sorted by
    # length the next one stands beside it.
    for i in sorted(range(len(values)), key=lambda i: -getattr(values[i], "nbytes", 0)):
        free = sorted((abs(row - place), row) for row in range(len(values)) if row not in order)
        found = next((row for _, row in free if _stands(whole[row], values[i])), None)
        if found is None:
            return None
        order[found], place = i, found
    return [order[row] for row in range(len(values))]


def _stands(row: Any, value: Any) -> bool:
    if not (isinstance(row, Tensor) and isinstance(value, Tensor)) or row.shape == value.shape:
        return same_values(row, value)
    if row.dim() != value.dim() or any(map(int.__lt__, row.shape, value.shape)):
        return False
    return any(
        same_values(_row(row, tuple((d, left) for d in range(row.dim())), value.shape), value)
        for left in (False, True)
    )


def own_lengths(axes: Sequence[Axis], leaves: Mapping[str, Any]) -> list[int]:
    """Return how long a sample that was collated alone is along each axis."""
    return [leaves[axis.leaf].shape[axis.dim + 1] for axis in axes]


def differing_leaf(
    axes: Sequence[Axis],
    together: Mapping[str, Any],
    alone: Mapping[int, Mapping[str, Any]],
    size: int,
) -> str | None:
    """Name a leaf of a batch in which a sample is not, in its place, what it is alone.

    Args:
        axes: Along which the samples are padded.
        together: The leaves of the batch, by path.
        alone: The leaves of some of its samples, collated alone, by row.
        size: Samples of the batch.
    """
    for path, whole in together.items():
        if not is_rows(whole, size):
            continue
        dims = tuple((axis.dim, axis.left) for axis in axes if axis.leaf == path)
        for i, leaves in alone.items():
            row, other = whole[i], leaves.get(path)
            if not is_rows(other, 1):
                continue
            assert other is not None
            known, here = other[0], row
            if isinstance(known, Tensor) and isinstance(row, Tensor):
                here = _row(row, dims, known.shape) if row.dim() == known.dim() else row
            if not same_values(here, known):
                return path
    return None


def _of_leaf(whole: Tensor, rows: Sequence[Tensor]) -> tuple[Dims, Any] | None:
    """Return the padded dimensions of a leaf and the value; None if it is not padded."""
    if any(row.dim() != whole.dim() - 1 or row.dtype != whole.dtype for row in rows):
        return None
    sizes = torch.tensor([list(row.shape) for row in rows]).view(len(rows), -1)
    most = torch.tensor(list(whole.shape[1:]))
    ragged = (sizes != most).any(0).nonzero().flatten().tolist()
    if not ragged or not torch.equal(sizes.amax(0), most):
        return None
    own = sizes[:, ragged].numpy()
    for sides in itertools.product((False, True), repeat=len(ragged)):
        dims = tuple(zip(ragged, sides, strict=True))
        value = next(_outside(whole, dims, own), None)
        if value is None:
            continue
        again = blank(whole, dims, own, value)
        if same_values(again, whole) and all(
            same_values(_row(part, dims, row.shape), row)
            for part, row in zip(whole, rows, strict=True)
        ):
            return dims, value
    return None


def _outside(whole: Tensor, dims: Dims, own: Any) -> Iterator[Any]:
    """Yield what stands in the padding of the first row that has some."""
    for row, sizes in zip(whole, own.tolist(), strict=True):
        for (dim, left), size in zip(dims, sizes, strict=True):
            rest = row.shape[dim] - size
            if rest and row.numel():
                yield row.narrow(dim, 0 if left else size, rest).flatten()[0].item()


def _row(part: Tensor, dims: Dims, shape: Sequence[int]) -> Tensor:
    for dim, left in dims:
        start = part.shape[dim] - shape[dim] if left else 0
        part = part.narrow(dim, start, shape[dim])
    return part
