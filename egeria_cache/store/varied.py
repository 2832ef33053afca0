"""A batch of records whose shapes differ, as those of padded samples do: each is read once, and its
tensors are made at their own size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.store.codecs.codec import Codec, CodecError, Coder
from egeria_cache.store.codecs.lossy import unpack
from egeria_cache.store.decoders import Decoders
from egeria_cache.store.disk.segment import ALIGNMENT
from egeria_cache.store.fetch import Rows, Wanted
from egeria_cache.store.fill import Batch, fill_one
from egeria_cache.store.records.layout import PREFIX_BYTES, FieldLayout
from egeria_cache.store.records.record import open_record, plain_value
from egeria_cache.store.records.values import RecordError

__all__ = ["fill_varied"]

MAX_TOGETHER_BYTES = 32 * 2**20
"""Larger records are read alone."""

Columns = dict[str, Tensor | list[Any]]


@dataclass(slots=True)
class _Stored:
    """One field of several records, still encoded."""

    entries: list[FieldLayout] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    codecs: list[int] = field(default_factory=list)
    stored: list[memoryview] = field(default_factory=list)

    def add(self, entry: FieldLayout, row: int, codec: int, stored: memoryview) -> None:
        """Take in one record's."""
        self.entries.append(entry)
        self.rows.append(row)
        self.codecs.append(codec)
        self.stored.append(stored)

    def parts(self) -> Iterable[_Stored]:
        """Return those that are decoded together: of one dtype; of lossy numbers, of one shape."""
        kinds = {(one.dtype, one.storage) for one in self.entries}
        if len(kinds) == 1 and self.entries[0].storage is None:
            return (self,)
        found: dict[Any, _Stored] = {}
        fields = zip(self.entries, self.rows, self.codecs, self.stored, strict=True)
        for entry, row, codec, stored in fields:
            kind = entry.dtype if entry.storage is None else entry
            found.setdefault(kind, _Stored()).add(entry, row, codec, stored)
        return found.values()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a column."""

    rows: Sequence[int]
    values: Tensor | list[Any]

    @property
    def kind(self) -> Any:
        """What rows of one tensor have in common; None if they are no tensors."""
        values = self.values
        return (values.shape[1:], values.dtype) if isinstance(values, Tensor) else None


def fill_varied(wanted: Wanted, batch: Batch, decoders: Decoders) -> Columns:
    """Read the rows; what is not intact is noted in the batch.

    Args:
        wanted: Which records.
        batch: Its head says which names there are; told which rows were found, and what is damaged.
        decoders: Does it.

    Returns:
        Per name, a tensor of B rows where all that were found have one shape, else a list. Empty if
        there is nothing.
    """
    stored = wanted.spans[:, 1] > 0
    if not stored.any():
        return {}
    num_bytes = int(wanted.spans[:, 1].sum())
    names = batch.head.layout.names

    def work(part: slice, coder: Coder) -> tuple[list[list[_Piece]], list[int]]:
        rows = part.start + np.flatnonzero(stored[part])
        return _read(wanted, rows, batch, coder)

    columns: list[list[_Piece]] = [[] for _ in names]
    for pieces, left in decoders.run("varied", work, batch.num_rows, num_bytes):
        for column, more in zip(columns, pieces, strict=True):
            column += more
        for row in left:
            fill_one(wanted, row, batch)
    for row, values in batch.odd.items():
        if set(values) != set(names):
            batch.hit[row] = False
            continue
        for name, column in zip(names, columns, strict=True):
            value = values[name]
            column.append(_Piece([row], value[None] if isinstance(value, Tensor) else [value]))
    return {name: _joined(each, batch) for name, each in zip(names, columns, strict=True)}


def _read(
    wanted: Wanted, rows: Rows, batch: Batch, coder: Coder
) -> tuple[list[list[_Piece]], list[int]]:
    """Return what intact records hold, per field, and the rows that need a closer look."""
    segment, keys = wanted.segment, wanted.keys
    places, sizes = wanted.spans[rows].astype(np.int64).T
    likely = (sizes >= PREFIX_BYTES) & (sizes <= MAX_TOGETHER_BYTES)
    likely &= sizes <= segment.size - places
    left = rows[~likely].tolist()
    rows, places, sizes = rows[likely], places[likely], sizes[likely]
    room = -(-sizes // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(room) - room
    view = coder.scratch.array("records", int(room.sum()), np.uint8).data
    names, identity = batch.head.layout.names, wanted.identity
    fields = [_Stored() for _ in names]
    found = zip(*map(np.ndarray.tolist, (rows, places, starts, sizes)), strict=True)
    for row, place, start, size in found:
        stored = view[start : start + size]
        if segment.try_read(stored, place) != size:
            left.append(row)
            continue
        try:
            record = open_record(keys[row], stored, identity)
        except RecordError:
            left.append(row)
            continue
        if record.layout.names != names:
            left.append(row)
            continue
        for one, entry, (codec, _), payload in zip(
            fields, record.layout.fields, record.head.stored, record.payload, strict=True
        ):
            one.add(entry, row, codec, payload)
        batch.hit[row] = True
    return [[_decoded(part, keys, batch, coder) for part in one.parts()] for one in fields], left


def _decoded(part: _Stored, keys: Sequence[bytes], batch: Batch, coder: Coder) -> _Piece:
    """Decode fields of one dtype; a record that does not decode is noted, and no hit."""
    failed: dict[int, Exception] = {}
    if not part.entries or part.entries[0].dtype is None:
        values: Tensor | list[Any] = _texts(part, failed)
    else:
        values = _tensors(part, coder, failed)
    for at, problem in failed.items():
        row = part.rows[at]
        if batch.hit[row]:
            batch.hit[row] = False
            batch.corrupt.append((keys[row], str(problem)))
    return _Piece(part.rows, values)


def _texts(part: _Stored, failed: dict[int, Exception]) -> list[Any]:
    values: list[Any] = [None] * len(part.rows)
    for at, (codec, stored) in enumerate(zip(part.codecs, part.stored, strict=True)):
        try:
            values[at] = plain_value(codec, stored)
        except RecordError as error:
            failed[at] = error
    return values


def _tensors(part: _Stored, coder: Coder, failed: dict[int, Exception]) -> Tensor | list[Any]:
    """Decode tensors into one piece of memory: views of it cost a fifth of tensors of their own."""
    entries = part.entries
    first, dtype = entries[0], entries[0].dtype
    assert dtype is not None
    packed = np.empty(sum(entry.num_bytes for entry in entries), np.uint8)
    flat, start = packed.data, 0
    columns = zip(entries, part.codecs, part.stored, strict=True)
    for at, (entry, codec, stored) in enumerate(columns):
        end = start + entry.num_bytes
        if codec == Codec.RAW:
            flat[start:end] = stored  # as long as the head promised
        else:
            try:
                coder.decode_into(stored, codec, packed[start:end], entry.elements)
            except CodecError as error:
                failed[at] = error
        start = end
    whole = torch.from_numpy(packed)
    if all(entry is first or entry == first for entry in entries):
        try:
            rows = whole.view(len(entries), first.num_bytes)
            return unpack(rows, first.shape, dtype, first.storage)
        except RuntimeError as error:  # a forged shape that no tensor can have
            failed.update(dict.fromkeys(range(len(entries)), error))
            return [None] * len(entries)
    values: list[Any] = [None] * len(entries)
    sizes = [entry.num_bytes // dtype.itemsize for entry in entries]
    for at, (own, entry) in enumerate(zip(whole.view(dtype).split(sizes), entries, strict=True)):
        try:
            values[at] = own.view(entry.shape)
        except RuntimeError as error:
            failed[at] = error
    return values


def _joined(pieces: Sequence[_Piece], batch: Batch) -> Tensor | list[Any]:
    """Return one column: the rows that are no hits are zeros, or None in a list."""
    num_rows, missing = batch.num_rows, np.flatnonzero(~batch.hit)
    pieces = [piece for piece in pieces if piece.rows]
    kinds = {piece.kind for piece in pieces}
    if len(kinds) == 1 and None not in kinds:
        first = pieces[0].values
        assert isinstance(first, Tensor)
        if len(pieces) == 1 and pieces[0].rows == list(range(num_rows)):
            whole = first
        else:
            whole = first.new_zeros((num_rows, *first.shape[1:]))
            for piece in pieces:
                assert isinstance(piece.values, Tensor)
                whole[piece.rows] = piece.values
        if len(missing):
            whole[torch.from_numpy(missing)] = torch.zeros((), dtype=whole.dtype)
        return whole
    column: list[Any] = [None] * num_rows
    for piece in pieces:
        values = piece.values
        rows = values.unbind(0) if isinstance(values, Tensor) else values
        for row, value in zip(piece.rows, rows, strict=True):
            column[row] = value
    for row in missing.tolist():
        column[row] = None
    return column
