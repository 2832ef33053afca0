"""What a collate function does, found by calling it: padding, order, company.

Samples are collated together and alone. A batch that was padded may be put together again from
stored rows: each padded to the longest of the batch, on the same side, with the same value. What
cannot be told like this is not padding.

A collate function may also sort its samples, or give leaves that no sample has as its own: labels
that are shifted behind the padding, a tokenizer's objects, negatives drawn from the batch. What the
front reads may be each sample's own all the same. Such a batch is loaded as DataLoader loads it;
each sample is collated alone as well, which shows where it stands and which leaves are its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from egeria_cache import batch
from egeria_cache.attempt import Attempt
from egeria_cache.batch import Axis, Leaves, Lengths, Padding, flatten, is_rows
from egeria_cache.errors import EgeriaError
from egeria_cache.pystate import tensor_digest
from egeria_cache.ragged import Dims, blank, inside
from egeria_cache.samples.task import Loaded, Places, Task


def same_values(left: Any, right: Any) -> bool:
    """Whether two leaves are equal, to the bit where they are tensors, NaNs included."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return tensor_digest(left) == tensor_digest(right)
    return type(left) is type(right) and bool(left == right)


def row_prints(leaves: Mapping[str, Any], lengths: Lengths | None) -> Tensor:
    """Return a print of each row of some dense tensors on the host, without its padding: int64,
    shape (B, 1).
    """
    rows: list[Any] = [] if lengths is None else [np.ascontiguousarray(lengths.own)]
    for path, leaf in leaves.items():
        whole = batch.unwrap(leaf).detach()
        each = whole if lengths is None else lengths.rows(path, whole)
        is_dense = isinstance(each, Tensor)
        rows.append(_bytes(each).reshape(len(each), -1) if is_dense else [*map(_bytes, each)])
    prints = np.zeros((len(rows[0]), 1), np.uint64)
    for row, leaf in itertools.product(range(len(prints)), rows):
        prints[row] = xxhash.xxh3_64_intdigest(leaf[row], int(prints[row, 0]))
    return torch.from_numpy(prints.view(np.int64))


def _bytes(values: Tensor) -> Any:
    return values.flatten().contiguous().view(torch.uint8).numpy()


class Found(NamedTuple):
    """What a batch that was loaded whole consists of."""

    order: list[int]
    """Which of the planned samples stands in each row."""
    own: dict[str, Tensor]
    """Leaves in which each row is a sample as it is alone, padded perhaps."""
    mixed: dict[str, Any]
    """The others."""
    lengths: Lengths | None
    is_new: bool
    """Whether less is known of such batches than was believed: what is stored is void."""


def find_padding(together: Leaves, alone: Sequence[Leaves]) -> Padding | None:
    """Return how the samples of a batch were padded; None if nothing was.

    Args:
        together: The leaves of the batch, by path.
        alone: The leaves of each of its samples, collated alone.
    """
    axes: list[Axis] = []
    values: dict[str, Any] = {}
    for path, whole in together.items():
        rows = [leaves.get(path) for leaves in alone]
        are_tensors = all(isinstance(leaf, Tensor) for leaf in (whole, *rows))
        found = None
        if are_tensors and is_rows(whole, len(alone)) and all(is_rows(row, 1) for row in rows):
            found = _of_leaf(whole, [row[0] for row in rows])  # type: ignore[index]
        if found is not None:
            dims, values[path] = found
            axes += [Axis(path, dim, left) for dim, left in dims]
    return Padding(tuple(axes), values) if axes else None


def find_places(together: Leaves, alone: Sequence[Leaves]) -> Places:
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
    mixed = {path: (whole, *singles) for path, (whole, singles) in rows.items() if path not in own}
    shapes = {p: {getattr(leaf, "shape", (1,))[1:] for leaf in each} for p, each in mixed.items()}
    made = frozenset(path for path, found in shapes.items() if len(found) == 1)
    return Places(best, frozenset(together.keys() - own), made)


def _is_own(whole: Any, rows: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether each row is the sample that stands there in this order, padded perhaps."""
    values = [rows[i][0] for i in order]
    are_tensors = all(isinstance(value, Tensor) for value in (whole, *values))
    if are_tensors and any(value.shape != whole.shape[1:] for value in values):
        return _of_leaf(whole, values) is not None
    return all(map(same_values, whole, values))


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
    sides = (tuple((dim, left) for dim in range(row.dim())) for left in (False, True))
    return any(same_values(inside(row, dims, value.shape), value) for dims in sides)


def own_lengths(axes: Sequence[Axis], leaves: Leaves) -> list[int]:
    """Return how long a sample that was collated alone is along each axis."""
    return [leaves[axis.leaf].shape[axis.dim + 1] for axis in axes]


def differing_leaf(
    axes: Sequence[Axis], together: Leaves, alone: Mapping[int, Leaves], size: int
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
            if other is None or not is_rows(other, 1):
                continue
            known, here = other[0], row
            if isinstance(known, Tensor) and isinstance(row, Tensor) and row.dim() == known.dim():
                here = inside(row, dims, [known.shape[dim] for dim, _ in dims])
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
        is_sample = blank(torch.ones_like(whole, dtype=torch.bool), dims, own, False)
        padding = whole[~is_sample]
        if not len(padding) or not same_values(padding, padding[:1].expand_as(padding)):
            continue
        parts = (inside(*one) for one in zip(whole, itertools.repeat(dims), own.tolist()))
        if all(map(same_values, parts, rows)):
            return dims, padding[0].item()
    return None


class Study:
    """What is known of one collate function so far.

    Args:
        source: The `LoaderSource`, which loads and collates samples.
    """

    def __init__(self, source: Any) -> None:
        self.padding: Padding | None = None
        """How it pads, as far as has been seen."""
        self.company: str | None = None
        """Why a sample's leaves are not all its own: its batches are then loaded as they are, hits
        and misses together, and only the front's work is spared."""
        self.mixed: frozenset[str] = frozenset()
        """Those leaves: nothing vouches for them."""
        self.made: frozenset[str] = frozenset()
        """Those of them that are made from company, labels say, and are no padding."""
        self._source = source
        self._kinds: set[tuple[Any, ...]] = set()
        self._before: Task | None = None
        """A sample of the batch that was studied last: alone, no sample shows padding."""
        self.last_alone: tuple[Task, list[dict[str, Any]]] | None = None
        """The batch that was studied last, and each of its samples collated alone."""

    def leaves(self, task: Task, rows: np.ndarray) -> dict[str, Any]:
        """Return the leaves of a batch of some samples of a task: bool, shape (B,)."""
        return flatten(self._source.load_each([task.take(rows)])[0], int(rows.sum()))[1]

    def alone(self, task: Task, row: int) -> dict[str, Any]:
        """Return the leaves of one sample, collated alone."""
        last, leaves = self.last_alone or (None, [])
        if last is not None and (last.ids, last.draws) == (task.ids, task.draws):
            return leaves[row]
        return self.leaves(task, np.arange(len(task.ids)) == row)

    def load_together(self, why: str) -> None:
        """Load whole batches from now on: the leaves of a sample depend on its company."""
        self.company = why
        self.padding = None
        self._kinds.clear()
        self._before = None

    def each_alone(self, task: Task) -> list[dict[str, Any]]:
        """Return the leaves of each sample of a task, collated alone."""
        each = [task.take(np.arange(len(task.ids)) == row) for row in range(len(task.ids))]
        return [flatten(loaded, 1)[1] for loaded in self._source.load_each(each)]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Along which every sample has to be measured when it is loaded."""
        return () if self.padding is None else self.padding.axes

    def look_for_padding(self, task: Task, leaves: Leaves) -> bool:
        """Find out how a loaded batch was padded, if batches of its shape are new.

        Every sample of it is loaded again and collated alone. What the collate function draws or
        raises then is no news: whether its samples can be cached at all is told later, with the
        reason (`why_not_cacheable`).

        Returns:
            Whether more is padded than was known: what was stored before must not be served.

        Raises:
            EgeriaError: Its padding cannot be undone.
        """
        if task.indices is None:
            return False
        leaves = {path: leaf for path, leaf in leaves.items() if path not in self.mixed}
        dense = {p: leaf for p, leaf in leaves.items() if batch.is_dense(leaf) and leaf.dim()}
        known = self.padding or Padding((), {})
        kind = tuple((path, *known.row_meta(path, leaf).shape) for path, leaf in dense.items())
        if kind in self._kinds:
            return False
        self._kinds.add(kind)
        found = None
        with Attempt():
            if len(task.ids) == 1 and self._before is not None:
                task = task.behind(self._before)
                leaves = self.leaves(task, np.ones(2, bool))
            self._before = task.at([0])
            alone = self.each_alone(task)
            if self.company is not None:
                alone = [alone[i] for i in find_places(leaves, alone).order]
            self.last_alone = task, alone
            found = find_padding(leaves, alone)
        if found is None:
            return False
        axes, values = {*known.axes, *found.axes}, {**known.values, **found.values}
        if len({(axis.leaf, axis.dim) for axis in axes}) < len(axes) or not all(
            same_values(known.values[path], values[path]) for path in known.values
        ):
            raise EgeriaError("its collate_fn pads in one way in one batch, and in another later")
        self.padding = Padding(tuple(sorted(axes)), values)
        return axes != set(known.axes)

    def find(self, task: Task, loaded: Loaded, leaves: dict[str, Any]) -> Found:
        """Find the samples of a batch in it that was loaded whole.

        Raises:
            EgeriaError: No leaf is the samples' own.
        """
        places, alone = loaded.places, None
        if places is None:
            alone = self.each_alone(task)
            places = find_places(leaves, alone)
        is_new = not places.mixed <= self.mixed
        self.mixed, self.made = self.mixed | places.mixed, self.made | places.made
        own = {p: v for p, v in leaves.items() if p not in self.mixed and isinstance(v, Tensor)}
        is_new |= bool(own) and self.look_for_padding(task, own)
        lengths = None
        if own and self.padding is not None:
            measured = loaded.lengths
            if measured is None or alone is not None or loaded.axes != self.axes:
                alone = alone or self.each_alone(task)
                measured = np.array([own_lengths(self.axes, alone[i]) for i in places.order])
            lengths = Lengths(self.padding, measured, self.padding.sizes(own))
        if not own or (lengths is not None and not lengths.are_tight):
            raise EgeriaError(self.company or "")
        mixed = {path: leaf for path, leaf in leaves.items() if path not in own}
        return Found(places.order, own, mixed, lengths, is_new)
