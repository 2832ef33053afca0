"""Rows on the training device ahead of their need.

A batch is copied there by a reader thread, in a lane beside the training step: the step waits for
it on the device, and takes a copy of its own. All samples of a small data set stay there: from the
second pass on nothing of them is read, or copied to the device.

One lock orders the threads on the host, events order what the device does: whatever takes rows
follows the copies that brought them, and memory is written again, or given to others, only after
whatever took rows from it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from egeria_cache.batch import SampleId
from egeria_cache.device import Event, Lane, mark, pinned, to_device

Numbers = npt.NDArray[np.int64]


class Staged(NamedTuple):
    """A batch's rows on the device."""

    rows: dict[str, Tensor]
    ready: Event | None
    """When all of them are there."""


class Ring:
    """Copies the batches to come to one device. Any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.lane = Lane(device)

    def stage(self, rows: dict[str, Tensor]) -> Staged:
        """Begin to copy rows of the host, page-locked if the device has that.

        Raises:
            RuntimeError: There is no memory left on the device.
        """
        with self.lock:
            with self.lane.use():
                there = {name: to_device(values, self.device) for name, values in rows.items()}
            ready = self.lane.mark()
            self.lane.held.hold(rows, ready)
        return Staged(there, ready)

    def take(self, staged: Staged) -> dict[str, Tensor]:
        """Return the rows in memory of the calling thread's own stream."""
        if not self.lane.is_beside:
            return staged.rows
        with self.lock:
            self.lane.lead(staged.ready)
            rows = {name: values.clone() for name, values in staged.rows.items()}
            self.lane.held.hold(staged.rows, mark(self.device))
        return rows


_rings: dict[torch.device, Ring] = {}
_lock = threading.Lock()


def ring_of(device: torch.device) -> Ring:
    """Return the ring of a device."""
    with _lock:
        if device not in _rings:
            _rings[device] = Ring(device)
        return _rings[device]


class Place(NamedTuple):
    """Where the rows of a batch lie."""

    numbers: Numbers
    draws: Numbers
    there: Tensor
    """The numbers on the device: int64, shape (B,)."""
    ready: Event | None
    """When all of it is there."""
    kept: dict[str, Tensor]
    """The host values of the batch."""


class Resident:
    """The rows of all samples of a data set, on a device; each sample's number is its row's.

    Of each sample one random draw is resident: a newer one takes its place. `kept` values (labels
    and the like) stay on the host, so that a resident sample needs no second read of its record.

    Args:
        ring: Of the device.
        rows: One batch of the tensors to be held, by name; only shape and dtype of a row are read.
        kept: The same, of those that stay on the host.
        num_samples: How many there are.

    Raises:
        RuntimeError: There is no memory left.
    """

    def __init__(
        self,
        ring: Ring,
        rows: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        num_samples: int,
    ) -> None:
        self.is_closed = False
        self.slabs = {
            # Whoever asks for what is not there is to notice.
            name: torch.full(
                (num_samples, *like.shape[1:]), torch.nan if like.is_floating_point() else 0,
                dtype=like.dtype, device=ring.device,
            )
            for name, like in rows.items()
        }  # fmt: skip
        self._kept = {k: v.new_empty((num_samples, *v.shape[1:])) for k, v in kept.items()}
        self._draws = np.zeros(num_samples, np.int64)
        self._is_there = np.zeros(num_samples, np.bool_)
        self._ring, self._lane = ring, ring.lane
        with ring.lock:
            self._lane.follow_current()  # the memory may have been another's until now

    def insert(
        self, numbers: Numbers, draws: Numbers, rows: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Write the rows of some samples, shape (N, ...), in the host's memory."""
        with self._ring.lock:
            if self.is_closed:
                return
            try:
                with self._lane.use():
                    index, source = self._uploaded(numbers)
                    for name, slab in self.slabs.items():
                        slab.index_copy_(0, index, to_device(rows[name], self._ring.device))
                self._lane.held.hold((source, rows), self._lane.mark())
                for path, values in kept.items():
                    self._kept[path][torch.from_numpy(numbers)] = values
            except Exception:  # what lies there is not what it is said to be
                self._close()
                raise
            self._draws[numbers], self._is_there[numbers] = draws, True

    def place(self, numbers: Numbers, draws: Numbers) -> Place | None:
        """Return where rows of a batch lie, in that order, repeats allowed; None: not all do."""
        with self._ring.lock:
            if not self._has(numbers, draws):
                return None
            with self._lane.use():
                index, source = self._uploaded(numbers)
            ready = self._lane.mark()
            self._lane.held.hold((index, source), ready)
            kept = {path: v[torch.from_numpy(numbers)] for path, v in self._kept.items()}
            return Place(numbers, draws, index, ready, kept)

    def gather(self, place: Place) -> dict[str, Tensor]:
        """Return the rows as fresh tensors.

        Raises:
            LookupError: Another draw has taken the place of one of them, or all were given back.
        """
        with self._ring.lock:
            if not self._has(place.numbers, place.draws):
                raise LookupError("not all rows are on the device any more")
            self._lane.lead(place.ready)
            rows = self.rows(place.there)
            # Only when it has read them may they be written again, or its index be freed.
            done = mark(self._ring.device)
            self._lane.follow(done)
            self._lane.held.hold(place.there, done)
            return rows

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        """Return the rows of samples, with nothing of the host: this can be captured in a graph.

        A row that is not resident is NaN, or zero where the numbers have no NaN.

        Args:
            index: The samples' numbers, on the device: int64, shape (B,).
        """
        return {name: slab.index_select(0, index) for name, slab in self.slabs.items()}

    def close(self) -> None:
        """Serve nothing more, and give the memory back. Idempotent."""
        with self._ring.lock:
            self._close()

    def _close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._lane.rejoin()
            self.slabs, self._kept = {}, {}

    def _has(self, numbers: Numbers, draws: Numbers) -> bool:
        is_there = self._is_there[numbers] & (self._draws[numbers] == draws)
        return not self.is_closed and bool(is_there.all())

    def _uploaded(self, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Copy to the device; in the lane. Returns what is there, and what it is copied from."""
        source = pinned(torch.from_numpy(numbers), self._ring.device)
        return to_device(source, self._ring.device), source


def numbers_of(ids: Sequence[SampleId], most: int) -> Numbers | None:
    """Return sample IDs as an array, shape (B,); None: not all are whole numbers below `most`."""
    numbers = np.array(ids)
    if numbers.dtype != np.int64 or numbers.ndim != 1:
        return None
    return numbers if numbers.view(np.uint64).max() < most else None
