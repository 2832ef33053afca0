"""One content-addressed set of records, as a training run uses it: look up, read, hand over, void.

Thread-safe. Disk trouble of any kind ends in one warning and in misses, never in an exception.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from egeria_cache.errors import StoreError
from egeria_cache.store.codecs.codec import Codec, Coder
from egeria_cache.store.codecs.lossy import LossyError, Storage
from egeria_cache.store.disk.budget import Budget, BudgetBusyError
from egeria_cache.store.disk.files import GenerationFiles, GoneError
from egeria_cache.store.disk.manifest import Manifest
from egeria_cache.store.disk.place import FULL
from egeria_cache.store.reader import BatchReader
from egeria_cache.store.records.choice import choose_codec
from egeria_cache.store.records.encoded import Buffer, Encoded
from egeria_cache.store.records.keys import SampleId, check_variant, encode_keys, plain_integers
from egeria_cache.store.records.record import Rows, encode_rows
from egeria_cache.store.records.values import Value
from egeria_cache.store.stats import GenerationCounts
from egeria_cache.store.transfer import to_host
from egeria_cache.store.writer import ChangedError, Job, Writer
from egeria_cache.threads import has_modes, without_modes

__all__ = ["Generation"]

logger = logging.getLogger("egeria_cache.store")

RETRY_S = 10.0
"""After the limit or the disk was full, writing is tried again: space may have become free."""
SMALL_PART = 8
"""A generation that takes no more than this part, an eighth, of the limit and of the machine's
memory is not worth compressing: it stays in the page cache, and is read in a fraction of the time
that decoding takes."""
Variants = int | npt.NDArray[np.int64]
"""Of a batch's samples: one number for all of them, or one each, shape (B,)."""
BARE = "value"
"""Name under which a bare tensor is stored."""


class Generation:
    """Map from (sample ID, variant) to named tensors. Made by `ActivationStore.open_generation`."""

    def __init__(
        self,
        manifest: Manifest,
        files: GenerationFiles,
        *,
        reader: BatchReader,
        writer: Writer,
        budget: Budget,
        codec: str,
        storage: Storage = None,
        num_expected: int = 0,
    ) -> None:
        self._manifest = manifest
        self._files = files
        self._reader, self._writer, self._budget = reader, writer, budget
        self._codec_name = codec
        self._codec: Codec | None = None if codec == "auto" else Codec.named(codec)
        self._coder = Coder()
        self._storage = storage
        self._num_expected = num_expected
        self._lock = threading.Lock()
        self._released = False
        self._num_queued = 0
        self._write_again_at = 0.0
        self._said: set[str] = set()
        self.counts = GenerationCounts()

    @property
    def name(self) -> str:
        """Its directory's name, "gen-" and twelve digits of the hash of `fields`."""
        return self._manifest.name

    @property
    def fields(self) -> Mapping[str, Any]:
        """What went into the hash."""
        return self._manifest.fields

    @property
    def created(self) -> float:
        """When it was made, by whichever process, in seconds since the epoch."""
        return self._manifest.created

    @property
    def is_idle(self) -> bool:
        """Nothing of it waits for the writer."""
        return self._num_queued <= 0

    @property
    def alive(self) -> bool:
        """It serves records: neither void, nor released, nor stopped by an error."""
        return self._files.reason_stopped is None and not self._released

    @property
    def num_expected(self) -> int:
        """Records that it will hold when all are stored; 0 if nobody said."""
        return self._num_expected

    @property
    def num_samples(self) -> int:
        """Records on disk."""
        try:
            return self._files.num_samples()
        except (GoneError, StoreError, OSError):
            return 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of all records, decoded."""
        return self._files.totals.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of all records, encoded."""
        return self._files.totals.stored_bytes

    @property
    def lossy_error(self) -> LossyError:
        """What lossy storage changed; all zero without it."""
        return self._files.totals.error

    # -- reading ----------------------------------------------------------------------------

    def contains(self, ids: Sequence[SampleId], *, variant: Variants = 0) -> npt.NDArray[np.bool_]:
        """Return bool (B,): which samples are stored. From memory."""
        found = np.zeros(len(ids), np.bool_)
        if self.alive:
            for one, rows in _by_variant(variant, len(ids)):
                found[rows] = self._files.contains(_taken(ids, rows), one)
        return found

    def catch_up(self) -> bool:
        """Take note of what other processes have stored meanwhile; whether there was anything.

        Never waits for this process's own writer.
        """
        try:
            return self.alive and self._files.catch_up()
        except (GoneError, StoreError, OSError):
            return False

    def bytes_of(self, ids: Sequence[SampleId], *, variant: Variants = 0) -> int:
        """Return the bytes that the records of these samples take on disk. From memory."""
        if not self.alive:
            return 0
        parts = _by_variant(variant, len(ids))
        return sum(self._files.bytes_of(_taken(ids, rows), one) for one, rows in parts)

    def get_batch(
        self,
        ids: Sequence[SampleId],
        *,
        variant: Variants = 0,
        pin_memory: bool = False,
        in_memory: bool = False,
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Read the samples that are stored.

        Args:
            ids: B sample IDs, in any order, repeats allowed.
            variant: Which random draw of each.
            pin_memory: Decode into page-locked memory, for a copy to the device.
            in_memory: Wait for no disk.

        Returns:
            Per name, B rows in the order of `ids` (a list where rows differ in shape, or are no
            tensors), and the mask of rows found. Rows not found are zeros, or None in a list. A
            bare tensor if that was put; an empty dict if nothing was found.

        Raises:
            NotInMemoryError: `in_memory`, and it is not known that all of it is.
        """
        parts = _by_variant(variant, len(ids))
        if len(parts) == 1:
            return self._get(ids, parts[0][0], pin_memory, in_memory)
        got = [self._get(_taken(ids, rows), one, pin_memory, in_memory) for one, rows in parts]
        found = np.zeros(len(ids), np.bool_)
        for (_, rows), (_, hit) in zip(parts, got, strict=True):
            found[rows] = hit
        return (_joined(parts, [tensors for tensors, _ in got]) if found.all() else {}), found

    def _get(
        self, ids: Sequence[SampleId], variant: int, pin_memory: bool, in_memory: bool
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        if not self.alive:
            self._count(misses=len(ids))
            return {}, np.zeros(len(ids), np.bool_)
        try:
            if has_modes():
                with without_modes():
                    fetched = self._reader.read(self._files, ids, variant, pin_memory, in_memory)
            else:
                fetched = self._reader.read(self._files, ids, variant, pin_memory, in_memory)
        except (OSError, MemoryError) as error:  # of now: nothing is wrong with what is stored
            self._warn(f"cannot be read now: {error}")
            self._count(misses=len(ids))
            return {}, np.zeros(len(ids), np.bool_)
        counts, num_misses = self.counts, len(ids) - fetched.num_hits
        with self._lock:
            counts.hits += fetched.num_hits
            if num_misses:
                counts.misses += num_misses
                counts.corrupt += fetched.num_corrupt
        if not fetched.num_hits:
            return {}, fetched.hit
        return fetched.fields[BARE] if fetched.bare else fetched.fields, fetched.hit

    # -- writing ----------------------------------------------------------------------------

    def put_batch(
        self,
        ids: Sequence[SampleId],
        tensors: Tensor | Mapping[str, Tensor | Sequence[Value]],
        *,
        variant: Variants = 0,
        replaces: Variants | None = None,
    ) -> bool:
        """Hand a batch to the writer thread; never waits.

        Args:
            ids: B sample IDs. Those already stored are skipped.
            tensors: A tensor of B rows, or per name such a tensor or a list of B values. They must
                not be written to afterwards; a batch that was is dropped, not stored.
            variant: Which random draw of each.
            replaces: The draw that each of these supersedes; it stays in the file.

        Returns:
            False if the batch was dropped (queue full, limit reached, disk trouble).

        Raises:
            ValueError: A value has not B rows, or no variant has this number.
        """
        bare = isinstance(tensors, Tensor)
        fields = {BARE: tensors} if isinstance(tensors, Tensor) else dict(tensors)
        for name, value in fields.items():
            if len(value) != len(ids):
                raise ValueError(f"{name!r} has {len(value)} rows for {len(ids)} sample IDs")
        parts = _by_variant(variant, len(ids))
        if len(parts) == 1:
            return self._put(ids, bare, fields, parts[0][0])
        taken = True
        for one, rows in parts:
            part = {name: _taken(value, rows) for name, value in fields.items()}
            taken &= self._put(_taken(ids, rows), bare, part, one)
        return taken

    def _put(
        self, ids: Sequence[SampleId], bare: bool, fields: Mapping[str, Any], variant: int
    ) -> bool:
        check_variant(variant)
        numbers = plain_integers(ids)
        keys = encode_keys(ids, variant) if numbers is None else numbers.copy()
        if not self._takes_more or not self._writer.alive or self._writer.is_full:
            return self._refuse(ids, variant)
        fields, ready = to_host(fields)
        job = Job.of(self, keys, range(len(ids)), Rows(bare, fields), ready, variant)
        self._queued(1)
        if self._writer.submit(job):
            return True
        self._queued(-1)
        return self._refuse(ids, variant)

    def _refuse(self, ids: Sequence[SampleId], variant: int) -> bool:
        """Count what of a batch is not stored; True if there is nothing of it to be stored."""
        num_new = len(ids) - int(np.count_nonzero(self.contains(ids, variant=variant)))
        if not num_new:
            return self.alive
        self._count(dropped_writes=num_new)
        if not self._writer.alive and self.alive:
            self._warn("the cache's writer thread is dead")
        return False

    @property
    def _takes_more(self) -> bool:
        return (
            self._files.usable
            and not self._files.readonly
            and time.monotonic() >= self._write_again_at
        )

    def commit(self, jobs: Sequence[Job]) -> None:
        """Encode and store batches in one commit; called by the writer thread alone."""
        for job in jobs:
            job.pick(self._files.contains_keys)
        num_rows = sum(len(job.picked) for job in jobs)
        num_written = 0
        try:
            num_written = self._commit_unchanged(jobs)
        except GoneError as gone:
            self._stop(str(gone))
        except BudgetBusyError as busy:
            self._warn(f"a batch was not stored: {busy}")
        except (OSError, MemoryError, StoreError) as error:
            self._pause(error)
        except (TypeError, ValueError, RuntimeError) as error:
            self._warn(f"a batch cannot be stored: {error}")
        finally:
            self._count(writes=num_written, dropped_writes=num_rows - num_written)
            self._queued(-len(jobs))

    def _commit_unchanged(self, jobs: Sequence[Job]) -> int:
        """Commit the batches but for those that prove to have been changed."""
        while self._takes_more and jobs:
            try:
                return self._commit(jobs)
            except ChangedError as changed:
                self._warn(
                    "a tensor was changed after put_batch and before it was stored; not stored"
                )
                jobs = [job for job in jobs if job is not changed.job]
        return 0

    def _commit(self, jobs: Sequence[Job]) -> int:
        parts: list[Encoded] = []
        known: set[bytes] = set()
        num_encoded, raw_bytes, error = 0, 0, LossyError()
        for job in jobs:
            if not job.picked:
                continue
            try:
                encoded = self._encode(job, error)
            except (TypeError, ValueError, RuntimeError) as problem:  # of this batch alone
                self._warn(f"a batch cannot be stored: {problem}")
                continue
            num_encoded += len(encoded)
            encoded = encoded.only(_first_among(known, encoded.keys))
            raw_bytes += job.num_bytes * len(encoded) // max(len(job.keys), 1)
            parts.append(encoded)
        if not parts:
            return 0
        records = Encoded.joined(parts)
        num_new, num_stored = self.take(records, raw_bytes, error, self._codec)
        if num_stored < num_new:
            self._write_again_at = time.monotonic() + RETRY_S
            if "limit" not in self._said:
                self._said.add("limit")
                logger.warning(
                    "%s has reached its limit of %.3g MB: samples that are not stored yet are "
                    "computed in every epoch; raise limit=, or make room with "
                    "`cache-inspect %s prune`",
                    self._budget.directory, self._budget.limit_bytes / 1e6, self._budget.directory,
                )  # fmt: skip
            return len(records) - num_new + num_stored
        return num_encoded

    def take(
        self, records: Encoded, raw_bytes: int, error: LossyError, codec: Codec | None
    ) -> tuple[int, int]:
        """Store encoded records in one commit, now, as far as there is room.

        Args:
            records: Of this generation, no two with one key.
            raw_bytes: Of all of them, decoded.
            error: What lossy storage changed in them.
            codec: What they were written with.

        Returns:
            How many were not there yet, and how many of those were stored.

        Raises:
            GoneError: Void, closed, or removed under us.
            BudgetBusyError: Another process holds the directory's lock.
            OSError: The disk is full, or fails.
        """
        with self._budget.locked():
            new = self._files.new_among(records)
            fitting = self._fitting(new)
            if fitting:
                part = raw_bytes * len(fitting) // len(records)
                self._files.write(fitting, part, error, codec)
        return len(new), len(fitting)

    def _fitting(self, records: Encoded) -> Encoded:
        """Return as many of the records as the limit has room for."""
        growth = self._files.growth_bytes(records)
        room = self._budget.make_room(int(growth[-1]))
        return records.only(growth[1:] <= room)

    def _encode(self, job: Job, error: LossyError) -> Encoded:
        """Return the records of a batch. To read them raises `ChangedError` if it was changed."""
        for arrived in job.ready:
            arrived.synchronize()
        changed = LossyError()
        codec = self._codec if self._codec is not None else self._choose_codec(job)
        records = encode_rows(
            job.encoded_keys, job.picked, job.rows, codec, self._coder, self._storage, changed,
            self._files.identity, self._writer.arena,
        )  # fmt: skip
        error.join(changed)
        buffers = [functools.partial(_unchanged, job, buffer) for buffer in records.buffers]
        return dataclasses.replace(records, buffers=buffers)

    def _choose_codec(self, job: Job) -> Codec:
        """Decide once, from the first batch."""
        expected = self._num_expected * job.num_bytes // max(len(job.keys), 1)
        small = min(self._budget.limit_bytes, psutil.virtual_memory().total) // SMALL_PART
        if 0 < expected <= small:
            self._codec, trials = Codec.RAW, f"{expected / 1e6:.0f} MB for all samples are few"
        else:
            self._codec, trials = choose_codec(
                job.encoded_keys, job.picked, job.rows, self._coder, self._storage
            )
        logger.info("%s: codec %s: %s", self.name, self._codec.label, trials)
        return self._codec

    # -- the end ----------------------------------------------------------------------------

    def void(self, reason: str) -> None:
        """Serve nothing more, at once and in every thread, then unlink: the space is back.

        A generation that another process uses stays on disk for it.
        """
        if self._files.stop(f"void: {reason}"):
            logger.info("%s is void: %s", self.name, reason)
        discarded = self._writer.discard(lambda job: job.target is self)
        self._files.destroy(reason)
        self._queued(-discarded)
        self.release()

    def release(self) -> None:
        """This process no longer uses it; its records stay, and what is queued is still stored. May
        be called twice.
        """
        self._released = True
        self._queued(0)

    def _queued(self, change: int) -> None:
        """Count the batches that wait; the last one of a released generation closes its files."""
        with self._lock:
            self._num_queued += change
            done = self._released and self._num_queued <= 0
        if done:
            self._files.release()

    def _pause(self, error: Exception) -> None:
        """Store nothing for a while after a failed write; reads go on: what is stored is intact."""
        try:
            self._files.check_present()
        except (GoneError, StoreError) as gone:
            self._stop(str(gone))
            return
        self._write_again_at = time.monotonic() + RETRY_S
        full = isinstance(error, OSError) and error.errno in (*FULL, errno.EFBIG)
        why = f"no space left on the disk ({error})" if full else str(error)
        self._warn(f"nothing is stored for now: {why}")

    def _stop(self, reason: str) -> None:
        if self._files.stop(reason):
            self._warn(f"no longer used: {reason}")

    def _warn(self, message: str) -> None:
        with self._lock:
            warned = "warning" in self._said
            self._said.add("warning")
        if not warned:
            logger.warning("cache generation %s: %s; training goes on", self.name, message)

    def _count(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                setattr(self.counts, name, getattr(self.counts, name) + change)


def _unchanged(job: Job, buffer: Buffer) -> memoryview:
    """Return the records of a batch that is still what was handed over."""
    content = buffer()
    if not job.unchanged():
        raise ChangedError(job)
    return content


def _first_among(known: set[bytes], keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Return which keys were not known yet, nor came before in their batch; now they are known."""
    num_before = len(known)
    if known.isdisjoint(keys):
        known.update(keys)
        if len(known) == num_before + len(keys):
            return np.ones(len(keys), np.bool_)
        known.difference_update(keys)
    fresh = np.zeros(len(keys), np.bool_)
    for position, key in enumerate(keys):
        fresh[position] = key not in known
        known.add(key)
    return fresh


def _by_variant(variant: Variants, size: int) -> list[tuple[int, Any]]:
    """Return each variant, and the positions of its samples."""
    if isinstance(variant, int):
        return [(variant, slice(None))]
    if not len(variant) or (variant == variant[0]).all():
        return [(int(variant[0]) if len(variant) else 0, slice(None))]
    return [(int(one), np.flatnonzero(variant == one)) for one in np.unique(variant)]


def _taken(values: Any, rows: Any) -> Any:
    if isinstance(rows, slice):
        return values
    if isinstance(values, Tensor):
        return values[torch.from_numpy(rows)]
    return [values[row] for row in rows.tolist()]


def _joined(parts: Sequence[tuple[int, Any]], got: Sequence[Any]) -> Any:
    """Put rows of several variants together again, in the order of their batch."""
    if not isinstance(got[0], Mapping):
        return _rows(parts, got)
    return {name: _rows(parts, [one[name] for one in got]) for name in got[0]}


def _rows(parts: Sequence[tuple[int, Any]], values: Sequence[Any]) -> Any:
    order = np.argsort(np.concatenate([rows for _, rows in parts]), kind="stable")
    kinds = {(one.shape[1:], one.dtype) if isinstance(one, Tensor) else None for one in values}
    if None not in kinds and len(kinds) == 1:
        return torch.cat(list(values))[torch.from_numpy(order)]
    listed = [row for one in values for row in one]
    return [listed[at] for at in order.tolist()]
