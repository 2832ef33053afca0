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
from egeria_cache.store.disk.log import Spans
from egeria_cache.store.disk.segment import ALIGNMENT, Segment
from egeria_cache.store.records.layout import (
    CHECKSUM,
    CHECKSUM_BYTES,
    PREFIX_BYTES,
    FieldLayout,
    Head,
    split_lengths,
)
from egeria_cache.store.records.record import open_record, plain_value
from egeria_cache.store.records.values import RecordError

__all__ = ["PARALLEL_COPY_BYTES", "Batch", "Spread", "fill", "fill_one"]

T = TypeVar("T")

PARALLEL_COPY_BYTES = 128 * 1024
"""Raw records from this size on are read by several threads. Below it waking a thread costs more
than its part of the copy."""
MAX_TEXT_BYTES = 2**20
"""Of all texts of a record that is read together with others."""
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
    """Of an intact record, which says how much memory to take; the others usually have the same."""
    head_bytes: memoryview
    """The same, as stored, behind the checksum."""
    identity: int
    """Of the generation; part of every checksum."""
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
    def seed(self) -> int:
        """Of the checksums, but for the keys; see `payload_seed`."""
        return self.head.seed ^ self.identity

    @property
    def shared_bytes(self) -> int:
        """Bytes of a row, decoded, on which several threads may work; none of small raw ones."""
        if self.head.raw and self.head.record_bytes < PARALLEL_COPY_BYTES:
            return 0
        return sum(max(entry.num_bytes, 0) for entry in self.head.layout.fields)


def fill(
    segment: Segment, spans: Spans, keys: Sequence[bytes], batch: Batch, spread: Spread
) -> None:
    """Read the rows; what is not intact is noted in the batch.

    Args:
        segment: What to read from.
        spans: Where each row's record begins and how long it is, shape (B, 2); 0 if it is absent.
        keys: Of the rows.
        batch: Filled.
        spread: Calls a function of (part, coder) for parts that together are `range(count)`, in as
            many threads as pay for so many bytes, and returns what the calls return.
    """
    stored = spans[:, 1] > 0
    if not stored.any():
        return
    batch.make_room()
    targets = [target for target in batch.targets if target is not None]
    plain = batch.head.raw and 0 < len(targets) == len(batch.targets)

    def work(part: slice, coder: Coder) -> list[int]:
        rows = part.start + np.flatnonzero(stored[part])
        if plain:
            return _fill_plain(segment, keys, rows, spans[rows], targets, batch)
        return _fill_alike(segment, keys, rows, spans[rows], batch, coder)

    for left in spread(work, len(keys), len(keys) * batch.shared_bytes):
        for row in left:
            fill_one(segment, spans[row], keys[row], row, batch)


def _fill_plain(
    segment: Segment,
    keys: Sequence[bytes],
    rows: npt.NDArray[np.int64],
    spans: Spans,
    targets: Sequence[Bytes],
    batch: Batch,
) -> list[int]:
    """Read records of raw tensors to where they belong; return the rows that need a closer look.

    Plain loops: in training the processor has forgotten this code from one batch to the next, and
    each NumPy function that it must fetch again takes as long as several records here. The seed of
    the checksum has the head that all of them should have, so that no record with another passes.
    """
    size, head_seed, head = batch.head.record_bytes, batch.seed, bytearray(batch.head.num_bytes)
    read, digest, checksum_of = segment.read, xxhash.xxh3_64_intdigest, CHECKSUM.unpack_from
    # Slices of memory views: as a buffer, a row of an array takes longer than the rest.
    (flat, width), *more = [(target.reshape(-1).data, target.shape[1]) for target in targets]
    left = []
    for row, (place, stored) in zip(rows.tolist(), spans.tolist(), strict=True):
        first = flat[row * width : (row + 1) * width]
        others = [one[row * wide : (row + 1) * wide] for one, wide in more] if more else ()
        try:
            if stored == size and read((head, first, *others), place) == size:
                seed = head_seed ^ digest(keys[row])  # payload_seed()
                found = _digest(first, others, seed) if others else digest(first, seed)
                if found == checksum_of(head)[0]:
                    continue
        except OSError:  # a bad sector: of this record alone
            pass
        left.append(row)
    batch.hit[rows] = True
    batch.hit[left] = False
    return left


def _digest(first: Any, others: Sequence[Any], seed: int) -> int:
    payload = xxhash.xxh3_64(first, seed)
    for one in others:
        payload.update(one)
    return payload.intdigest()


def _fill_alike(
    segment: Segment,
    keys: Sequence[bytes],
    rows: npt.NDArray[np.int64],
    spans: Spans,
    batch: Batch,
    coder: Coder,
) -> list[int]:
    """Read records whose heads are the batch's but for checksum and lengths, verify and decode
    them, everything for many at once but for a hash each. Return the rows that are left.
    """
    records = _read(segment, rows, spans, batch, coder)
    start, identity, view = batch.head.num_bytes, batch.identity, records.source.view
    digest = xxhash.xxh3_64_intdigest
    found = []
    for row, place, size in zip(
        records.rows.tolist(), records.starts.tolist(), records.sizes.tolist(), strict=True
    ):  # see payload_seed()
        seed = digest(view[place + CHECKSUM_BYTES : place + start]) ^ digest(keys[row]) ^ identity
        found.append(digest(view[place + start : place + size], seed))
    intact = np.array(found, np.uint64) == records.source.words(records.starts, 1)[:, 0]
    records = records[intact]
    batch.hit[records.rows] = True
    failed = _decode(records, batch, coder)
    batch.hit[list(failed)] = False
    batch.corrupt.extend((keys[row], str(error)) for row, error in failed.items())
    left: list[int] = np.setdiff1d(rows, records.rows).tolist()
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


def _read(
    segment: Segment,
    rows: npt.NDArray[np.int64],
    spans: Spans,
    batch: Batch,
    coder: Coder,
) -> _Records:
    """Read the records into memory, one behind the other; return those whose heads are alike. Their
    sizes are bounded; no checksum is verified yet.
    """
    start, fields = batch.head.num_bytes, batch.head.layout.fields
    most = start + sum(max(one.num_bytes, 0) for one in fields) + MAX_TEXT_BYTES
    likely = (spans[:, 1] >= start) & (spans[:, 1] <= most)
    rows, places, sizes = rows[likely], *spans[likely].astype(np.int64).T
    room = -(-sizes // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(room) - room
    whole = coder.scratch.array("records", int(room.sum()), np.uint8)
    view, wanted = whole.data, zip(*map(np.ndarray.tolist, (places, starts, sizes)), strict=True)
    got = [segment.try_read(view[at : at + size], place) for place, at, size in wanted]
    read = np.array(got, np.int64) == sizes
    rows, starts, sizes = rows[read], starts[read], sizes[read]
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


def fill_one(segment: Segment, span: Any, key: bytes, row: int, batch: Batch) -> None:
    """Read a record of another layout, or say what is wrong with it."""
    try:
        record, coder = open_record(key, segment.record(*span.tolist()), batch.identity), Coder()
        batch.odd[row] = {
            entry.name: record.value(position)
            if entry.dtype is None
            else record.tensor(position, coder)
            for position, entry in enumerate(record.layout.fields)
        }
        batch.hit[row] = True
    except (RecordError, OSError) as error:
        batch.corrupt.append((key, str(error)))


def _allocate(num_rows: int, num_bytes: int, *, pin_memory: bool) -> Tensor:
    """Return uninitialised bytes. NumPy asks for huge pages where there are many, and torch does
    not: first-touch faults of small pages cost as much as the copy itself.
    """
    if pin_memory:
        return torch.empty((num_rows, num_bytes), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.empty((num_rows, num_bytes), np.uint8))
