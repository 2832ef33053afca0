"""One batch being read: room for its rows, and the loops that fill them. Threads fill disjoint
rows; nothing here knows of threads otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from egeria_cache.store.codecs.codec import Codec, CodecError, Coder
from egeria_cache.store.codecs.gather import Bytes, Places, Source
from egeria_cache.store.codecs.lossy import unpack
from egeria_cache.store.files import Snapshot
from egeria_cache.store.layout import (
    CHECKSUM_BYTES,
    PREFIX_BYTES,
    FieldLayout,
    Head,
    split_lengths,
)
from egeria_cache.store.records import open_record, plain_value
from egeria_cache.store.values import RecordError

__all__ = ["Batch", "Spread", "assemble", "fill"]

T = TypeVar("T")

PARALLEL_COPY_BYTES = 128 * 1024
"""Raw records from this size on are copied by several threads, with the GIL released. Below it the
hand-over of the GIL costs more than the copy."""
CHUNK_BYTES = 2 * 2**20
"""Decoded bytes that are worked on at a time: few passes, and the temporaries are bounded."""


class Spread(Protocol):
    """See `fill`."""

    def __call__(self, work: Callable[[slice, Coder], T], count: int, num_bytes: int, /) -> list[T]:
        """Return what the calls of `work` return."""


@dataclass(slots=True)
class Batch:
    """The batch being filled; threads write disjoint rows."""

    head: Head
    """Of the first intact record; the others usually have the same."""
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
    corrupt: list[tuple[bytes, str]] = field(default_factory=list)

    @classmethod
    def begin(cls, head: Head, head_bytes: memoryview, num_rows: int, *, pin_memory: bool) -> Batch:
        """Expect rows like this head's, which must have passed its checksum: it says how much
        memory to take.
        """
        return cls(head, head_bytes, num_rows, pin_memory, np.zeros(num_rows, np.bool_))

    def make_room(self) -> None:
        """Allocate what the rows are decoded into."""
        for entry in self.head.layout.fields:
            if entry.dtype is None:
                self.columns.append([None] * self.num_rows)
                self.targets.append(None)
            else:
                packed = _allocate(self.num_rows, entry.num_bytes, pin_memory=self.pin_memory)
                self.columns.append(packed)
                self.targets.append(packed.numpy())

    @property
    def shared_bytes(self) -> int:
        """Bytes of a row, decoded, on which several threads may work; none of small raw ones."""
        if self.head.raw and self.head.record_bytes < PARALLEL_COPY_BYTES:
            return 0
        return sum(max(entry.num_bytes, 0) for entry in self.head.layout.fields)

    @property
    def plain(self) -> bool:
        """Raw tensors and nothing else: copied by the shortest loop."""
        fields = self.head.layout.fields
        return self.head.raw and bool(fields) and all(one.dtype is not None for one in fields)


def fill(snapshot: Snapshot, keys: Sequence[bytes], batch: Batch, spread: Spread) -> list[int]:
    """Read the rows; what is not intact is noted in the batch. Return the rows that are absent.

    Args:
        snapshot: Where to look.
        keys: Of the rows.
        batch: Filled.
        spread: Calls a function of (part, coder) for parts that together are `range(count)`, in as
            many threads as pay for so many bytes, and returns what the calls return.
    """
    places, absent = snapshot.locate(keys)
    if len(absent) == len(keys):
        return absent
    batch.make_room()
    left: Sequence[int] = range(len(keys))
    if batch.plain:
        left = _fill_plain(snapshot.source, keys, places, batch, spread)
    if len(left) > len(absent):
        rows = np.setdiff1d(left, absent) if absent else np.array(left)
        snapshot.reach(places[rows])
        records, others = _find_alike(snapshot.source, rows, places[rows], batch)
        damaged = _fill_alike(records, keys, batch, spread)
        for row in [*others, *damaged]:
            _fill_one(snapshot, keys[row], row, batch)
    return absent


def _fill_plain(
    source: Source,
    keys: Sequence[bytes],
    places: npt.NDArray[np.uint64],
    batch: Batch,
    spread: Spread,
) -> list[int]:
    """Copy records of raw tensors; return the rows that need a closer look.

    A plain loop: in training the processor has forgotten this code from one batch to the next, and
    each NumPy function that it must fetch again takes as long as several records here. Per record
    it copies the largest tensor, which brings it into the core's cache, and hashes the payload: the
    seed has the head that all of them should have, so that no record with another one passes.
    """
    start, size = batch.head.num_bytes, batch.head.record_bytes
    last = len(source.data) - size
    if last < 0:
        return list(range(len(keys)))
    try:  # one pass, with the GIL released: this is what waits for the disk
        promised = source.first_words(places[:, 0]).tolist()
    except IndexError:  # damaged, or committed after the file was mapped
        return list(range(len(keys)))
    sizes = [field.num_bytes for field in batch.head.layout.fields]
    begins = [start + sum(sizes[:position]) for position in range(len(sizes))]
    largest = sizes.index(max(sizes))
    targets = [target for target in batch.targets if target is not None]
    begin, num_bytes, target = begins[largest], sizes[largest], targets[largest]
    flat, digest, seed = target.reshape(-1).data, xxhash.xxh3_64_intdigest, batch.head.seed
    free, data, view = batch.shared_bytes > 0, source.data, source.view

    def copy(part: slice, _: Coder) -> list[int]:
        left = []
        records = zip(keys[part], places[part].tolist(), promised[part], strict=True)
        for row, (key, (place, stored), checksum) in enumerate(records, part.start):
            if stored == size and place <= last:
                at = place + begin
                if free:  # NumPy releases the GIL while it copies
                    target[row] = data[at : at + num_bytes]
                else:
                    flat[row * num_bytes : (row + 1) * num_bytes] = view[at : at + num_bytes]
                payload = view[place + start : place + size]
                if digest(payload, seed ^ digest(key)) == checksum:  # payload_seed()
                    continue
            left.append(row)
        return left

    left = [row for part in spread(copy, len(keys), len(keys) * batch.shared_bytes) for row in part]
    batch.hit.fill(True)
    batch.hit[left] = False
    if len(targets) > 1:
        rows = np.flatnonzero(batch.hit)
        starts = places[rows, 0].astype(np.int64)
        for other in {*range(len(targets))} - {largest}:
            targets[other][rows] = source.rows(starts + begins[other], sizes[other])
    return left


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
    heads: Bytes
    """Shape (N, bytes of the head)."""
    codecs: npt.NDArray[np.uint64]
    """Shape (N, fields)."""
    stored: Places
    """Encoded bytes, shape (N, fields)."""

    def __getitem__(self, chosen: slice | npt.NDArray[np.bool_]) -> _Records:
        """Return some of them."""
        return _Records(
            self.source,
            self.rows[chosen],
            self.starts[chosen],
            self.sizes[chosen],
            self.heads[chosen],
            self.codecs[chosen],
            self.stored[chosen],
        )


def _find_alike(
    source: Source,
    rows: npt.NDArray[np.int64],
    places: npt.NDArray[np.uint64],
    batch: Batch,
) -> tuple[_Records, list[int]]:
    """Return the records whose heads are the batch's but for checksum and lengths, and the rows
    that are left. Sizes are bounded; no checksum is verified yet.
    """
    fields = batch.head.layout.fields
    start, total = batch.head.num_bytes, len(source.data)
    # Unsigned: a damaged offset is large, never negative.
    within = (places[:, 1] <= total) & (places[:, 1] >= start)
    within &= places[:, 0] <= total - np.where(within, places[:, 1], 0)
    left = rows[~within].tolist()
    rows, starts, sizes = rows[within], *places[within].astype(np.int64).T
    source.touch(starts, sizes)
    heads = source.rows(starts, start)
    lengths = slice(PREFIX_BYTES, PREFIX_BYTES + 8 * len(fields))
    same = heads[:, CHECKSUM_BYTES:] == np.frombuffer(batch.head_bytes, np.uint8)
    same[:, PREFIX_BYTES - CHECKSUM_BYTES :][:, : 8 * len(fields)] = True
    codecs, stored = split_lengths(np.ascontiguousarray(heads[:, lengths]).view("<u8"))
    promised = np.array([field.num_bytes for field in fields])
    bounded = (codecs != Codec.RAW) | (promised < 0) | (stored == promised)
    alike = same.all(1) & bounded.all(1) & (stored.sum(1) + start == sizes)
    left += rows[~alike].tolist()
    records = _Records(source, rows, starts, sizes, heads, codecs, stored)
    return records if alike.all() else records[alike], left


def _fill_alike(
    records: _Records, keys: Sequence[bytes], batch: Batch, spread: Spread
) -> list[int]:
    """Verify, then decode, everything for many records at once but for a hash each; return the rows
    whose checksum does not match.
    """

    def fill_part(part: slice, coder: Coder) -> tuple[list[int], dict[int, Any]]:
        mine = records[part]
        promised = mine.heads[:, :CHECKSUM_BYTES].copy().view("<u8")[:, 0]
        intact = _hashes(mine, keys, batch) == promised
        damaged: list[int] = mine.rows[~intact].tolist()
        if damaged:
            mine = mine[intact]
        batch.hit[mine.rows] = True
        failed = _decode(mine, batch, coder)
        batch.hit[list(failed)] = False
        return damaged, failed

    count = len(records.rows)
    damaged = []
    for some, failed in spread(fill_part, count, count * batch.shared_bytes):
        damaged += some
        batch.corrupt.extend((keys[row], str(error)) for row, error in failed.items())
    return damaged


def _hashes(records: _Records, keys: Sequence[bytes], batch: Batch) -> npt.NDArray[np.uint64]:
    """Return what the checksums should be."""
    start, digest, view = batch.head.num_bytes, xxhash.xxh3_64_intdigest, records.source.view
    heads = records.heads.reshape(-1).data  # of which each hash is a seed; see payload_seed()
    found, at = [], 0
    places = zip(
        records.rows.tolist(), records.starts.tolist(), records.sizes.tolist(), strict=True
    )
    for row, place, size in places:
        seed = digest(heads[at + CHECKSUM_BYTES : at + start]) ^ digest(keys[row])
        found.append(digest(view[place + start : place + size], seed))
        at += start
    return np.array(found, np.uint64)


def _decode(records: _Records, batch: Batch, coder: Coder) -> dict[int, RecordError | CodecError]:
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
                records, starts, sizes, codecs, target, batch.head.layout.fields[position], coder
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
    coder: Coder,
) -> dict[int, CodecError]:
    """Decode one field of all records into their rows of the target; return those that failed."""
    failed: dict[int, CodecError] = {}
    num_rows = max(1, CHUNK_BYTES // max(field.num_bytes, 1))
    for codec in np.unique(codecs).tolist():
        of_codec = np.flatnonzero(codecs == codec)
        for begin in range(0, len(of_codec), num_rows):
            chosen = of_codec[begin : begin + num_rows]
            rows = records.rows[chosen]
            first, end = int(rows[0]), int(rows[-1]) + 1
            adjacent = end - first == len(rows)
            out = target[first:end] if adjacent else np.empty_like(target[: len(rows)])
            problems = coder.decode_many(
                records.source, starts[chosen], sizes[chosen], codec, out, field.elements
            )
            failed |= {int(rows[at]): error for at, error in problems.items()}
            if not adjacent:
                target[rows] = out
    return failed


def _fill_one(snapshot: Snapshot, key: bytes, row: int, batch: Batch) -> None:
    """Read a record of another layout, or say what is wrong with it."""
    try:
        record = open_record(key, snapshot.get(key) or b"")
        batch.odd[row] = {
            entry.name: record.value(position)
            if entry.dtype is None
            else record.tensor(position, Coder())
            for position, entry in enumerate(record.layout.fields)
        }
        batch.hit[row] = True
    except RecordError as error:
        batch.corrupt.append((key, str(error)))


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
    if not batch.odd and np.count_nonzero(batch.hit) == batch.num_rows:
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
    """Return uninitialised bytes. NumPy asks for huge pages where there are many, and torch does
    not: first-touch faults of small pages cost as much as the copy itself.
    """
    if pin_memory:
        return torch.empty((num_rows, num_bytes), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.empty((num_rows, num_bytes), np.uint8))
