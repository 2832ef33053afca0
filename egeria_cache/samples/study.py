"""What a collate function does, found by calling it: padding, and company."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from egeria_cache.attempt import Attempt
from egeria_cache.batch import Padding, SampleId, flatten, is_dense, row_meta
from egeria_cache.samples.collation import find_padding, find_places
from egeria_cache.samples.content import same_values
from egeria_cache.samples.loading import Task

Leaves = Mapping[str, Any]


class Study:
    """What is known of one collate function so far.

    Args:
        load: Loads and collates the samples of each task, as if there were no other.
    """

    def __init__(self, load: Callable[[Sequence[Task]], list[Any]]) -> None:
        self.padding: Padding | None = None
        """How it pads, as far as has been seen."""
        self.why_not: str | None = None
        """Why its padding cannot be undone."""
        self.company: str | None = None
        """Why a sample's leaves are not all its own: its batches are then loaded as they are, hits
        and misses together, and only the front's work is spared."""
        self.mixed: frozenset[str] = frozenset()
        """Those leaves: nothing vouches for them."""
        self.made: frozenset[str] = frozenset()
        """Those of them that are made from company, labels say, and are no padding."""
        self._load = load
        self._kinds: set[tuple[Any, ...]] = set()
        self._before: tuple[Any, SampleId, int] | None = None
        """A sample of the batch that was studied last: alone, no sample shows padding."""
        self._alone: tuple[tuple[Any, ...], list[dict[str, Any]]] | None = None
        """Which samples a batch has, and each collated alone."""

    def leaves(self, task: Task, rows: np.ndarray) -> dict[str, Any]:
        """Return the leaves of a batch of some samples of a task: bool, shape (B,)."""
        return flatten(self._load([task.take(rows)])[0], int(rows.sum()))[1]

    def alone(self, task: Task, row: int) -> dict[str, Any]:
        """Return the leaves of one sample, collated alone."""
        if self._alone is not None and self._alone[0] == _samples(task):
            return self._alone[1][row]
        return self.leaves(task, np.arange(len(task.ids)) == row)

    def load_together(self, why: str) -> None:
        """Load whole batches from now on: the leaves of a sample depend on its company."""
        self.company = why
        self.padding = self.why_not = None
        self._kinds.clear()
        self._before = None

    def each_alone(self, task: Task) -> list[dict[str, Any]]:
        """Return the leaves of each sample of a task, collated alone."""
        each = [task.take(np.arange(len(task.ids)) == row) for row in range(len(task.ids))]
        return [flatten(loaded, 1)[1] for loaded in self._load(each)]

    def forget_samples(self) -> None:
        """Keep what was found out, and not the samples."""
        self._alone = None

    def look_for_padding(self, task: Task, leaves: Leaves) -> bool:
        """Find out how a loaded batch was padded, if batches of its shape are new.

        Every sample of it is loaded again and collated alone. What the collate function draws or
        raises then is no news: whether its samples can be cached at all is told later, with the
        reason (`why_not_cacheable`).

        Returns:
            Whether more is padded than was known: what was stored before must not be served.
        """
        if task.indices is None:
            return False
        leaves = {path: leaf for path, leaf in leaves.items() if path not in self.mixed}
        dense = [(path, leaf) for path, leaf in leaves.items() if is_dense(leaf) and leaf.dim()]
        kind = tuple((path, *self._shape(path, leaf).shape) for path, leaf in dense)
        if kind in self._kinds or self.why_not is not None:
            return False
        self._kinds.add(kind)
        found = None
        with Attempt():
            if len(task.ids) == 1 and self._before is not None:
                index, sample_id, draw = self._before
                task = task._replace(
                    indices=[index, *task.indices], ids=[sample_id, *task.ids],
                    draws=[draw, *task.draws],
                )  # fmt: skip
                leaves = self.leaves(task, np.ones(2, bool))
            self._before = task.indices[0], task.ids[0], task.draws[0]  # type: ignore[index]
            alone = self.each_alone(task)
            if self.company is not None:
                alone = [alone[i] for i in find_places(leaves, alone).order]
            self._alone = _samples(task), alone
            found = find_padding(leaves, alone)
        if found is None:
            return False
        old = self.padding or Padding((), {})
        axes, values = {*old.axes, *found.axes}, {**old.values, **found.values}
        if len({(axis.leaf, axis.dim) for axis in axes}) < len(axes) or not all(
            same_values(old.values[path], values[path]) for path in old.values
        ):
            self.why_not = "its collate_fn pads in one way in one batch, and in another later"
            return False
        is_new = axes != set(old.axes)
        self.padding = Padding(tuple(sorted(axes)), values)
        return is_new

    def _shape(self, path: str, leaf: Tensor) -> Tensor:
        return row_meta(leaf) if self.padding is None else self.padding.row_meta(path, leaf)


def _samples(task: Task) -> tuple[Any, ...]:
    return (*task.ids, *task.draws)
