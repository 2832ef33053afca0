"""A batch of sample IDs -> one contiguous tensor per name, decoded by several threads. No state
but the threads; any number of callers at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from egeria_cache.codec import Bytes, Coder
from egeria_cache.files import GenerationFiles, GoneError
from egeria_cache.keys import decode_key
from egeria_cache.layout import CHECKSUM_BYTES, Head
from egeria_cache.lossy import unpack
from egeria_cache.records import Record, open_record
from egeria_cache.values import RecordError

__all__ = ["BatchReader", "Fetched"]

logger = logging.getLogger("egeria_cache.store")

MIN_ROWS_PER_THREAD = 8
HUGE_PAGES_BYTES = 4 * 2**20
PARALLEL_COPY_BYTES = 128 * 1024
"""Raw records from this size on are copied by several threads, with the GIL released. Below it the
hand-over of the GIL costs more than the copy."""


@dataclass(slots=True)
class Fetched:
    """What was read for one batch of B samples."""

    bare: bool
    fields: dict[str, Tensor | list[Any]]
    """Full B rows each; empty if nothing at all was found."""
    hit: npt.NDArray[np.bool_]
    """Shape (B,)."""
    num_corrupt: int = 0


@dataclass(slots=True)
class _Batch:
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

    @classmethod
    def allocate(
        cls, head: Head, head_bytes: memoryview, num_rows: int, *, pin_memory: bool
    ) -> _Batch:
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


class BatchReader:
    """Owns the decoding threads; they start with the first large batch."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def close(self) -> None:
        """Join the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def read(
        self,
        files: GenerationFiles,
        keys: Sequence[bytes],
        wanted: npt.NDArray[np.bool_],
        *,
        pin_memory: bool,
    ) -> Fetched:
        """Return the wanted rows that are stored and intact; never raises for a bad record."""
        rows = np.flatnonzero(wanted)
        try:
            template = files.template or _find_template(files, keys, rows)
            if template is None:
                return Fetched(False, {}, np.zeros(len(keys), np.bool_))
            batch = _Batch.allocate(*template, len(keys), pin_memory=pin_memory)
            parts = self._split(rows) if batch.parallel else [rows]
            if len(parts) > 1:
                pool = self._threads()
                others = [pool.submit(self._fill, files, keys, part, batch) for part in parts[1:]]
                self._fill(files, keys, parts[0], batch)
                for other in others:
                    other.result()
            else:
                self._fill(files, keys, rows, batch)
        except GoneError:
            return Fetched(False, {}, np.zeros(len(keys), np.bool_))
        fields = _assemble(batch)
        for key, message in batch.corrupt:
            self._report(files, key, message)
        if not files.usable:  # became void while we were reading
            batch.hit[:] = False
        return Fetched(batch.head.layout.bare, fields, batch.hit, len(batch.corrupt))

    # -- parts ------------------------------------------------------------------------------

    def _split(self, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        parts = min(self._num_threads, max(1, len(rows) // MIN_ROWS_PER_THREAD))
        return np.array_split(rows, parts)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, "egeria-decode")
            return self._pool

    def _fill(
        self, files: GenerationFiles, keys: Sequence[bytes], rows: Any, batch: _Batch
    ) -> None:
        coder = self._coder()
        with files.reading() as transaction:
            if batch.plain:
                rows = _fill_plain(transaction, keys, rows.tolist(), batch)
            for row in rows:
                key = keys[row]
                value = transaction.get(key)
                if value is None:
                    files.forget(key)
                    continue
                try:
                    self._fill_row(batch, int(row), open_record(key, value), coder)
                except RecordError as error:
                    files.forget(key)
                    batch.corrupt.append((key, str(error)))

    def _fill_row(self, batch: _Batch, row: int, record: Record, coder: Coder) -> None:
        if record.layout is not batch.head.layout and record.layout != batch.head.layout:
            batch.odd[row] = {
                entry.name: record.value(position)
                if entry.dtype is None
                else record.tensor(position, coder)
                for position, entry in enumerate(record.layout.fields)
            }
        else:
            for position, target in enumerate(batch.targets):
                if target is None:
                    column = batch.columns[position]
                    assert isinstance(column, list)
                    column[row] = record.value(position)
                else:
                    record.decode_field(position, coder, target[row])
        batch.hit[row] = True

    def _coder(self) -> Coder:
        coder: Coder | None = getattr(self._local, "coder", None)
        if coder is None:
            coder = self._local.coder = Coder()
        return coder

    def _report(self, files: GenerationFiles, key: bytes, message: str) -> None:
        place = str(files.directory)
        if place not in self._warned:
            self._warned.add(place)
            logger.warning(
                "%s: the record of sample %r is damaged (%s); it is computed again. Further "
                "damaged records are counted in stats().corrupt; run cache-inspect verify",
                place, decode_key(key)[0], message,
            )  # fmt: skip


def _allocate(num_rows: int, num_bytes: int, *, pin_memory: bool) -> Tensor:
    """Return uninitialised bytes; many of them on huge pages, which NumPy asks for and torch does
    not: first-touch faults of small pages cost as much as the copy itself.
    """
    if pin_memory or num_rows * num_bytes < HUGE_PAGES_BYTES:
        return torch.empty((num_rows, num_bytes), dtype=torch.uint8, pin_memory=pin_memory)
    return torch.from_numpy(np.empty((num_rows, num_bytes), np.uint8))


def _find_template(
    files: GenerationFiles, keys: Sequence[bytes], rows: npt.NDArray[np.int64]
) -> tuple[Head, memoryview] | None:
    """Return the head of the first intact record among the rows, and note it for later batches."""
    with files.reading() as transaction:
        for row in rows:
            value = transaction.get(keys[row])
            with contextlib.suppress(RecordError):
                if value is not None:
                    head = open_record(keys[row], value).head
                    head_bytes = memoryview(bytes(value[CHECKSUM_BYTES : head.num_bytes]))
                    files.template = head, head_bytes
                    return files.template
    for row in rows:
        files.forget(keys[row])
    return None


def _fill_plain(
    transaction: lmdb.Transaction, keys: Sequence[bytes], rows: list[int], batch: _Batch
) -> list[int]:
    """Copy raw records of one tensor; return the rows that need a closer look.

    Per record: one look-up, one comparison of the head, one copy, one hash. The hash is taken of
    the copy: it is still in the core's own cache, and it checks the copy too.
    """
    (target,), start, size = batch.targets, batch.head.num_bytes, batch.head.record_bytes
    assert target is not None
    num_bytes = size - start
    flat = target.reshape(-1).data
    get, digest, seed = transaction.get, xxhash.xxh3_64_intdigest, batch.head.seed
    template, large = batch.head_bytes, size >= PARALLEL_COPY_BYTES
    copied, found, promised, others = [], [], [], []
    for row in rows:
        key = keys[row]
        value = get(key)
        if value is None or len(value) != size or value[CHECKSUM_BYTES:start] != template:
            others.append(row)
            continue
        part = flat[row * num_bytes : (row + 1) * num_bytes]
        if large:
            target[row] = np.frombuffer(value, np.uint8, offset=start)  # releases the GIL
        else:
            part[:] = value[start:]
        found.append(digest(part, seed=seed ^ digest(key)))  # payload_seed(), inlined
        promised.append(value[:CHECKSUM_BYTES])
        copied.append(row)
    intact = np.array(found, "<u8") == np.frombuffer(b"".join(promised), "<u8")
    at = np.array(copied, np.int64)
    batch.hit[at[intact]] = True
    return [*others, *at[~intact].tolist()]


def _assemble(batch: _Batch) -> dict[str, Tensor | list[Any]]:
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
