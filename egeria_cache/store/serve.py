"""Batches by the kernel: what is in memory is verified and decoded where it lies, the rest is
brought into memory first.

A record that was verified since its file was opened is believed, until anybody else writes to the
file; a rotating part of what is believed is verified again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from egeria_cache.store.codecs.codec import Coder
from egeria_cache.store.codecs.lossy import unpack
from egeria_cache.store.codecs.planes import GROUPS
from egeria_cache.store.decoders import Decoders
from egeria_cache.store.disk.files import GenerationFiles
from egeria_cache.store.disk.index import mark_of
from egeria_cache.store.fetch import Rows, Wanted
from egeria_cache.store.fill import Batch, allocate
from egeria_cache.store.native import ABSENT, VERIFIED, Kernel, Mapping, Serving, Source, kernel
from egeria_cache.store.records.keys import Keys
from egeria_cache.store.records.layout import Head

__all__ = ["Course", "serve"]

NUM_TURNS = 64
NO_MARK = 8
"""That no record has."""
LOAD_BYTES = 2**20
"""Read at a time, of what is not in memory."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch that went the short way, as far as that led."""

    columns: list[Tensor]
    serving: Serving
    round: int
    """Of trust, in which it did."""
    is_done: bool
    """All rows are there, and were believed before."""

    def hand_over(self, batch: Batch, files: GenerationFiles, keys: Keys) -> None:
        """Give what there is to a batch that goes on; note what was verified."""
        batch.take(self.columns)
        batch.hit[:] = self.serving.found != ABSENT
        _trust(files, keys, np.arange(len(keys)), self.serving, self.round)


@dataclass(frozen=True, slots=True)
class Basis:
    """What a short way depends on. Other threads may replace each of these at any time."""

    round: int
    table: npt.NDArray[np.uint64]
    mapping: Mapping
    template: tuple[Head, memoryview]

    @classmethod
    def of(cls, files: GenerationFiles, variant: int) -> Basis | None:
        """Return what there is; None where something is missing."""
        round_ = files.index.round  # first: what is distrusted from here on is seen by `holds`
        table, mapping, template = files.index.table(variant), files.mapping, files.template
        if table is None or mapping is None or template is None:
            return None
        return cls(round_, table, mapping, template)

    def holds(self, files: GenerationFiles, variant: int) -> bool:
        """Tell whether all of it is as it was."""
        return (
            files.index.round == self.round
            and files.index.table(variant) is self.table
            and files.mapping is self.mapping
            and files.template is self.template
        )


class Course:
    """The short way for samples that integers name: what one batch needs to know, the next one does
    too, and look-up, checks and decoding are one call.
    """

    def __init__(self, files: GenerationFiles, variant: int, basis: Basis, source: Source) -> None:
        self.template = basis.template
        """Head of the records."""
        self._files, self._variant, self._basis, self._source = files, variant, basis, source

    @classmethod
    def of(cls, files: GenerationFiles, variant: int) -> Course | None:
        """Return the short way; None where there is none."""
        native, basis = kernel(), Basis.of(files, variant)
        if native is None or basis is None or not _takes(basis.template[0]):
            return None
        source = _source(
            native, basis.mapping, basis.template, files.identity, variant, mark_of(basis.round),
            basis.table,
        )  # fmt: skip
        return cls(files, variant, basis, source)

    def holds(self, variant: int) -> bool:
        """Tell whether nothing has changed that it depends on."""
        return variant == self._variant and self._basis.holds(self._files, variant)

    def serve(self, keys: Keys, turn: int, decoders: Decoders, *, pin_memory: bool) -> Begun:
        """Read the samples, as far as they can be.

        Args:
            keys: Of B samples, integers.
            turn: Which part of what is believed is verified again.
            decoders: Does it.
            pin_memory: See `Batch`.
        """
        head, _ = self.template
        count, fields = len(keys), head.layout.fields
        columns = [allocate(count, one.num_bytes, pin_memory=pin_memory) for one in fields]
        out = [column.numpy() for column in columns]
        serving = self._source.batch(out, turn, numbers=keys.numbers)
        num_trusted = _run(serving, self._source, head, count, decoders)
        return Begun(columns, serving, self._basis.round, num_trusted == count)

    def fields(self, begun: Begun) -> dict[str, Tensor | list[Any]]:
        """Return what was read, by name."""
        return {
            one.name: unpack(column, one.shape, one.dtype, one.storage)
            for one, column in zip(self.template[0].layout.fields, begun.columns, strict=True)
            if one.dtype is not None
        }


def serve(
    files: GenerationFiles, wanted: Wanted, batch: Batch, decoders: Decoders, turn: int | None
) -> None:
    """Fill the rows that can be served, and note what was verified.

    Args:
        files: Of the generation.
        wanted: Which records.
        batch: The rows that are no hits yet are filled, as far as possible, and marked as hits.
        decoders: Do it.
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
    _serve(native, files, wanted, rows, batch, decoders, turn)
    rows = np.flatnonzero(stored & ~batch.hit)
    if len(rows):
        room = decoders.coder.scratch.array("loaded", LOAD_BYTES, np.uint8)
        native.load(segment.descriptor, wanted.located.raw[rows], room)
        segment.map_again()
        _serve(native, files, wanted, rows, batch, decoders, turn)


def _serve(
    native: Kernel,
    files: GenerationFiles,
    wanted: Wanted,
    rows: Rows,
    batch: Batch,
    decoders: Decoders,
    turn: int | None,
) -> None:
    located, keys, mapping = wanted.located, wanted.keys, wanted.segment.mapping
    if mapping is None:
        return
    template = batch.head, batch.head_bytes
    mark = NO_MARK if turn is None else mark_of(located.round)
    source = _source(native, mapping, template, wanted.identity, keys.variant, mark)
    serving = source.batch(
        [target for target in batch.targets if target is not None],
        0 if turn is None else turn,
        numbers=None if keys.numbers is None else keys.numbers[rows],
        spans=located.raw[rows],
        key_hashes=keys.hashes(rows) if keys.numbers is None else None,
        rows=rows,
    )
    _run(serving, source, batch.head, len(rows), decoders)
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
    mark: int,
    table: npt.NDArray[np.uint64] | None = None,
) -> Source:
    head, head_bytes = template
    return Source(
        native, mapping, identity=identity, variant=variant, mark=mark, head=bytes(head_bytes),
        fields=[(one.num_bytes, one.elements) for one in head.layout.fields], table=table,
    )  # fmt: skip


def _run(serving: Serving, source: Source, head: Head, count: int, decoders: Decoders) -> int:
    """Serve all parts; return how many records were believed before."""
    native = kernel()
    assert native is not None

    def part(chosen: slice, coder: Coder) -> int:
        room = coder.scratch.array("room", source.room_bytes, np.uint8)
        return serving.part(chosen, coder.unpacker(native), room)

    return sum(decoders.run(head.seed, part, count, count * head.row_bytes))


def _takes(head: Head) -> bool:
    """Whether the kernel knows all that such records hold."""
    return all(one.dtype is not None and one.elements[0] in GROUPS for one in head.layout.fields)
