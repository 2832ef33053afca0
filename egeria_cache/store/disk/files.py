"""One generation's files, as this process holds them: who uses it, where records lie, the records.

Any thread may read; the writer thread owns every write, under the directory's lock. What other
processes have committed is seen by the next look.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from egeria_cache.store.codecs.codec import Codec
from egeria_cache.store.disk.claims import Claim, in_use_elsewhere, remove_directory
from egeria_cache.store.disk.environment import DATA_NAME, Environment, GoneError
from egeria_cache.store.disk.manifest import DamagedError, Manifest
from egeria_cache.store.records.layout import Layout, RecordError
from egeria_cache.store.records.record import (
    Encoded,
    Record,
    key_of,
    open_record,
    split_block,
)
from egeria_cache.store.stats import Totals

__all__ = [
    "ENTRY",
    "Entries",
    "GenerationFiles",
    "GoneError",
    "View",
    "inspected",
    "is_unfinished",
    "numbers_of",
    "places_of",
]

ENTRY = np.dtype([("at", "<u8"), ("size", "<u4"), ("block", "<u4")])
"""Of a sample: place of its record in units of 8 bytes, and its layout in the two highest bytes;
the record's bytes, 0 if there is none; the block that it is in."""
Entries = npt.NDArray[Any]
_LAYOUT_SHIFT, _PLACE_MASK = np.uint64(48), np.uint64((1 << 48) - 1)
_NO_ENTRY = bytes(ENTRY.itemsize)
BLOCK_BYTES = 512 * 1024 - 16
"""Of records that are one value of LMDB: of larger pieces Linux looks for memory in huge pages."""
ENTRY_BYTES = 8 + 2 + ENTRY.itemsize
"""Of a page of LMDB, without the key."""
_BLOCK_KEY, _ENTRY = struct.Struct(">Q"), struct.Struct("<QII")
TOTALS = b"totals"


def is_unfinished(directory: Path) -> bool:
    """Whether a generation's making was cut short before it could hold anything."""
    try:
        return not (directory / DATA_NAME).lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return True


@contextlib.contextmanager
def inspected(directory: Path) -> Iterator[View]:
    """Look into a generation, without holding it.

    Raises:
        StoreError: It is damaged, of an earlier format, or not ours.
        OSError: It cannot be read now.
    """
    Manifest.read(directory).check_current()
    files = GenerationFiles.open(directory, inspecting=True)
    try:
        with files.reading() as view:
            yield view
    finally:
        files.release()


def numbers_of(entries: Entries) -> npt.NDArray[np.uint64]:
    """Return which layout each record has."""
    numbers: npt.NDArray[np.uint64] = entries["at"] >> _LAYOUT_SHIFT
    return numbers


def places_of(entries: Entries) -> npt.NDArray[np.uint64]:
    """Return where each record lies in the file; 0 where only its block says so."""
    places: npt.NDArray[np.uint64] = (entries["at"] & _PLACE_MASK) << np.uint64(3)
    return places


class GenerationFiles:
    """Records of one generation; or what stands for one that cannot be made here, which holds
    nothing and takes nothing.
    """

    def __init__(self, directory: Path, *, absent: str | None = None) -> None:
        self.directory = directory
        self.identity = xxhash.xxh3_64_intdigest(directory.name.encode())
        """Part of every checksum."""
        self.readonly = False
        self.totals = Totals()
        """As of the last look."""
        self.reason_stopped = absent
        self._lock = threading.Lock()
        self._environment: Environment | None = None
        self._claim: Claim | None = None
        self._layouts: dict[int, Layout] = {}
        self._hidden: dict[bytes, bool] = {}
        """Records that could not be read; whether they may be replaced."""

    @classmethod
    def open(
        cls, directory: Path, *, readonly: bool = False, inspecting: bool = False
    ) -> GenerationFiles:
        """Open what is there, or make it; to inspect it, without holding it.

        Raises:
            DamagedError: It cannot be trusted to LMDB, or is lost.
            ForeignError: A file is not ours.
            BeingRemovedError: Another process is just removing the generation.
            OSError: A file cannot be opened now.
        """
        files = cls(directory)
        files.readonly = readonly or inspecting
        vetted = in_use_elsewhere(directory)
        if not inspecting:
            files._claim = Claim(directory, readonly=readonly)
        try:
            files._environment = Environment.open(
                directory, writes=not files.readonly, vetted=vetted
            )
            files.num_samples()
        except BaseException as error:
            files.release()
            if isinstance(error, FileNotFoundError) and files.readonly:
                raise DamagedError(f"{directory / DATA_NAME} is missing") from None
            raise
        return files

    # -- life -------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Neither void, nor stopped by an error, nor closed."""
        return self.reason_stopped is None

    def stop(self, reason: str) -> bool:
        """From now on every use raises `GoneError`; True for the call that stopped it."""
        with self._lock:
            first, self.reason_stopped = self.reason_stopped is None, self.reason_stopped or reason
        return first

    def release(self) -> None:
        """Give the lock up; the files are closed when nobody reads them. May be called twice."""
        self.stop("closed")
        with self._lock:
            environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()
        if self._claim is not None:
            self._claim.release()

    def destroy(self, reason: str) -> None:
        """Stop, and unlink the files unless another process uses them."""
        self.stop(reason)
        if not self.readonly and self._claim is not None and self._claim.alone():
            remove_directory(self.directory)
        self.release()

    def check_present(self) -> None:
        """Raise `GoneError` if the files were removed or replaced under us."""
        found = os.fstat(self._opened().descriptor)
        with contextlib.suppress(OSError):
            if os.path.samestat(found, (self.directory / DATA_NAME).lstat()):
                return
        raise GoneError(f"{self.directory} was removed while in use")

    def _opened(self) -> Environment:
        environment = self._environment
        if self.reason_stopped is not None or environment is None:
            raise GoneError(self.reason_stopped or "closed")
        return environment

    # -- reading ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[View]:
        """What is committed now, for as long as it is looked at.

        Raises:
            GoneError: Void or closed.
            OSError: It cannot be read now.
        """
        environment = self._opened()
        with environment.transaction() as transaction:
            yield View(self, environment, transaction)

    def locate(self, keys: Sequence[bytes]) -> Entries:
        """Return where records are, shape (B,).

        Raises:
            GoneError: Void or closed.
            OSError: It cannot be read now.
        """
        with self.reading() as view:
            return view.locate(keys)

    def hide(self, key: bytes, *, replaceable: bool) -> bool:
        """Count a record as absent from now on; True if it did not yet.

        Args:
            key: Of its sample.
            replaceable: It may be stored again; else something else may be wrong, and pass.
        """
        is_new = key not in self._hidden
        self._hidden[key] = replaceable
        return is_new

    def num_samples(self) -> int:
        """Records committed, by any process; takes note of their totals.

        Raises:
            GoneError: Void or closed.
            OSError: It cannot be read now.
        """
        with self.reading() as view:
            self.totals = view.totals()
            return view.num_records

    # -- writing ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[Commit]:
        """One commit, of all that is added, at the end; the caller holds the directory's lock.

        Raises:
            GoneError: Void, closed, or removed under us.
            OSError: The disk is full, or fails.
        """
        self.check_present()
        environment = self._opened()
        with environment.transaction(writes=True) as transaction:
            commit = Commit(View(self, environment, transaction))
            yield commit
            commit.finish()
        self.totals = commit.totals
        for key in commit.written & self._hidden.keys():
            self._hidden.pop(key, None)


class View:
    """What one transaction sees of a generation."""

    def __init__(self, files: GenerationFiles, environment: Environment, transaction: Any) -> None:
        self.files, self.environment, self._transaction = files, environment, transaction
        self.descriptor = environment.descriptor
        self.tables = environment.tables

    def get(self, table: bytes, key: bytes) -> memoryview | None:
        """Return a value; it is good while the transaction lasts."""
        if self.tables is None:
            return None
        found: memoryview | None = self._transaction.get(key, db=self.tables[table])
        return found

    def locate(self, keys: Sequence[bytes]) -> Entries:
        """Return where records are, shape (B,). What is hidden is not there."""
        if self.tables is None:
            return np.zeros(len(keys), ENTRY)
        entries = self._located(keys)
        hidden = self.files._hidden
        if hidden:
            for row in [row for row, key in enumerate(keys) if key in hidden]:
                entries["size"][row] = 0
        return entries

    def _located(self, keys: Sequence[bytes]) -> Entries:
        assert self.tables is not None
        get, table = self._transaction.get, self.tables[b"samples"]
        # A plain loop: `getmulti` takes three times as long.
        values = [get(key, _NO_ENTRY, table) for key in keys]
        whole = b"".join(values)
        if len(whole) != len(keys) * ENTRY.itemsize:  # damaged: a value of another size
            whole = b"".join(one if len(one) == ENTRY.itemsize else _NO_ENTRY for one in values)
        return np.frombuffer(bytearray(whole), ENTRY)

    def is_there(self, key: bytes) -> bool:
        """Tell whether a sample has an entry, whatever was remembered of it."""
        return bool(self._located([key])["size"][0])

    def layout(self, number: int) -> Layout | None:
        """Return the layout of this number; None where it is lost."""
        known = self.files._layouts.get(number)
        if known is None and (stored := self.get(b"about", _layout_key(number))) is not None:
            with contextlib.suppress(RecordError):
                known = Layout.parse(bytes(stored))
                if known.number != number:
                    return None
                self.files._layouts[number] = known
        return known

    def mapped(self) -> tuple[int, int, int]:
        """Return where the file is mapped, how many bytes at most, and its descriptor."""
        known = self.environment.map
        if known is None:
            totals = self.get(b"about", TOTALS)
            known = (0, 0, 0) if totals is None else self.environment.mapped(totals)
            self.environment.map = known if known[0] else None
        return known

    def totals(self) -> Totals:
        """Return the sums over all records."""
        stored = self.get(b"about", TOTALS)
        try:
            return Totals() if stored is None else Totals.parse(stored)
        except struct.error:
            return Totals()

    @property
    def num_records(self) -> int:
        """Of all samples and variants."""
        if self.tables is None:
            return 0
        return int(self._transaction.stat(self.tables[b"samples"])["entries"])

    def entries(self) -> Iterator[tuple[bytes, Entries]]:
        """Yield all keys, each with its entry, shape (1,)."""
        if self.tables is None:
            return
        for key, value in self._transaction.cursor(self.tables[b"samples"]):
            whole = bytes(value) if len(value) == ENTRY.itemsize else _NO_ENTRY
            yield bytes(key), np.frombuffer(whole, ENTRY)

    def record(self, key: bytes, entry: Any) -> Record:
        """Return a sample's record: from its place, or from its block where a compacted copy of the
        file has moved it.

        Raises:
            RecordError: There is no intact one.
            OSError: The disk cannot read it.
        """
        layout = self.layout(int(numbers_of(entry)))
        if layout is None:
            raise RecordError("its layout is lost")
        identity, (place, size) = self.files.identity, (int(places_of(entry)), int(entry["size"]))
        with contextlib.suppress(RecordError):
            room = bytearray(max(min(size, os.fstat(self.descriptor).st_size - place), 0))
            num_bytes = os.preadv(self.descriptor, [room], place) if place and room else 0
            return open_record(key, memoryview(room)[:num_bytes], layout, identity)
        block = self.get(b"blocks", _BLOCK_KEY.pack(int(entry["block"])))
        records = split_block(block) if block is not None else ()
        found = next((bytes(one) for one in records if key_of(one) == key), b"")
        return open_record(key, found, layout, identity)

    def records(self) -> Iterator[tuple[bytes, Record | RecordError]]:
        """Yield all keys, each with its record, or with why it has no intact one."""
        for key, entry in self.entries():
            found: Record | RecordError
            try:
                found = self.record(key, entry[0])
            except RecordError as error:
                found = error
            except OSError as error:
                found = RecordError(f"the disk cannot read it: {error.strerror}")
            yield key, found

    def layouts(self) -> list[Layout]:
        """Return all layouts."""
        if self.tables is None:
            return []
        keys = [bytes(key) for key, _ in self._transaction.cursor(self.tables[b"about"])]
        numbers = [int.from_bytes(key[-2:], "big") for key in keys if key != TOTALS]
        return [one for one in map(self.layout, numbers) if one is not None]


class Commit:
    """What is added to a generation in one transaction."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.totals = view.totals()
        self.written: set[bytes] = set()
        self._entries: list[tuple[bytes, bytes]] = []
        self._promised = 0
        assert view.tables is not None
        self._tables, self._transaction = view.tables, view._transaction
        cursor = self._transaction.cursor(self._tables[b"blocks"])
        self._next_block = _BLOCK_KEY.unpack(cursor.key())[0] + 1 if cursor.last() else 1

    def new_among(self, records: Encoded) -> npt.NDArray[np.bool_]:
        """Return which of the records nobody has stored by now. What another process stored is the
        same; what proved damaged is new.
        """
        known = self.view._located(records.keys)["size"] > 0
        hidden = self.view.files._hidden
        fresh = [
            key not in self.written and (not there or hidden.get(key, False))
            for key, there in zip(records.keys, known.tolist(), strict=True)
        ]
        return np.array(fresh, np.bool_)

    def growth_bytes(self, records: Encoded) -> npt.NDArray[np.int64]:
        """Return, shape (N + 1,), by how much the file grows at most by what was added before, and
        the first n of these: their blocks, and copies of all pages of the index that are touched,
        some of which split.
        """
        page = self.view.environment.page_bytes
        stat = self._transaction.stat(self._tables[b"samples"])
        numbers = np.arange(len(records) + 1)
        key_bytes = np.zeros(len(records) + 1, np.int64)
        np.cumsum([len(key) + ENTRY_BYTES for key in records.keys], out=key_bytes[1:])
        if records.replaced is None:
            blocks = records.starts + (records.starts // (BLOCK_BYTES // 2) + 1) * 2 * page
        else:
            blocks = np.zeros(len(records) + 1, np.int64)
            np.cumsum((records.sizes // page + 2) * page, out=blocks[1:])
        touched = np.minimum(numbers, stat["leaf_pages"]) + 2 * (2 * key_bytes // page + 1)
        growth = self._promised + blocks + (touched + stat["branch_pages"] // 8 + 32) * page
        growth[0] = self._promised
        whole: npt.NDArray[np.int64] = growth
        return whole

    def add(self, records: Encoded, raw_bytes: int, codec: Codec | None) -> None:
        """Write records that are new.

        Args:
            records: No two with one key.
            raw_bytes: Of all of them, decoded.
            codec: What they were written with.

        Raises:
            ValueError: Another layout has the same number.
        """
        self._promised = int(self.growth_bytes(records)[-1])
        layout = records.layout
        known = self.view.get(b"about", _layout_key(layout.number))
        if known is None:
            self._put(b"about", _layout_key(layout.number), layout.packed)
        elif bytes(known) != layout.packed:
            raise ValueError("another layout has the same number")
        self._remove_superseded(records.replaced or ())
        # What is to be superseded one by one lies one by one: LMDB then uses its pages again.
        self._add_blocks(records, BLOCK_BYTES if records.replaced is None else 0)
        self.totals.raw_bytes += raw_bytes
        self.totals.stored_bytes += int(records.sizes.sum())
        self.totals.codec = codec
        self.written.update(records.keys)

    def _add_blocks(self, records: Encoded, most_bytes: int) -> None:
        """Write records, so many bytes of neighbours as one value."""
        put, get, blocks = self._transaction.put, self._transaction.get, self._tables[b"blocks"]
        place_of, number = self.view.environment.place_of, self._next_block
        counts, places = [], []
        for rows, content in records.blocks(most_bytes):
            key = _BLOCK_KEY.pack(self._next_block)
            put(key, content, db=blocks)
            counts.append(rows.stop - rows.start)
            places.append(place_of(get(key, db=blocks)))
            self._next_block += 1
        firsts = records.starts[np.cumsum([0, *counts[:-1]])]
        place, first = np.repeat(places, counts), np.repeat(firsts, counts)
        at = np.where(place > 0, place + records.starts[:-1] - first, 0).astype(np.uint64)
        entries = np.zeros(len(records), ENTRY)
        entries["at"] = at >> np.uint64(3) | np.uint64(records.layout.number) << _LAYOUT_SHIFT
        entries["size"] = records.sizes
        entries["block"] = np.repeat(number + np.arange(len(counts)), counts)
        whole, size = entries.tobytes(), ENTRY.itemsize
        values = (whole[at : at + size] for at in range(0, len(whole), size))
        self._entries += zip(records.keys, values, strict=True)

    def _remove_superseded(self, replaced: Sequence[bytes | None]) -> None:
        """Remove what is stored of each sample up to this variant; each record of it lies alone."""
        if not any(replaced):
            return
        cursor = self._transaction.cursor(self._tables[b"samples"])
        for last in filter(None, replaced):
            prefix = last[:-4]
            is_there = cursor.set_range(prefix + bytes(4))
            while is_there and (key := bytes(cursor.key())) <= last and key[:-4] == prefix:
                whole = bytes(cursor.value())
                if len(whole) == _ENTRY.size:
                    _, size, block = _ENTRY.unpack(whole)
                    self._remove_block(size, block)
                is_there = cursor.delete() and bool(cursor.key())

    def _remove_block(self, size: int, block: int) -> None:
        totals, blocks = self.totals, self._tables[b"blocks"]
        totals.raw_bytes -= round(size * totals.raw_bytes / max(totals.stored_bytes, 1))
        totals.stored_bytes -= size
        key = _BLOCK_KEY.pack(block)
        content = self._transaction.get(key, db=blocks)
        if content is not None and len(content) - size < 8:  # else others lie there, too
            self._transaction.delete(key, db=blocks)

    def _put(self, table: bytes, key: bytes, value: Any) -> None:
        self._transaction.put(key, value, db=self._tables[table])

    def finish(self) -> None:
        """Write what tells of the records."""
        self._entries.sort()
        self._transaction.cursor(self._tables[b"samples"]).putmulti(self._entries)
        self._put(b"about", TOTALS, self.totals.pack())


def _layout_key(number: int) -> bytes:
    return b"layout" + struct.pack(">H", number)
