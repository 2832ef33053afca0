"""A batch of records whose shapes differ, as those of padded samples do: each is read once, and its
tensors are made at their own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_cache.store.codecs.codec import Codec, CodecError, Coder
from egeria_cache.store.codecs.lossy import unpack
from egeria_cache.store.disk.log import Spans
from egeria_cache.store.disk.segment import ALIGNMENT, Segment
from egeria_cache.store.fill import PARALLEL_COPY_BYTES, Batch, Spread, fill_one
from egeria_cache.store.records.layout import PREFIX_BYTES, FieldLayout
from egeria_cache.store.records.record import open_record, plain_value
from egeria_cache.store.records.values import RecordError

__all__ = ["fill_varied"]

MAX_TOGETHER_BYTES = 32 * 2**20
"""Larger records are read alone."""

Columns = dict[str, Tensor | list[Any]]


@dataclass(slots=True)
class _Alike:
    """Stored fields of one layout."""

    rows: list[int] = field(default_factory=list)
    codecs: list[int] = field(default_factory=list)
    stored: list[memoryview] = field(default_factory=list)


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


def fill_varied(
    segment: Segment, spans: Spans, keys: Sequence[bytes], batch: Batch, spread: Spread
) -> Columns:
    """Read the rows; what is not intact is noted in the batch.

    Args:
        segment: What to read from.
        spans: Where each row's record begins and how long it is, shape (B, 2); 0 if it is absent.
        keys: Of the rows.
        batch: Its head says which names there are; told which rows were found, and what is damaged.
        spread: See `fill`.

    Returns:
        Per name, a tensor of B rows where all that were found have one shape, else a list. Empty if
        there is nothing.
    """
    stored = spans[:, 1] > 0
    if not stored.any():
        return {}
    num_bytes = int(spans[:, 1].sum())
    if batch.head.raw and num_bytes < PARALLEL_COPY_BYTES * np.count_nonzero(stored):
        num_bytes = 0
    names = batch.head.layout.names

    def work(part: slice, coder: Coder) -> tuple[list[list[_Piece]], list[int]]:
        rows = part.start + np.flatnonzero(stored[part])
        return _read(segment, keys, rows, spans[rows], batch, coder)

    columns: list[list[_Piece]] = [[] for _ in names]
    for pieces, left in spread(work, len(keys), num_bytes):
        for column, more in zip(columns, pieces, strict=True):
            column += more
        for row in left:
            fill_one(segment, spans[row], keys[row], row, batch)
    for row, values in batch.odd.items():
        if set(values) != set(names):
            batch.hit[row] = False
            continue
        for name, column in zip(names, columns, strict=True):
            value = values[name]
            column.append(_Piece([row], value[None] if isinstance(value, Tensor) else [value]))
    return {name: _joined(each, batch) for name, each in zip(names, columns, strict=True)}


def _read(
    segment: Segment,
    keys: Sequence[bytes],
    rows: Any,
    spans: Spans,
    batch: Batch,
    coder: Coder,
) -> tuple[list[list[_Piece]], list[int]]:
    """Return what intact records hold, per field, and the rows that need a closer look."""
    places, sizes = spans.astype(np.int64).T
    likely = (sizes >= PREFIX_BYTES) & (sizes <= MAX_TOGETHER_BYTES)
    likely &= sizes <= segment.size - places
    left = rows[~likely].tolist()
    rows, places, sizes = rows[likely], places[likely], sizes[likely]
    room = -(-sizes // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(room) - room
    view = coder.scratch.array("records", int(room.sum()), np.uint8).data
    names, identity = batch.head.layout.names, batch.identity
    fields: list[dict[FieldLayout, _Alike]] = [{} for _ in names]
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
        for alike, entry, (codec, _), payload in zip(
            fields, record.layout.fields, record.head.stored, record.payload, strict=True
        ):
            same = alike.get(entry)
            if same is None:
                same = alike[entry] = _Alike()
            same.rows.append(row)
            same.codecs.append(codec)
            same.stored.append(payload)
        batch.hit[row] = True
    pieces = [
        [
            piece
            for entry, same in alike.items()
            for piece in _decoded(entry, same, keys, batch, coder)
        ]
        for alike in fields
    ]
    return pieces, left


def _decoded(
    entry: FieldLayout, alike: _Alike, keys: Sequence[bytes], batch: Batch, coder: Coder
) -> Iterator[_Piece]:
    """Decode fields of one layout; a record that does not decode is noted, and no hit."""
    values: Tensor | list[Any]
    failed: dict[int, Exception] = {}
    if entry.dtype is None:
        values = [None] * len(alike.rows)
        for at, (codec, stored) in enumerate(zip(alike.codecs, alike.stored, strict=True)):
            try:
                values[at] = plain_value(codec, stored)
            except RecordError as error:
                failed[at] = error
    else:
        size = entry.num_bytes
        packed = np.empty((len(alike.rows), size), np.uint8)
        flat = packed.reshape(-1).data
        for at, (codec, stored) in enumerate(zip(alike.codecs, alike.stored, strict=True)):
            if codec == Codec.RAW:
                flat[at * size : at * size + size] = stored  # as long as the head promised
                continue
            try:
                coder.decode_into(stored, codec, packed[at], entry.elements)
            except CodecError as error:
                failed[at] = error
        try:
            values = unpack(torch.from_numpy(packed), entry.shape, entry.dtype, entry.storage)
        except RuntimeError as error:  # a forged shape that no tensor can have
            failed, values = dict.fromkeys(range(len(alike.rows)), error), []
    for at, problem in failed.items():
        row = alike.rows[at]
        if batch.hit[row]:
            batch.hit[row] = False
            batch.corrupt.append((keys[row], str(problem)))
    if len(values):
        yield _Piece(alike.rows, values)


def _joined(pieces: Sequence[_Piece], batch: Batch) -> Tensor | list[Any]:
    """Return one column: the rows that are no hits are zeros, or None in a list."""
    num_rows, missing = batch.num_rows, np.flatnonzero(~batch.hit)
    kinds = {piece.kind for piece in pieces}
    if len(kinds) == 1 and None not in kinds:
        first = pieces[0].values
        assert isinstance(first, Tensor)
        if len(pieces) == 1 and pieces[0].rows == list(range(num_rows)):
            whole = first
        else:
            whole = first.new_zeros((num_rows, *first.shape[1:]))
            for piece in pieces:
                whole[piece.rows] = piece.values
        if len(missing):
            whole[torch.from_numpy(missing)] = torch.zeros((), dtype=whole.dtype)
        return whole
    column: list[Any] = [None] * num_rows
    for piece in pieces:
        for row, value in zip(piece.rows, piece.values, strict=True):
            column[row] = value
    for row in missing.tolist():
        column[row] = None
    return column
