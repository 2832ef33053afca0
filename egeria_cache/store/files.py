"""One generation's files, as this process holds them. The only module that touches LMDB.

Any thread may read; the writer thread owns every write transaction. py-lmdb refuses a second open
of the same files in one process, hence the registry: `GenerationFiles.acquire` hands out one
shared, counted object per directory. It must not cross fork(): every use checks the process ID.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lmdb
import numpy as np
import numpy.typing as npt

from egeria_cache.config import PAGE_BYTES
from egeria_cache.errors import StoreError
from egeria_cache.store.claims import IN_USE_NAME, claim, identity, lock_alone, remove_directory
from egeria_cache.store.codecs.lossy import LossyError
from egeria_cache.store.index import Membership
from egeria_cache.store.keys import SampleId
from egeria_cache.store.layout import Head
from egeria_cache.store.manifest import DamagedError
from egeria_cache.store.segment import ALIGNMENT, SEGMENT_NAME, Segment
from egeria_cache.store.totals import TOTALS_KEY, Totals

__all__ = ["DATA_NAME", "LOCATOR", "GenerationFiles", "GoneError", "Totals", "is_unfinished"]

DATA_NAME, LOCK_NAME = "data.mdb", "lock.mdb"
LOCATOR = struct.Struct("<QQ")
"""Where a record begins in the segment, and its length."""
_NOWHERE = bytes(LOCATOR.size)
"""Stands for one that is absent or damaged: no record is empty."""
FIRST_SAMPLE_KEY = b"\x01"
"""Behind the store's own entries."""
KEYS_PER_CHUNK = 65_536
CLOSE_WAIT_S = 10.0
_SLACK_BYTES = 136 * 1024
"""Kept behind the last page of LMDB's file. Within a page LMDB follows 16-bit offsets and lengths
without a check; damaged ones lead up to twice 64 KiB on, and must not lead off the end of the map,
which would be a SIGBUS. A hole: it takes no blocks, but is counted."""
_ENTRY_BYTES = 512 + 64
"""Upper bound of a record's entry in a leaf: the longest key, its locator, LMDB's own."""


class GoneError(Exception):
    """The generation is void, closed, or its files are no longer there."""


def is_unfinished(directory: Path) -> bool:
    """Whether a generation's making was cut short before it could hold anything."""
    return not any(_num_bytes(directory / name) for name in (DATA_NAME, SEGMENT_NAME))


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class GenerationFiles:
    """LMDB environment, index and totals of one generation; shared by all stores of a process."""

    _registry: ClassVar[dict[tuple[int, str], GenerationFiles]] = {}
    _registry_lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def acquire(cls, directory: Path, *, map_bytes: int, readonly: bool = False) -> GenerationFiles:
        """Open the generation, or count one more user of it.

        Raises:
            StoreError: LMDB cannot open the files.
        """
        place = (os.getpid(), os.path.realpath(directory))
        deadline = time.monotonic() + CLOSE_WAIT_S
        while True:
            with cls._registry_lock:
                _watch_forks()
                files = cls._registry.get(place)
                if files is None or files._closed.is_set():
                    files = cls(directory, map_bytes=map_bytes, readonly=readonly)
                    cls._registry[place] = files
                if files.usable:
                    files._num_users += 1
                    return files
            # Void, but a reader is still inside; LMDB must not be opened a second time.
            if not files._closed.wait(max(deadline - time.monotonic(), 0)):
                raise StoreError(f"{directory} is void and still being read; try again")

    @classmethod
    @contextlib.contextmanager
    def inspecting(cls, directory: Path) -> Iterator[GenerationFiles]:
        """Look at a generation, also while another process writes it; nothing on disk changes.

        Raises:
            StoreError: LMDB cannot open the files.
        """
        with cls._registry_lock:
            files = cls._registry.get((os.getpid(), os.path.realpath(directory)))
            if files is not None and files.usable:
                yield files
                return
            files = cls(directory, map_bytes=0, readonly=True, inspecting=True)
            try:
                yield files
            finally:
                files._close_when_idle()

    def __init__(
        self, directory: Path, *, map_bytes: int, readonly: bool, inspecting: bool = False
    ) -> None:
        self.directory = directory
        self.readonly = readonly
        self.index = Membership()
        self.totals = Totals()
        self.template: tuple[Head, memoryview] | None = None
        """Head of an intact record, parsed and as stored: what most others look like."""
        self._unreadable: set[bytes] = set()
        self.reason_stopped: str | None = None
        self._pid = os.getpid()
        self._num_users = 0
        self._num_inside = 0
        self._closing = False
        self._closed = threading.Event()
        self._place = (self._pid, os.path.realpath(directory))
        self._lock = threading.Lock()
        self._in_use = claim(directory / IN_USE_NAME) if not inspecting else None
        try:
            with contextlib.ExitStack() as opened:
                self._open(opened, map_bytes, keys=not inspecting)
                opened.pop_all()
        except (lmdb.Error, OSError) as error:
            raise DamagedError(f"cannot open {directory}: {error}") from error

    def _open(self, opened: contextlib.ExitStack, map_bytes: int, *, keys: bool) -> None:
        """Open the files; `opened` closes them again if that fails half way."""
        directory, readonly = self.directory, self.readonly
        if self._in_use is not None:
            opened.callback(os.close, self._in_use)
        # Before LMDB's file: a making that is cut short leaves no tree without its records.
        self._segment = Segment(directory / SEGMENT_NAME, readonly=readonly)
        opened.callback(self._segment.close)
        # metasync=False may lose the last commit in a system crash, never the tree, at a
        # fifth of the cost; sync=False could lose the tree; writemap dies on a full disk.
        self._env = lmdb.open(
            str(directory),
            map_size=max(map_bytes // PAGE_BYTES * PAGE_BYTES, 16 * PAGE_BYTES),
            metasync=False, sync=True, readahead=False, max_readers=512, mode=0o600,
            readonly=readonly, max_spare_txns=8,
            lock=not readonly or os.access(directory / LOCK_NAME, os.W_OK),
        )  # fmt: skip
        opened.callback(self._env.close)
        self._identity = identity(directory / DATA_NAME)
        if not readonly:
            self._pad()
        self._load(keys=keys)

    # -- life -------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Neither void, nor stopped by an error, nor closed."""
        return self.reason_stopped is None and not self._closing

    def stop(self, reason: str) -> bool:
        """From now on every use raises `GoneError`; True for the call that stopped it."""
        with self._lock:
            first, self.reason_stopped = self.reason_stopped is None, self.reason_stopped or reason
        return first

    def release(self) -> None:
        """Count one user less; the last one closes the environment."""
        with self._registry_lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
        self._close_when_idle()

    def destroy(self, reason: str) -> bool:
        """Stop, and unlink the files unless another process uses them; True if unlinked."""
        self.stop(reason)
        self._close_when_idle(keep_lock=True)
        alone = not self.readonly and lock_alone(self._in_use)
        if alone:
            remove_directory(self.directory)
        self._drop_lock()
        return alone

    def _close_when_idle(self, *, keep_lock: bool = False) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            idle = self._num_inside == 0
        if idle:
            self._close_env()
        if not keep_lock:
            self._drop_lock()

    def _close_env(self) -> None:
        if os.getpid() != self._pid:
            return  # the parent's, not ours
        self._env.close()
        self._segment.close()
        self._closed.set()
        with self._registry_lock:
            if self._registry.get(self._place) is self:
                del self._registry[self._place]

    def _drop_lock(self) -> None:
        with self._lock:
            descriptor, self._in_use = self._in_use, None
        if descriptor is not None:
            os.close(descriptor)

    def _enter(self) -> lmdb.Environment:
        """Hold the environment open until `_leave`."""
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.directory} was opened before fork(), and LMDB must not be used across it; "
                "open the ActivationStore in the child process itself, or start the child with "
                "'spawn'"
            )
        with self._lock:
            if not self.usable:
                raise GoneError(self.reason_stopped or "closed")
            self._num_inside += 1
        return self._env

    def _leave(self) -> None:
        """The last one to leave closes the environment if asked meanwhile."""
        with self._lock:
            self._num_inside -= 1
            last = self._closing and self._num_inside == 0
        if last:
            self._close_env()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[lmdb.Environment]:
        env = self._enter()
        try:
            yield env
        finally:
            self._leave()

    # -- reading ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Give a consistent view of what is committed.

        Raises:
            GoneError: Void or closed.
        """
        env = self._enter()
        try:
            try:
                transaction = env.begin(buffers=True)
            except lmdb.MapResizedError:
                # Another process with a larger limit grew the file. Only legal while this
                # process has no transaction open; otherwise this batch is a miss.
                with self._lock:
                    if self._num_inside > 1:
                        raise GoneError("the file grew beyond this process's map") from None
                    env.set_mapsize(0)
                transaction = env.begin(buffers=True)
            with transaction:
                yield Snapshot(transaction, self._segment)
        finally:
            self._leave()

    def contains(self, ids: Sequence[SampleId], variant: int) -> npt.NDArray[np.bool_]:
        """Return bool (B,), from memory."""
        if not self.usable:
            return np.zeros(len(ids), np.bool_)
        return self.index.contains(ids, variant)

    def forget(self, key: bytes) -> bool:
        """Answer False for this key until it is written again: its record cannot be read. Return
        whether that is news.
        """
        with self._lock:
            known = key in self._unreadable
            self.index.deny(key)
            self._unreadable.add(key)
        return not known

    def num_samples(self) -> int:
        """Records committed, by LMDB's own count."""
        with self._inside() as env:
            entries = int(env.stat()["entries"])
        return max(entries - 1, 0)  # the totals are an entry too

    def chunks(self, num_records: int = 256) -> Iterator[list[tuple[bytes, memoryview]]]:
        """Walk over all samples in key order.

        Each chunk has its own transaction: a long one would keep a live writer from reusing pages.
        """
        after = FIRST_SAMPLE_KEY
        while True:
            with self.reading() as snapshot:
                chunk = snapshot.records_from(after, num_records)
                if not chunk:
                    return
                yield chunk
            if chunk[-1][0] < after:
                return  # a damaged tree that leads in a circle
            after = chunk[-1][0] + b"\x00"

    def _load(self, *, keys: bool) -> None:
        with self._env.begin() as transaction:
            stored = transaction.get(TOTALS_KEY)
            cursor = transaction.cursor()
            found = keys and cursor.set_range(FIRST_SAMPLE_KEY)
            stored_keys = cursor.iternext(values=False) if found else iter(())
            while chunk := list(itertools.islice(stored_keys, KEYS_PER_CHUNK)):
                self.index.add_keys(chunk)
        self.totals = Totals.parse(stored)

    # -- writing ----------------------------------------------------------------------------

    def check_present(self) -> None:
        """Raise `GoneError` if the file was removed or replaced under us."""
        if identity(self.directory / DATA_NAME) != self._identity:
            raise GoneError(f"{self.directory} was removed while in use")

    def _pad(self) -> None:
        path = self.directory / DATA_NAME
        needed = (int(self._env.info()["last_pgno"]) + 1) * PAGE_BYTES + _SLACK_BYTES
        with contextlib.suppress(OSError):  # a full disk; the next commit tries again
            if path.stat().st_size < needed:
                os.truncate(path, needed)

    def growth_bytes(self, records: Sequence[tuple[bytes, Any]]) -> npt.NDArray[np.int64]:
        """Return, shape (B + 1,), an upper bound of the file's growth if the first n are written.

        Counts the records, and in LMDB's file the leaves that split in half and the leaves and
        branches that copy-on-write duplicates.
        """
        with self._inside() as env:
            stat = env.stat()
        sizes = np.cumsum([0, *(len(record) + ALIGNMENT for _, record in records)])
        numbers = np.arange(len(sizes))
        # A leaf is copied at most once; each entry can split the leaf it falls into.
        copied = np.minimum(numbers, stat["leaf_pages"]) + np.minimum(numbers, stat["branch_pages"])
        split = np.minimum(numbers, 4 * _ENTRY_BYTES * numbers // PAGE_BYTES + 1)
        fixed = 2 * int(stat["depth"]) + 8
        return np.asarray(sizes + (copied + 2 * split + fixed) * PAGE_BYTES)

    def write(
        self,
        records: Sequence[tuple[bytes, Any]],
        raw_bytes: int,
        error: LossyError | None = None,
    ) -> int:
        """Commit the records in one transaction; return how many were new. The caller holds the
        directory's lock: no other process appends meanwhile.

        Raises:
            GoneError: Void, closed, or removed under us.
            OSError: The disk is full, or fails.
            lmdb.Error: MapFullError, DiskError, ... nothing of the batch is stored then.
        """
        with self._inside() as env:
            self.check_present()
            with env.begin(write=True) as transaction:
                totals = Totals.parse(transaction.get(TOTALS_KEY))
                # What another process stored meanwhile is the same; what proved unreadable is
                # stored again.
                new = [
                    (key, record)
                    for key, record in records
                    if key in self._unreadable or transaction.get(key) is None
                ]
                size = self._segment.size
                end = size if totals.end is None else min(totals.end, size)
                buffers = [record for _, record in new]
                # On disk before the transaction that makes them visible.
                offsets = self._segment.append(end, buffers)
                for (key, record), offset in zip(new, offsets, strict=True):
                    transaction.put(key, LOCATOR.pack(offset, len(record)))
                    totals.end = offset + len(record)
                totals.stored_bytes += sum(map(len, buffers))
                totals.raw_bytes += raw_bytes * len(new) // max(len(records), 1)
                if error is not None:
                    totals.error.join(error)
                transaction.put(TOTALS_KEY, totals.pack())
            self._pad()
            self.totals = totals
        with self._lock:
            self.index.add_keys([key for key, _ in records])
            self._unreadable.difference_update(key for key, _ in records)
        return len(new)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_abandon)


def _abandon() -> None:
    """In a forked child: let no environment of the parent's ever be freed here.

    Freeing one (at the interpreter's exit, say) would give up the parent's reader slots in the lock
    file that both have mapped; its next read would fail, or its pages be used again.
    """
    for files in GenerationFiles._registry.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(files._env))


class Snapshot:
    """What was committed when a reader began; valid in the thread that began it."""

    def __init__(self, transaction: lmdb.Transaction, segment: Segment) -> None:
        self._transaction, self._segment = transaction, segment
        self.read = segment.read

    def locate(self, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.uint64], list[int]]:
        """Return, shape (N, 2), where the records begin and how long they are, as noted, which
        damage may have changed; and the positions of the keys that are not there.
        """
        locators: list[Any] = list(map(self._transaction.get, keys))
        absent = []
        try:
            joined = b"".join(locators)
        except TypeError:
            absent = [row for row, locator in enumerate(locators) if locator is None]
            locators = [_NOWHERE if locator is None else locator for locator in locators]
            joined = b"".join(locators)
        if len(joined) != LOCATOR.size * len(keys):  # a damaged one fails its record's check
            joined = b"".join(one if len(one) == LOCATOR.size else _NOWHERE for one in locators)
        return np.frombuffer(joined, "<u8").reshape(-1, 2), absent

    def get(self, key: bytes) -> memoryview | None:
        """Return a record's bytes, unchecked; None if there is no such sample, empty if what is
        noted about it is damaged.

        Raises:
            OSError: The disk cannot read them.
        """
        locator = self._transaction.get(key)
        return None if locator is None else self._record(locator)

    def records_from(self, key: bytes, count: int) -> list[tuple[bytes, memoryview]]:
        """Return up to `count` (key, record), in key order, from this key on."""
        cursor = self._transaction.cursor()
        if not cursor.set_range(key):
            return []
        return [
            (bytes(found), self._record(locator))
            for found, locator in itertools.islice(cursor.iternext(), count)
        ]

    def _record(self, locator: Any) -> memoryview:
        if len(locator) != LOCATOR.size:
            return memoryview(b"")
        return self._segment.record(*LOCATOR.unpack(locator))


class AbsentFiles(GenerationFiles):
    """Stands for a generation that cannot be made here: holds nothing, takes nothing."""

    def __init__(self, directory: Path, reason: str) -> None:
        self.directory, self.readonly = directory, True
        self.index, self.totals, self.template = Membership(), Totals(), None
        self.reason_stopped = reason
        self._closing = True

    def stop(self, reason: str) -> bool:
        return False

    def release(self) -> None:
        pass

    def destroy(self, reason: str) -> bool:
        return False
