"""Batches by the kernel: what is in memory is verified and decoded where it lies, the rest is
brought into memory first.

A record that was verified since its file was opened is believed, until anybody else writes to the
file; a rotating part of what is believed is verified again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from egeria_cache.store.codecs.codec import Coder
from egeria_cache.store.codecs.lossy import unpack
from egeria_cache.store.codecs.planes import GROUPS
from egeria_cache.store.decoders import Decoders
from egeria_cache.store.disk.files import GenerationFiles
from egeria_cache.store.disk.index import IntegerTable, mark_of
from egeria_cache.store.disk.segment import Segment
from egeria_cache.store.fetch import Rows, Wanted
from egeria_cache.store.fill import Batch, allocate
from egeria_cache.store.helpers import Helpers
from egeria_cache.store.native import ABSENT, VERIFIED, Kernel, Mapping, Serving, Source, kernel
from egeria_cache.store.records.keys import Keys
from egeria_cache.store.records.layout import Head

__all__ = ["Course", "serve"]

NUM_TURNS = 64
WRITTEN_TO = -2
"""What serving returns where the file was written to meanwhile."""
NO_MARK = 8
"""That no record has."""
LOAD_BYTES = 2**20
"""Read at a time, of what is not in memory."""


@dataclass(slots=True)
class Begun:
    """A batch that went the short way, as far as that led."""

    columns: list[Tensor]
    serving: Serving
    """Until it is taken back."""
    round: int
    """Of trust, in which it did."""
    num_news: int
    """Records that were verified, not believed; less than 0 if not all rows are there."""

    @property
    def is_begun(self) -> bool:
        """What was found counts."""
        return self.num_news != WRITTEN_TO

    def note(self, files: GenerationFiles, keys: Keys) -> None:
        """Note what was verified."""
        _trust(files, keys, np.arange(len(keys)), self.serving, self.round)

    def hand_over(self, batch: Batch) -> None:
        """Give what there is to a batch that goes on."""
        batch.take([_as_stored(column, len(batch.hit)) for column in self.columns])
        batch.hit[:] = self.serving.found != ABSENT


class Course:
    """The short way for samples that integers name: what one batch needs to know, the next one does
    too, and look-up, checks and decoding are one call.
    """

    def __init__(
        self,
        files: GenerationFiles,
        variant: int,
        table: IntegerTable,
        segment: Segment,
        template: tuple[Head, memoryview],
        helpers: Helpers,
    ) -> None:
        self.template = template
        """Head of the records."""
        self._files, self._variant = files, variant
        # Other threads may replace any of these.
        self._table, self._spans = table, table.spans
        self._segment, self._mapping = segment, segment.mapping
        native = kernel()
        assert native is not None
        assert self._mapping is not None
        head, _ = template
        self._native, self._helpers = native, helpers
        self._source = _source(
            native, self._mapping, template, files.identity, variant, helpers, self._spans
        )
        self._local = threading.local()
        self.bare = head.layout.bare
        self._row_bytes, self._fields = head.row_bytes, head.layout.fields
        self._names = [one.name for one in self._fields]
        self._as_they_are = all(one.storage is None for one in self._fields)
        self._columns = [
            (one.shape, one.dtype)
            if one.storage is None and one.dtype is not None
            else ((one.num_bytes,), torch.uint8)
            for one in self._fields
        ]

    @classmethod
    def of(
        cls, files: GenerationFiles, segment: Segment, variant: int, helpers: Helpers
    ) -> Course | None:
        """Return the short way; None where there is none."""
        table, template = files.index.table(variant), files.template
        if kernel() is None or table is None or template is None or segment.mapping is None:
            return None
        if not _takes(template[0]):
            return None
        return cls(files, variant, table, segment, template, helpers)

    def holds(self, variant: int) -> bool:
        """Tell whether nothing has changed that it depends on."""
        return (
            variant == self._variant
            and self._table.spans is self._spans
            and self._segment.mapping is self._mapping
            and self._files.template is self.template
        )

    def serve(
        self,
        numbers: npt.NDArray[np.int64],
        turn: int | None,
        decoders: Decoders,
        pin_memory: bool,
    ) -> Begun:
        """Read the samples, as far as they can be. Few calls: in training the processor has
        forgotten each of them from one batch to the next.

        Args:
            numbers: Their IDs, shape (B,).
            turn: Which part of what is believed is verified again; None for all of it.
            decoders: Have what belongs to this thread.
            pin_memory: See `Batch`.

        Raises:
            GoneError: Void or closed.
        """
        files, count, local = self._files, len(numbers), self._local.__dict__
        files.ensure_open()
        # In this order: whoever finds the file changed begins a round before noting when that was.
        written = files.written
        round_ = files.index.round
        columns = [
            allocate((count, *shape), dtype, pin_memory=pin_memory)
            for shape, dtype in self._columns
        ]
        # Taken out meanwhile: whoever interrupts this thread may read a batch, too.
        serving: Serving | None = local.pop("serving", None)
        if serving is None:
            serving = Serving(self._source, decoders.coder.unpacker(self._native))
        helpers = self._helpers.address or self._helpers.at(count * self._row_bytes, self._native)
        num_news = serving.serve(
            count, columns, NO_MARK if turn is None else mark_of(round_), turn or 0, written,
            numbers, helpers=helpers,
        )  # fmt: skip
        if not num_news:  # nobody wants to know more of it
            local["serving"] = serving
        return Begun(columns, serving, round_, num_news)

    def take_back(self, begun: Begun) -> None:
        """Use again what a batch was served with: all has been asked of it."""
        self._local.serving = begun.serving

    def fields(self, columns: Sequence[Tensor]) -> dict[str, Tensor | list[Any]]:
        """Return what was read, by name."""
        if self._as_they_are:
            return dict(zip(self._names, columns, strict=True))
        return {
            one.name: column
            if one.dtype is None or one.storage is None
            else unpack(column, one.shape, one.dtype, one.storage)
            for one, column in zip(self._fields, columns, strict=True)
        }


def serve(
    files: GenerationFiles,
    wanted: Wanted,
    batch: Batch,
    coder: Coder,
    helpers: Helpers,
    turn: int | None,
) -> None:
    """Fill the rows that can be served, and note what was verified.

    Args:
        files: Of the generation.
        wanted: Which records.
        batch: The rows that are no hits yet are filled, as far as possible, and marked as hits.
        coder: This thread's own.
        helpers: Help it.
        turn: Which part of what is believed is verified again; None for all of it.
    """
    native, segment = kernel(), wanted.segment
    stored = wanted.located.raw[:, 1] > 0
    rows = np.flatnonzero(stored & ~batch.hit)
    if native is None or not _takes(batch.head) or not len(rows):
        return
    if segment.mapping is None:
        segment.map_again()
    if segment.mapping is None:  # it cannot be: it would be read twice
        return
    batch.make_room()
    _serve(native, files, wanted, rows, batch, coder, helpers, turn)
    rows = np.flatnonzero(stored & ~batch.hit)
    if len(rows):
        room = coder.scratch.array("loaded", LOAD_BYTES, np.uint8)
        native.load(segment.descriptor, wanted.located.raw[rows], room)
        segment.map_again()
        _serve(native, files, wanted, rows, batch, coder, helpers, turn)


def _serve(
    native: Kernel,
    files: GenerationFiles,
    wanted: Wanted,
    rows: Rows,
    batch: Batch,
    coder: Coder,
    helpers: Helpers,
    turn: int | None,
) -> None:
    located, keys, mapping = wanted.located, wanted.keys, wanted.segment.mapping
    if mapping is None:
        return
    template = batch.head, batch.head_bytes
    source = _source(native, mapping, template, wanted.identity, keys.variant, helpers)
    serving = Serving(source, coder.unpacker(native))
    num_news = serving.serve(
        len(rows),
        [column for column in batch.columns if isinstance(column, Tensor)],
        NO_MARK if turn is None else mark_of(located.round),
        turn or 0,
        wanted.written,
        None if keys.numbers is None else keys.numbers[rows],
        spans=located.raw[rows],
        key_hashes=keys.hashes(rows) if keys.numbers is None else None,
        rows=rows,
        helpers=helpers.at(len(rows) * batch.head.row_bytes, native),
    )
    if num_news == WRITTEN_TO:
        return
    batch.hit[rows] = serving.found != ABSENT
    _trust(files, keys, rows, serving, located.round)


def _trust(files: GenerationFiles, keys: Keys, rows: Rows, serving: Serving, round_: int) -> None:
    verified = serving.found == VERIFIED
    files.index.trust(keys, rows[verified], serving.places[verified], round_)


def _source(
    native: Kernel,
    mapping: Mapping,
    template: tuple[Head, memoryview],
    identity: int,
    variant: int,
    helpers: Helpers,
    table: npt.NDArray[np.uint64] | None = None,
) -> Source:
    head, head_bytes = template
    return Source(
        native, mapping, identity=identity, variant=variant, head=bytes(head_bytes),
        fields=[(one.num_bytes, one.elements) for one in head.layout.fields],
        pace=helpers.pace((identity, head.layout)), table=table,
    )  # fmt: skip


def _as_stored(column: Tensor, num_rows: int) -> Tensor:
    """View rows as bytes, (B, bytes)."""
    flat = column.view(-1).view(torch.uint8)
    return flat.view(num_rows, flat.numel() // max(num_rows, 1))


def _takes(head: Head) -> bool:
    """Whether the kernel knows all that such records hold."""
    return all(one.dtype is not None and one.elements[0] in GROUPS for one in head.layout.fields)
