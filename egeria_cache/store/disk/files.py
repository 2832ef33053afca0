"""One generation's files, as this process holds them: who uses it, where records lie, the records.

Any thread may read; the writer thread owns every write, under the directory's lock. Other
processes' commits are seen as soon as the index file has grown.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from egeria_cache.config import PAGE_BYTES
from egeria_cache.errors import StoreError
from egeria_cache.store.codecs.codec import Codec
from egeria_cache.store.codecs.lossy import LossyError
from egeria_cache.store.disk.claims import Claim, remove_directory
from egeria_cache.store.disk.index import Index, Located
from egeria_cache.store.disk.log import LOG_NAME, Commit, Log, block_bytes
from egeria_cache.store.disk.manifest import DamagedError
from egeria_cache.store.disk.segment import ALIGNMENT, SEGMENT_NAME, Segment
from egeria_cache.store.disk.totals import Totals
from egeria_cache.store.native import Mapping
from egeria_cache.store.records.encoded import Encoded
from egeria_cache.store.records.keys import Keys, SampleId, all_integers, split_keys
from egeria_cache.store.records.layout import Head

__all__ = ["GenerationFiles", "GoneError", "is_unfinished"]

RECORDS_AT_ONCE = 2**18
"""Of commits that are put into the index together: a pass over many costs little more."""


class GoneError(Exception):
    """The generation is void, closed, or its files are no longer there."""


def is_unfinished(directory: Path) -> bool:
    """Whether a generation's making was cut short before it could hold anything."""
    return not any(_num_bytes(directory / name) for name in (LOG_NAME, SEGMENT_NAME))


def _num_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


class GenerationFiles:
    """Index, totals and records of one generation; or what stands for one that cannot be made
    here, which holds nothing and takes nothing.
    """

    def __init__(self, directory: Path, *, absent: str | None = None) -> None:
        self.directory = directory
        self.identity = xxhash.xxh3_64_intdigest(directory.name.encode())
        """Part of every checksum."""
        self.readonly = False
        self.index, self.totals = Index(), Totals()
        self.template: tuple[Head, memoryview] | None = None
        """Head of an intact record, parsed and as stored: what most others look like."""
        self.course: Any = None
        """What reading notes of it."""
        self.is_varied = False
        """Many records were seen to have other shapes than that one."""
        self.reason_stopped = absent
        self._num_reads, self._num_records = 0, 1
        self._is_writing = False
        self._written = 0
        """When the records were written to last, as far as this process knows of it."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._disk: tuple[Segment, Log] | None = None
        self._claim: Claim | None = None

    @classmethod
    def open(
        cls, directory: Path, *, readonly: bool = False, inspecting: bool = False
    ) -> GenerationFiles:
        """Open what is there, or make it; to inspect it, without holding it.

        Raises:
            DamagedError: The records or all of the index are lost.
            ForeignError: A file is not ours.
            BeingRemovedError: Another process is just removing the generation.
            OSError: A file cannot be opened now.
        """
        files = cls(directory)
        files.readonly = readonly or inspecting
        if not inspecting:
            files._claim = Claim(directory, readonly=readonly)
        try:
            segment = Segment(directory / SEGMENT_NAME, readonly=files.readonly)
            log = Log(directory / LOG_NAME, directory.name, readonly=files.readonly)
            files._disk = segment, log
            files.refresh()
            if len(files.index) and not segment.size:
                raise DamagedError(f"{directory}: its records are gone")
            if log.num_damaged and not len(files.index):
                raise DamagedError(f"{directory}: its index is damaged")
        except BaseException as error:
            files.release()
            if isinstance(error, FileNotFoundError) and files.readonly:
                raise DamagedError(f"{error.filename} is missing") from None
            raise
        return files

    # -- life -------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Neither void, nor stopped by an error, nor closed."""
        return self.reason_stopped is None

    @property
    def num_damaged(self) -> int:
        """Bytes of the index that belong to no commit; the records they were about are hidden."""
        return 0 if self._disk is None else self._disk[1].num_damaged

    def stop(self, reason: str) -> bool:
        """From now on every use raises `GoneError`; True for the call that stopped it."""
        with self._lock:
            first, self.reason_stopped = self.reason_stopped is None, self.reason_stopped or reason
        return first

    def release(self) -> None:
        """Give the lock up; the files are closed when nobody reads them. May be called twice."""
        self.stop("closed")
        self._disk, self.index, self.course = None, Index(), None
        if self._claim is not None:
            self._claim.release()

    def destroy(self, reason: str) -> bool:
        """Stop, and unlink the files unless another process uses them; True if unlinked."""
        self.stop(reason)
        alone = not self.readonly and self._claim is not None and self._claim.alone()
        gone = alone and remove_directory(self.directory)
        self.release()
        return gone

    def _opened(self) -> tuple[Segment, Log]:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.directory} was opened before fork(), whose child has neither its threads "
                "nor its locks; open the ActivationStore in the child process itself, or start the "
                "child with 'spawn'"
            )
        disk = self._disk
        if self.reason_stopped is not None or disk is None:
            raise GoneError(self.reason_stopped or "closed")
        return disk

    # -- reading ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take note of what was committed meanwhile, by any process.

        Raises:
            GoneError: Void or closed.
            OSError: The disk fails.
        """
        _, log = self._opened()
        with self._lock:
            self._read_on(log)

    def _read_on(self, log: Log) -> None:
        commits: list[Commit] = []
        num_records = 0
        for commit in log.read_on():
            commits.append(commit)
            num_records += len(commit.spans)
            if num_records >= RECORDS_AT_ONCE:
                self._note(commits)
                commits, num_records = [], 0
        self._note(commits)

    def catch_up(self) -> bool:
        """Do the same if anything was committed, without waiting for a writer of this process;
        True if it was done. To learn that nothing was takes half a microsecond.

        Raises:
            GoneError: Void or closed.
            OSError: The disk fails.
        """
        _, log = self._opened()
        if not log.has_grown or not self._lock.acquire(blocking=False):
            return False
        try:
            self._read_on(log)
        finally:
            self._lock.release()
        return True

    def _note(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        spans = np.concatenate([commit.spans for commit in commits])
        key_bytes = np.concatenate([commit.key_bytes for commit in commits])
        keys = b"".join(commit.keys for commit in commits)
        if all_integers(keys, key_bytes):
            self.index.add_integers(keys, spans)
        else:
            self.index.add(split_keys(keys, key_bytes), spans)
        self.totals = commits[-1].totals
        self._num_records = max(len(self.index), 1)

    def contains(self, ids: Sequence[SampleId], variant: int) -> npt.NDArray[np.bool_]:
        """Return bool (B,), from memory."""
        if not self.usable:
            return np.zeros(len(ids), np.bool_)
        return self.index.contains(ids, variant)

    def contains_keys(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return bool (B,) for keys of any variants, from memory."""
        found: npt.NDArray[np.bool_] = self.index.locate_keys(keys)[:, 1] != 0
        return found

    def check(self) -> Segment:
        """Return what records are read from; it stays open while it is held. What was verified is
        no longer believed once anybody else wrote to it.

        Raises:
            GoneError: Void or closed.
            OSError: The disk fails.
        """
        segment, _ = self._opened()
        if not self._is_writing and (written := segment.written) != self._written:  # not by us
            self.index.distrust()
            self._written = written
        return segment

    def ensure_open(self) -> None:
        """Raise what every use does raise, if this is of no use any more.

        Raises:
            GoneError: Void or closed.
            StoreError: In a child process.
        """
        if self.reason_stopped is not None or self._disk is None or os.getpid() != self._pid:
            self._opened()

    @property
    def written(self) -> int:
        """When the records were written to last, for all that is known, in nanoseconds; -1 while
        this process writes. If it was at another time, `check` must be asked.
        """
        return -1 if self._is_writing else self._written

    def locate(self, keys: Keys) -> Located:
        """Return where records are.

        Raises:
            GoneError: Void or closed.
            OSError: The disk fails.
        """
        _, log = self._opened()
        located = self.index.look_up(keys)
        if not located.raw[:, 1].all() and log.has_grown:
            self.refresh()
            located = self.index.look_up(keys)
        return located

    @property
    def mapping(self) -> Mapping | None:
        """Of the records, as far as they are mapped."""
        return None if self._disk is None else self._disk[0].mapping

    def turn(self, num_reads: int) -> int:
        """Count reads; return how often each record was read by now, on average."""
        self._num_reads += num_reads
        return self._num_reads // self._num_records

    def bytes_of(self, ids: Sequence[SampleId], variant: int) -> int:
        """Return the length of all these records."""
        return int(self.index.locate(ids, variant)[:, 1].sum())

    def num_samples(self) -> int:
        """Records committed, by any process.

        Raises:
            GoneError: Void or closed.
            OSError: The disk fails.
        """
        self.refresh()
        return len(self.index)

    def records(self) -> Iterator[tuple[bytes, memoryview]]:
        """Walk over all samples in the order they were stored: key, and record, unchecked.

        Raises:
            OSError: The disk fails.
        """
        segment, _ = self._opened()
        # A log of its own: what is noted here is where a live run's additions begin.
        log = Log(self.directory / LOG_NAME, self.directory.name, readonly=True)
        for commit in log.read_on():
            keys = split_keys(commit.keys, commit.key_bytes)
            last = (self.index.locate_keys(keys) == commit.spans).all(1)  # not stored again since
            for position in np.flatnonzero(last).tolist():
                yield keys[position], segment.record(*commit.spans[position].tolist())

    # -- writing ----------------------------------------------------------------------------

    def check_present(self) -> None:
        """Raise `GoneError` if the files were removed or replaced under us."""
        if not all(file.is_at(self.directory) for file in self._opened()):
            raise GoneError(f"{self.directory} was removed while in use")

    def new_among(self, records: Encoded) -> Encoded:
        """Return those of the records that no process has stored by now. What another one stored
        is the same; what proved unreadable is new. The caller holds the directory's lock from here
        to the end of `write`.

        Raises:
            GoneError: Void, closed, or removed under us.
            OSError: The disk fails.
        """
        self.check_present()
        self.refresh()
        return records.only(~self.contains_keys(records.keys))

    def growth_bytes(self, records: Encoded) -> npt.NDArray[np.int64]:
        """Return, shape (B + 1,), by how much the files grow if the first n are written."""
        key_bytes = np.fromiter(map(len, records.keys), np.int64, len(records))
        pages = 2 * PAGE_BYTES + block_bytes(0, 0) + ALIGNMENT
        return np.cumsum(np.append(pages, records.room + 18 + key_bytes))

    def write(
        self, records: Encoded, raw_bytes: int, error: LossyError, codec: Codec | None
    ) -> None:
        """Commit records that are new; all of them, or none.

        Raises:
            GoneError: Void or closed.
            OSError: The disk is full, or fails.
        """
        segment, log = self._opened()
        end = min(self.totals.end, segment.size)
        begin = self._append(segment, end, records)
        room = records.room
        spans = np.stack((begin + np.cumsum(room) - room, records.sizes), 1).astype("<u8")
        joined = LossyError()
        joined.join(self.totals.error)
        joined.join(error)
        totals = Totals(
            int(spans[-1].sum()),
            self.totals.raw_bytes + raw_bytes,
            self.totals.stored_bytes + int(records.sizes.sum()),
            joined,
            codec,
        )
        with self._lock:
            try:
                log.append(records.keys, spans, totals)
            except OSError:
                segment.cut(end)
                raise
            self.index.add(records.keys, spans)
            self.totals = totals
            self._num_records = max(len(self.index), 1)

    def _append(self, segment: Segment, end: int, records: Encoded) -> int:
        """Write records to disk, before the commit that makes them visible, and return where they
        begin. What was verified stays trusted: the file was written to, but not by others.
        """
        is_ours = segment.written == self._written
        self._is_writing = True
        try:
            return segment.append(end, records.pieces())
        finally:
            self._written = segment.written if is_ours else self._written
            self._is_writing = False
