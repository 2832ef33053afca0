"""One generation's LMDB files, as this process holds them. The only module that touches LMDB.

Any thread may read; the writer thread owns every write transaction. py-lmdb refuses a second open
of the same files in one process, hence the registry: `GenerationFiles.acquire` hands out one
shared, counted object per directory. It must not cross fork(): every use checks the process ID.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import lmdb
import numpy as np
import numpy.typing as npt

from egeria_cache.errors import StoreError
from egeria_cache.index import Membership
from egeria_cache.keys import META_PREFIX, SampleId
from egeria_cache.layout import Head
from egeria_cache.lossy import LossyError
from egeria_cache.manifest import DamagedError

__all__ = ["DATA_NAME", "IN_USE_NAME", "PAGE_BYTES", "GenerationFiles", "GoneError", "Totals"]

DATA_NAME, LOCK_NAME, IN_USE_NAME = "data.mdb", "lock.mdb", "in-use"
PAGE_BYTES = 4096
TOTALS_KEY = META_PREFIX + b"totals"
_TOTALS = struct.Struct("<QQddd")
FIRST_SAMPLE_KEY = b"\x01"
"""Behind the store's own entries."""
KEYS_PER_CHUNK = 65_536
CLOSE_WAIT_S = 10.0
_NODE_BYTES = 64
"""Upper bound of what a record's entry costs in a leaf beyond key and inline data."""


class BeingRemovedError(Exception):
    """Another thread or process is just removing the generation; it can be made anew."""


class GoneError(Exception):
    """The generation is void, closed, or its files are no longer there."""


@dataclass(slots=True)
class Totals:
    """What the committed records hold; on disk in the same transaction as they."""

    raw_bytes: int = 0
    """Decoded."""
    stored_bytes: int = 0
    """Encoded, with headers, without LMDB's pages."""
    error: LossyError = field(default_factory=LossyError)
    """What lossy storage changed."""

    @classmethod
    def parse(cls, stored: Any) -> Totals:
        """Read them back; all zero if missing or damaged: they are for people."""
        if stored is None or len(stored) != _TOTALS.size:
            return cls()
        raw_bytes, stored_bytes, *error = _TOTALS.unpack(stored)
        return cls(raw_bytes, stored_bytes, LossyError(*error))

    def pack(self) -> bytes:
        """Undo `parse`."""
        error = self.error
        return _TOTALS.pack(
            self.raw_bytes,
            self.stored_bytes,
            error.squared_error,
            error.squared_value,
            error.largest,
        )


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
        self._in_use = _share(directory / IN_USE_NAME) if not inspecting else None
        try:
            # metasync=False may lose the last commit in a system crash, never the tree, at a
            # fifth of the cost; sync=False could lose the tree; writemap dies on a full disk.
            self._env = lmdb.open(
                str(directory),
                map_size=max(map_bytes // PAGE_BYTES * PAGE_BYTES, 16 * PAGE_BYTES),
                metasync=False, sync=True, readahead=False, max_readers=512, mode=0o600,
                readonly=readonly, max_spare_txns=8,
                lock=not readonly or os.access(directory / LOCK_NAME, os.W_OK),
            )  # fmt: skip
            self._identity = _identity(directory / DATA_NAME)
            self._load()
        except (lmdb.Error, OSError) as error:
            if self._in_use is not None:
                os.close(self._in_use)
            raise DamagedError(f"cannot open {directory}: {error}") from error

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
        alone = not self.readonly and _lock_alone(self._in_use)
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
        self._closed.set()
        with self._registry_lock:
            if self._registry.get(self._place) is self:
                del self._registry[self._place]

    def _drop_lock(self) -> None:
        with self._lock:
            descriptor, self._in_use = self._in_use, None
        if descriptor is not None:
            os.close(descriptor)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[lmdb.Environment]:
        """Hold the environment open; the last one to leave closes it if asked meanwhile."""
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
        try:
            yield self._env
        finally:
            with self._lock:
                self._num_inside -= 1
                last = self._closing and self._num_inside == 0
            if last:
                self._close_env()

    # -- reading ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[lmdb.Transaction]:
        """Give a read transaction; the buffers it returns live until it ends.

        Raises:
            GoneError: Void or closed.
        """
        with self._inside() as env:
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
                yield transaction

    def contains(self, ids: Sequence[SampleId], variant: int) -> npt.NDArray[np.bool_]:
        """Return bool (B,), from memory."""
        if not self.usable:
            return np.zeros(len(ids), np.bool_)
        return self.index.contains(ids, variant)

    def forget(self, key: bytes) -> None:
        """Answer False for this key until it is written again: its record cannot be read."""
        with self._lock:
            self.index.deny(key)
            self._unreadable.add(key)

    def num_samples(self) -> int:
        """Records committed, by LMDB's own count."""
        with self._inside() as env:
            entries = int(env.stat()["entries"])
        return max(entries - 1, 0)  # the totals are an entry too

    def chunks(self, num_records: int = 256) -> Iterator[list[tuple[bytes, memoryview]]]:
        """Walk over all samples in key order; the buffers live until the next chunk.

        Each chunk has its own transaction: a long one would keep a live writer from reusing pages.
        """
        after = FIRST_SAMPLE_KEY
        while True:
            with self.reading() as transaction:
                cursor = transaction.cursor()
                chunk: list[tuple[bytes, memoryview]] = []
                found = cursor.set_range(after)
                while found and len(chunk) < num_records:
                    key = bytes(cursor.key())
                    if key <= after and chunk:
                        return  # a damaged tree that leads in a circle
                    chunk.append((key, memoryview(cursor.value())))
                    found = cursor.next()
                if not chunk:
                    return
                yield chunk
                after = chunk[-1][0] + b"\x00"

    def _load(self) -> None:
        with self._env.begin() as transaction:
            stored = transaction.get(TOTALS_KEY)
            cursor = transaction.cursor()
            found = cursor.set_range(FIRST_SAMPLE_KEY)
            keys = cursor.iternext(values=False) if found else iter(())
            while chunk := list(itertools.islice(keys, KEYS_PER_CHUNK)):
                self.index.add_keys(chunk)
        self.totals = Totals.parse(stored)

    # -- writing ----------------------------------------------------------------------------

    def check_present(self) -> None:
        """Raise `GoneError` if the file was removed or replaced under us."""
        if _identity(self.directory / DATA_NAME) != self._identity:
            raise GoneError(f"{self.directory} was removed while in use")

    def growth_bytes(self, records: Sequence[tuple[bytes, Any]]) -> npt.NDArray[np.int64]:
        """Return, shape (B + 1,), an upper bound of the file's growth if the first n are written.

        Counts, per record, its overflow pages, or its share of leaves that split in half; and the
        leaves and branches that copy-on-write duplicates.
        """
        with self._inside() as env:
            stat = env.stat()
        sizes = np.array([0, *(len(record) for _, record in records)], np.int64)
        pages = -(-(sizes + 16) // PAGE_BYTES)
        inline = sizes + _NODE_BYTES < PAGE_BYTES // 2
        # An inline record can split the leaf it falls into; a leaf is copied at most once.
        pages[inline] = 0
        numbers = np.arange(len(sizes))
        copied = np.minimum(numbers, stat["leaf_pages"]) + np.minimum(numbers, stat["branch_pages"])
        leaf_bytes = np.cumsum(np.where(inline, sizes, 0) + _NODE_BYTES)
        split = np.minimum(numbers, 4 * leaf_bytes // PAGE_BYTES + 1)
        fixed = 2 * int(stat["depth"]) + 8
        return np.asarray((np.cumsum(pages) + copied + 2 * split + fixed) * PAGE_BYTES)

    def write(
        self,
        records: Sequence[tuple[bytes, Any]],
        raw_bytes: int,
        error: LossyError | None = None,
    ) -> int:
        """Commit the records in one transaction; return how many were new.

        Raises:
            GoneError: Void, closed, or removed under us.
            lmdb.Error: MapFullError, DiskError, ... nothing of the batch is stored then.
        """
        with self._inside() as env:
            self.check_present()
            num_new = 0
            with env.begin(write=True) as transaction:
                totals = Totals.parse(transaction.get(TOTALS_KEY))
                for key, record in records:
                    # What another process stored meanwhile is the same; what proved unreadable
                    # is replaced.
                    if transaction.put(key, record, overwrite=key in self._unreadable):
                        num_new += 1
                        totals.stored_bytes += len(record)
                totals.raw_bytes += raw_bytes * num_new // max(len(records), 1)
                if error is not None:
                    totals.error.join(error)
                transaction.put(TOTALS_KEY, totals.pack())
            self.totals = totals
        with self._lock:
            self.index.add_keys([key for key, _ in records])
            self._unreadable.difference_update(key for key, _ in records)
        return num_new


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


def remove_directory(directory: Path) -> None:
    """Unlink a generation; readers of other processes keep their mapping until they close."""
    grave = directory.with_name(f".gone-{directory.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        directory.rename(grave)  # one step: nobody opens a half-removed generation
    shutil.rmtree(grave, ignore_errors=True)


def in_use_elsewhere(directory: Path) -> bool:
    """Tell whether any live process, this one included, holds the generation."""
    try:
        descriptor = os.open(directory / IN_USE_NAME, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _lock_alone(descriptor)
    finally:
        os.close(descriptor)


def _share(path: Path) -> int:
    """Hold a shared lock for as long as the process lives; the kernel drops it at any death."""
    writable = os.access(path.parent, os.W_OK)
    flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise BeingRemovedError(str(path.parent)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if writable:
            os.utime(path)
    except OSError as error:
        os.close(descriptor)
        raise BeingRemovedError(str(path.parent)) from error
    return descriptor


def _lock_alone(descriptor: int | None) -> bool:
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
