"""One batch being read: room for its rows, and what fills them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from egeria_cache.store.codecs.codec import Codec, CodecError, Coder, Fields
from egeria_cache.store.codecs.gather import Bytes, Places, Source
from egeria_cache.store.decoders import Decoders
from egeria_cache.store.disk.segment import ALIGNMENT
from egeria_cache.store.fetch import Rows, Wanted, fetch_records, fetch_rows
from egeria_cache.store.records.layout import (
    CHECKSUM_BYTES,
    PREFIX_BYTES,
    FieldLayout,
    Head,
    split_lengths,
)
from egeria_cache.store.records.record import open_record, plain_value
from egeria_cache.store.records.values import RecordError

__all__ = ["Batch", "allocate", "fill", "fill_one"]

NUMBERS = {torch.uint8: np.uint8, torch.int64: np.int64, torch.float32: np.float32}
"""What both know: the most frequent ones."""
PLACEHOLDERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
"""By their bytes: what may lie where something else will."""
MAX_TEXT_BYTES = 2**20
"""Of all texts of a record that is read together with others."""


@dataclass(slots=True)
class Batch:
    """The batch being filled; threads write disjoint rows."""

    head: Head
    """Of an intact record, which says how much memory to take; the others usually have the same."""
    head_bytes: memoryview
    """The same, as stored, behind the checksum."""
    num_rows: int
    pin_memory: bool
    hit: npt.NDArray[np.bool_]
    columns: list[Tensor | list[Any]] = field(default_factory=list)
    """Per field: its values, or its bytes as stored, uint8 (B, bytes)."""
    targets: list[Bytes | None] = field(default_factory=list)
    """The columns of tensors, as arrays."""
    odd: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows of another layout."""
    corrupt: list[tuple[bytes, str]] = field(default_factory=list)

    def take(self, columns: Sequence[Tensor]) -> None:
        """Take the room for rows from elsewhere; all fields are tensors."""
        self.columns, self.targets = [*columns], [column.numpy() for column in columns]

    def make_room(self) -> None:
        """Allocate what the rows are decoded into, once."""
        if self.columns:
            return
        for entry in self.head.layout.fields:
            if entry.dtype is None:
                self.columns.append([None] * self.num_rows)
                self.targets.append(None)
            else:
                packed = allocate((self.num_rows, entry.num_bytes), pin_memory=self.pin_memory)
                self.columns.append(packed)
                self.targets.append(packed.numpy())


def fill(wanted: Wanted, batch: Batch, decoders: Decoders) -> None:
    """Read the rows that are not there yet; what is not intact is noted in the batch.

    Args:
        wanted: Which records.
        batch: Filled.
        decoders: Does what takes long.
    """
    rows = np.flatnonzero((wanted.spans[:, 1] > 0) & ~batch.hit)
    if not len(rows):
        return
    batch.make_room()
    targets = [target for target in batch.targets if target is not None]
    if batch.head.raw and 0 < len(targets) == len(batch.targets):
        found = rows[fetch_rows(wanted, rows, batch.head, batch.head_bytes, targets)]
        batch.hit[found] = True
    else:
        found = _fill_alike(wanted, rows, batch, decoders)
    for row in np.setdiff1d(rows, found).tolist():
        fill_one(wanted, row, batch)


def _fill_alike(wanted: Wanted, rows: Rows, batch: Batch, decoders: Decoders) -> Rows:
    """Read records whose heads are the batch's but for checksum and lengths, and decode them,
    everything for many at once. Return which they were.
    """
    records = _read(wanted, rows, batch, decoders)
    failed = _decode(records, batch, decoders)
    batch.hit[records.rows] = True
    batch.hit[list(failed)] = False
    batch.corrupt.extend((wanted.keys[row], str(error)) for row, error in failed.items())
    return records.rows


@dataclass(slots=True)
class _Records:
    """N records whose heads are like the batch's."""

    source: Source
    rows: npt.NDArray[np.int64]
    """Of the batch."""
    starts: Places
    """Of each record."""
    sizes: Places
    """Of each record."""
    codecs: npt.NDArray[np.uint64]
    """Shape (N, fields)."""
    stored: Places
    """Encoded bytes, shape (N, fields)."""

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> _Records:
        """Return some of them."""
        if chosen.all():
            return self
        return _Records(
            self.source,
            self.rows[chosen],
            self.starts[chosen],
            self.sizes[chosen],
            self.codecs[chosen],
            self.stored[chosen],
        )


def _read(wanted: Wanted, rows: Rows, batch: Batch, decoders: Decoders) -> _Records:
    """Read the records into memory, one behind the other; return those that are intact and have
    heads that are alike. Their sizes are bounded.
    """
    start, fields, spans = batch.head.num_bytes, batch.head.layout.fields, wanted.spans[rows]
    most = start + sum(max(one.num_bytes, 0) for one in fields) + MAX_TEXT_BYTES
    likely = (spans[:, 1] >= start) & (spans[:, 1] <= most)
    rows, sizes = rows[likely], spans[likely, 1].astype(np.int64)
    room = -(-sizes // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(room) - room
    whole = decoders.coder.scratch.array("records", int(room.sum()), np.uint8)
    intact = fetch_records(wanted, rows, starts, whole, start)
    rows, starts, sizes = rows[intact], starts[intact], sizes[intact]
    source = Source.of(whole)
    heads = source.rows(starts, start)
    same = heads[:, CHECKSUM_BYTES:] == np.frombuffer(batch.head_bytes, np.uint8)
    lengths = slice(PREFIX_BYTES, PREFIX_BYTES + 8 * len(fields))
    same[:, PREFIX_BYTES - CHECKSUM_BYTES :][:, : 8 * len(fields)] = True
    codecs, stored = split_lengths(np.ascontiguousarray(heads[:, lengths]).view("<u8"))
    promised = np.array([field.num_bytes for field in fields])
    bounded = (codecs != Codec.RAW) | (promised < 0) | (stored == promised)
    alike = same.all(1) & bounded.all(1) & (stored.sum(1) + start == sizes)
    return _Records(source, rows, starts, sizes, codecs, stored)[alike]


def _decode(
    records: _Records, batch: Batch, decoders: Decoders
) -> dict[int, RecordError | CodecError]:
    """Decode records of the batch's layout, field by field; return the rows that failed."""
    failed: dict[int, RecordError | CodecError] = {}
    starts = records.starts + batch.head.num_bytes
    for position, (target, column) in enumerate(zip(batch.targets, batch.columns, strict=True)):
        sizes, codecs = records.stored[:, position], records.codecs[:, position]
        if target is None:
            assert isinstance(column, list)
            texts = records.source.slices(starts, sizes)
            for row, codec, text in zip(records.rows.tolist(), codecs.tolist(), texts, strict=True):
                try:
                    column[row] = plain_value(codec, text)
                except RecordError as error:
                    failed[row] = error
        else:
            failed |= _decode_tensors(
                records, starts, sizes, codecs, target, batch.head.layout.fields[position], decoders
            )
        starts = starts + sizes
    return failed


def _decode_tensors(
    records: _Records,
    starts: Places,
    sizes: Places,
    codecs: npt.NDArray[np.uint64],
    target: Bytes,
    field: FieldLayout,
    decoders: Decoders,
) -> dict[int, CodecError]:
    """Decode one field of all records into their rows of the target; return those that failed."""
    failed: dict[int, CodecError] = {}
    for codec in np.unique(codecs).tolist():
        chosen = np.flatnonzero(codecs == codec)
        rows = records.rows[chosen]
        fields = Fields(records.source, starts[chosen], sizes[chosen], codec, field.elements)
        work = partial(_decode_part, fields, target, rows)
        for problems in decoders.run((codec, field), work, len(rows), len(rows) * field.num_bytes):
            failed |= problems
    return failed


def _decode_part(
    fields: Fields, target: Bytes, rows: Rows, part: slice, coder: Coder
) -> dict[int, CodecError]:
    """Decode some of the fields; return the rows that failed."""
    problems = coder.decode_many(fields[part], target, rows[part])
    return {int(rows[part][at]): error for at, error in problems.items()}


def fill_one(wanted: Wanted, row: int, batch: Batch) -> None:
    """Read a record of another layout, or say what is wrong with it."""
    key = wanted.keys[row]
    try:
        record = open_record(
            key, wanted.segment.record(*wanted.spans[row].tolist()), wanted.identity
        )
        coder = Coder()
        batch.odd[row] = {
            entry.name: record.value(position)
            if entry.dtype is None
            else record.tensor(position, coder)
            for position, entry in enumerate(record.layout.fields)
        }
        batch.hit[row] = True
    except (RecordError, OSError) as error:
        batch.corrupt.append((key, str(error)))


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, *, pin_memory: bool
) -> Tensor:
    """Return an uninitialised tensor. NumPy asks for huge pages where there are many, and torch
    does not: first-touch faults of small pages cost as much as the copy itself.
    """
    if pin_memory:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    of_numpy = NUMBERS.get(dtype)
    if of_numpy is not None:
        return torch.from_numpy(np.empty(shape, of_numpy))
    return torch.from_numpy(np.empty(shape, PLACEHOLDERS[dtype.itemsize])).view(dtype)
