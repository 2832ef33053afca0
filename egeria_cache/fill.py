"""One batch being read: room for its rows, and the loops that fill them. Threads fill disjoint
rows; nothing here knows of threads otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from egeria_cache.codec import Bytes, CodecError, Coder
from egeria_cache.files import LOCATOR, Snapshot
from egeria_cache.layout import CHECKSUM_BYTES, Head
from egeria_cache.lossy import unpack
from egeria_cache.records import Record, open_record
from egeria_cache.values import RecordError, Value

__all__ = ["PARALLEL_COPY_BYTES", "Batch", "assemble", "fill"]

HUGE_PAGES_BYTES = 4 * 2**20
PARALLEL_COPY_BYTES = 128 * 1024
"""Raw records from this size on are copied by several threads, with the GIL released. Below it the
hand-over of the GIL costs more than the copy."""
CHUNK_BYTES = 256 * 1024
"""Decoded bytes that are worked on at a time: few passes, all within a core's own cache."""


@dataclass(slots=True)
class Batch:
    """The batch being filled; threads write disjoint rows."""

    head: Head
    """Of the first intact record; the others usually have the same."""
    head_bytes: memoryview
    """The same, as stored, behind the checksum."""
    columns: list[Tensor | list[Any]]
    """Per field: its values, or its bytes as stored, uint8 (B, bytes)."""
    targets: list[Bytes | None]
    hit: npt.NDArray[np.bool_]
    odd: dict[int, dict[str, Any]] = field(default_factory=dict)
    corrupt: list[tuple[bytes, str]] = field(default_factory=list)
    absent: list[bytes] = field(default_factory=list)

    @classmethod
    def allocate(
        cls, head: Head, head_bytes: memoryview, num_rows: int, *, pin_memory: bool
    ) -> Batch:
        """Make room for rows like this head's, which must have passed its checksum: it says how
        much memory to take.
        """
        columns: list[Tensor | list[Any]] = []
        targets: list[Bytes | None] = []
        for entry in head.layout.fields:
            if entry.dtype is None:
                columns.append([None] * num_rows)
                targets.append(None)
                continue
            packed = _allocate(num_rows, entry.num_bytes, pin_memory=pin_memory)
            columns.append(packed)
            targets.append(packed.numpy())
        return cls(head, head_bytes, columns, targets, np.zeros(num_rows, np.bool_))

    @property
    def parallel(self) -> bool:
        """Decoding it by several threads pays."""
        return not self.head.raw or self.head.record_bytes >= PARALLEL_COPY_BYTES

    @property
    def plain(self) -> bool:
        """One raw tensor a record: copied by the shortest loop."""
        return self.head.raw and len(self.targets) == 1 and self.targets[0] is not None


def fill(
    snapshot: Snapshot,
    keys: Sequence[bytes],
    rows: npt.NDArray[np.int64],
    batch: Batch,
    coder: Coder,
) -> None:
    """Read the rows; what is not there or not intact is noted in the batch."""
    left = rows.tolist()
    if batch.plain:
        left = _fill_plain(snapshot, keys, left, batch)
    size = sum(max(entry.num_bytes, 0) for entry in batch.head.layout.fields)
    per_chunk = max(1, CHUNK_BYTES // max(size, 1))
    remaining = iter(left)
    like = batch.head, batch.head_bytes
    while chunk := list(itertools.islice(remaining, per_chunk)):
        records = {}
        for row in chunk:
            value = snapshot.get(keys[row])
            if value is None:
                batch.absent.append(keys[row])
                continue
            try:
                record = open_record(keys[row], value, like)
                if record.layout is batch.head.layout or record.layout == batch.head.layout:
                    records[row] = record
                else:
                    batch.odd[row] = _decode_alone(record, coder)
                    batch.hit[row] = True
            except RecordError as error:
                batch.corrupt.append((keys[row], str(error)))
        for row, problem in _decode_chunk(records, batch, coder).items():
            batch.corrupt.append((keys[row], str(problem)))
            del records[row]
        batch.hit[list(records)] = True


def _decode_chunk(
    records: dict[int, Record], batch: Batch, coder: Coder
) -> dict[int, RecordError | CodecError]:
    """Decode records of the batch's layout, field by field; return the rows that failed."""
    failed: dict[int, RecordError | CodecError] = {}
    for position, (target, column) in enumerate(zip(batch.targets, batch.columns, strict=True)):
        if target is None:
            assert isinstance(column, list)
            for row, record in records.items():
                try:
                    column[row] = record.value(position)
                except RecordError as error:
                    failed[row] = error
            continue
        by_codec: dict[int, list[int]] = {}
        for row, record in records.items():
            by_codec.setdefault(record.head.stored[position][0], []).append(row)
        elements = batch.head.layout.fields[position].elements
        for codec, rows in by_codec.items():
            first, end = rows[0], rows[-1] + 1
            adjacent = end - first == len(rows)
            out = target[first:end] if adjacent else np.empty_like(target[: len(rows)])
            stored = [records[row].payload[position] for row in rows]
            for place, problem in coder.decode_many(stored, codec, out, elements).items():
                failed[rows[place]] = problem
            if not adjacent:
                target[rows] = out
    return failed


def _decode_alone(record: Record, coder: Coder) -> dict[str, Value]:
    return {
        entry.name: record.value(position)
        if entry.dtype is None
        else record.tensor(position, coder)
        for position, entry in enumerate(record.layout.fields)
    }


def _fill_plain(
    snapshot: Snapshot, keys: Sequence[bytes], rows: list[int], batch: Batch
) -> list[int]:
    """Copy raw records of one tensor; return the rows that need a closer look.

    Heads are compared for the whole batch at once; then per record there is one copy and one hash.
    The hash is taken of the copy: it is still in the core's own cache, and it checks the copy too.
    """
    (target,), start, size = batch.targets, batch.head.num_bytes, batch.head.record_bytes
    assert target is not None
    locate = snapshot.locator
    locators = [locate(keys[row]) or b"" for row in rows]
    if set(map(len, locators)) != {LOCATOR.size}:
        return rows
    table = np.frombuffer(b"".join(locators), "<u8").reshape(-1, 2)
    mapped = np.frombuffer(snapshot.mapped, np.uint8)
    # Unsigned: a damaged offset is large, never negative.
    if not (table[:, 1] == size).all() or not (table[:, 0] <= len(mapped) - size).all():
        return rows
    places = table[:, 0].astype(np.int64)
    heads = mapped[places[:, None] + np.arange(start)]
    template = np.frombuffer(batch.head_bytes, np.uint8)
    alike = (heads[:, CHECKSUM_BYTES:] == template).all(1)
    promised = heads[:, :CHECKSUM_BYTES].copy().view("<u8")[:, 0]
    flat, source, num_bytes = target.reshape(-1).data, snapshot.mapped, size - start
    digest, seed = xxhash.xxh3_64_intdigest, batch.head.seed
    found = []
    if size >= PARALLEL_COPY_BYTES:
        for row, place in zip(rows, places.tolist(), strict=True):
            # NumPy releases the GIL while it copies.
            target[row] = mapped[place + start : place + size]
            found.append(digest(target[row].data, seed ^ digest(keys[row])))  # payload_seed()
    else:
        for row, place in zip(rows, places.tolist(), strict=True):
            part = flat[row * num_bytes : (row + 1) * num_bytes]
            part[:] = source[place + start : place + size]
            found.append(digest(part, seed ^ digest(keys[row])))  # payload_seed()
    intact = alike & (np.array(found, "<u8") == promised)
    at = np.array(rows, np.int64)
    batch.hit[at[intact]] = True
    return at[~intact].tolist()  # type: ignore[no-any-return]


def assemble(batch: Batch) -> dict[str, Tensor | list[Any]]:
    """Zero the missing rows; where shapes differ, turn a column into a list of tensors."""
    names = batch.head.layout.names
    columns = [
        unpack(column, field.shape, field.dtype, field.storage)
        if isinstance(column, Tensor) and field.dtype is not None
        else column
        for field, column in zip(batch.head.layout.fields, batch.columns, strict=True)
    ]
    for row, values in list(batch.odd.items()):
        if set(values) != set(names):
            batch.hit[row] = False
            del batch.odd[row]
    if not batch.odd and batch.hit.all():
        return dict(zip(names, columns, strict=True))
    missing = torch.from_numpy(np.flatnonzero(~batch.hit))
    fields: dict[str, Tensor | list[Any]] = {}
    for name, column in zip(names, columns, strict=True):
        if isinstance(column, Tensor):
            same = all(
                isinstance(item := values[name], Tensor)
                and item.shape == column.shape[1:]
                and item.dtype == column.dtype
                for values in batch.odd.values()
            )
            if same:
                for row, values in batch.odd.items():
                    column[row] = values[name]
                if len(missing):
                    column[missing] = torch.zeros((), dtype=column.dtype)
                fields[name] = column
                continue
            column = [column[row] if batch.hit[row] else None for row in range(len(column))]
        for row, values in batch.odd.items():
            column[row] = values[name]
        fields[name] = column
    return fields


def _allocate(num_rows: int, num_bytes: int, *, pin_memory: bool) -> Tensor:
    """Return uninitialised bytes; many of them on huge pages, which NumPy asks for and torch does
    not: first-touch faults of small pages cost as much as the copy itself.
    """
    if pin_memory or num_rows * num_bytes < HUGE_PAGES_BYTES:
        return torch.empty((num_rows, num_bytes), dtype=torch.uint8, pin_memory=pin_memory)
    return torch.from_numpy(np.empty((num_rows, num_bytes), np.uint8))
