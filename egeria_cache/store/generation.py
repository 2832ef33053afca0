"""One content-addressed set of records, as a training run uses it: look up, read, hand over, void.

Thread-safe. Disk trouble of any kind ends in one warning and in misses, never in an exception.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from egeria_cache.attempt import without_modes
from egeria_cache.device import batch_to_host
from egeria_cache.errors import StoreError
from egeria_cache.store import record
from egeria_cache.store.codecs import Codec, Coder
from egeria_cache.store.disk.files import LOCATED, GenerationFiles, Located, Totals, salvaged
from egeria_cache.store.disk.place import Budget, GoneError, Manifest
from egeria_cache.store.reader import Fetched
from egeria_cache.store.record import Encoded, Records, Rows, SampleId, Variants, encode_rows
from egeria_cache.store.writer import Job, Writer

logger = logging.getLogger("egeria_cache.store")

RETRY_S = 10.0
"""After the limit or the disk was full, writing is tried again: space may have become free."""
SMALL_PART = 8
"""A generation that takes no more than this part, an eighth, of the limit and of the machine's
memory is not worth compressing: it stays in the page cache, and is read in a fraction of the time
that decoding takes."""
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
_TROUBLE = GoneError, OSError, MemoryError


def encode_keys(ids: Sequence[SampleId], variant: Variants = 0) -> list[bytes]:
    """Return the keys of a batch.

    Raises:
        TypeError: An ID is not an integer, a text, or a tuple of these.
        ValueError: No variant has this number: it has 32 bits.
    """
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    each, pack = np.full(len(ids), variant).tolist(), record.INT_KEY.pack
    try:
        return [
            pack(record.INT, one + record.SIGN, which)
            if type(one) is int
            else record.encode_key(one, which)
            for one, which in zip(ids, each, strict=True)
        ]
    except struct.error:  # an integer or a variant too large for that
        return list(map(record.encode_key, ids, each))


class Generation:
    """Map from (sample ID, variant) to named tensors. Made by `ActivationStore.open_generation`."""

    def __init__(
        self,
        manifest: Manifest,
        files: GenerationFiles | str,
        *,
        writer: Writer,
        budget: Budget,
        coder: Coder,
        num_expected: int = 0,
    ) -> None:
        self.name: str = manifest.name
        """Its directory's name, "gen-" and twelve digits of the hash of `fields`."""
        self.fields: Mapping[str, Any] = manifest.fields
        """What went into the hash."""
        self.created: float = manifest.created
        """When it was made, by whichever process, in seconds since the epoch."""
        self._held = None if isinstance(files, str) else files
        self._stopped = files if isinstance(files, str) else None
        """Why it serves and takes nothing."""
        self.alive = self._stopped is None
        """It serves records: neither void, nor released, nor stopped by an error."""
        self.is_idle = True
        """Nothing of it waits for the writer."""
        self._writer, self._budget, self._coder = writer, budget, coder
        self.num_expected = num_expected
        """Records that it will hold when all are stored; 0 if nobody said."""
        self._lock = threading.Lock()
        self._released = False
        self._num_queued = 0
        self._write_again_at = 0.0
        self._said: set[str] = set()

    @property
    def _files(self) -> GenerationFiles:
        if self._stopped is not None or self._held is None:
            raise GoneError(self._stopped)
        return self._held

    @property
    def totals(self) -> Totals:
        """Sums over its records on disk."""
        try:
            with self._files.reading() as view:
                return view.totals()
        except _TROUBLE as error:
            self._missed(error)
        return Totals()

    # -- reading ----------------------------------------------------------------------------

    def locate(self, ids: Sequence[SampleId], *, variant: Variants = 0) -> Located:
        """Look up where samples are stored, by whichever process."""
        keys = encode_keys(ids, variant)
        located = np.zeros(len(keys), LOCATED)
        located["key"] = keys
        try:
            with self._files.reading() as view:
                located["entry"] = view.located(keys)
            for row, key in enumerate(keys) if self._files.hidden else ():
                if key in self._files.hidden:
                    located["entry"]["size"][row] = 0
        except _TROUBLE as error:
            self._missed(error)
        return located

    def contains(self, ids: Sequence[SampleId], *, variant: Variants = 0) -> npt.NDArray[np.bool_]:
        """Return bool (B,): which samples are stored, by whichever process."""
        found: npt.NDArray[np.bool_] = self.locate(ids, variant=variant)["entry"]["size"] > 0
        return found

    def _missed(self, error: Exception) -> None:
        """What goes wrong between training and the disk is a miss, and one warning."""
        if not isinstance(error, GoneError):  # of now: nothing is wrong with what is stored
            self._warn(f"cannot be read now: {error}")

    def get_batch(
        self, ids: Sequence[SampleId], *, variant: Variants = 0
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Read the samples that are stored.

        Args:
            ids: B sample IDs, in any order, repeats allowed.
            variant: Which random draw of each.

        Returns:
            Per name, B rows in the order of `ids` (a list where rows differ in shape, or are no
            tensors), and the mask of rows found. Rows not found are zeros, or None in a list. An
            empty dict if nothing was found.
        """
        with without_modes():
            return self.get_located(self.locate(ids, variant=variant))

    def get_located(
        self, located: Located, *, pin_memory: bool = False, in_memory: bool = False
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Read samples that were located before, as `get_batch` does, under no mode of the loop's.
        What has been superseded since then is not found.

        Args:
            located: Where they are.
            pin_memory: Decode into page-locked memory, for a copy to the device.
            in_memory: Wait for no disk, but for a record or two that show that not all is there.

        Raises:
            NotInMemoryError: `in_memory`, and not all of it is.
        """
        try:
            with self._files.reading() as view:
                fetched = Fetched(view, located, pin_memory, waits=not in_memory)
                fetched.read()
            if fetched.damaged:
                self._writer.count(corrupt=len(fetched.damaged))
                self._warn(
                    f"{fetched.damaged[0]}; it is computed again. Further damaged records are "
                    "counted in stats().corrupt; run cache-inspect verify", about="damage",
                )  # fmt: skip
            if fetched.hit.any() and self._stopped is None:  # it may have become void meanwhile
                return fetched.fields, fetched.hit
        except _TROUBLE as error:
            self._missed(error)
        return {}, np.zeros(len(located), np.bool_)

    # -- writing ----------------------------------------------------------------------------

    def put_batch(
        self,
        ids: Sequence[SampleId],
        tensors: Rows,
        *,
        variant: Variants = 0,
        replaces: Variants | None = None,
    ) -> bool:
        """Hand a batch to the writer thread; never waits.

        Args:
            ids: B sample IDs. Those already stored are skipped.
            tensors: Per name a tensor of B rows, or a list of B values. They must not be written to
                afterwards; a batch that was is dropped, not stored.
            variant: Which random draw of each.
            replaces: The last draw that each of these supersedes; `NO_DRAW` for none. What a sample
                has up to that one is removed with the same commit, and its space used again.

        Returns:
            False if the batch was dropped (queue full, limit reached, disk trouble).

        Raises:
            ValueError: A value has not B rows, or no variant has this number.
        """
        for name, value in tensors.items():
            if len(value) != len(ids):
                raise ValueError(f"{name!r} has {len(value)} rows for {len(ids)} sample IDs")
        keys = encode_keys(ids, variant)
        if not self._takes_more or not self._writer.alive or self._writer.is_full:
            return self._refuse(keys)
        replaced = None if replaces is None else record.superseded(keys, replaces)
        with without_modes():
            rows, ready = batch_to_host(dict(tensors))
        return self._submit(Job(self, keys, rows, ready, replaced)) or self._refuse(keys)

    def _submit(self, job: Job) -> bool:
        self._queued(1)
        taken = self._writer.submit(job)
        if not taken:
            self._queued(-1)
        return taken

    def _refuse(self, keys: Sequence[bytes]) -> bool:
        """Count a batch that is not stored."""
        self._writer.count(dropped_writes=len(keys))
        if not self._writer.alive and self.alive:
            self._warn(self._writer.why_dead or "the cache's writer thread is gone")
        return False

    @property
    def _takes_more(self) -> bool:
        return self._stopped is None and time.monotonic() >= self._write_again_at

    def commit(self, jobs: Sequence[Job]) -> None:
        """Encode and store batches in one commit, or what is intact in a damaged file; called by
        the writer thread alone.
        """
        num_written, num_left = 0, sum(len(job.keys) for job in jobs)
        try:
            if jobs[0].aside is not None:
                self._take_from(jobs[0].aside)
            else:
                num_written, num_left = self._commit(jobs)
        except GoneError as gone:
            if self._stop(str(gone)):
                self._warn(f"no longer used: {gone}")
        except (OSError, MemoryError, StoreError) as error:
            # Nothing is stored for a while, and reads go on: what is stored is intact.
            self._write_again_at = time.monotonic() + RETRY_S
            full = isinstance(error, OSError) and error.errno in FULL
            why = f"no space left on the disk ({error})" if full else str(error) or repr(error)
            self._warn(f"nothing is stored for now: {why}")
        except (TypeError, ValueError, RuntimeError, struct.error) as error:
            self._warn(f"a batch cannot be stored: {error}")
        finally:
            self._writer.count(writes=num_written, dropped_writes=num_left)
            self._queued(-len(jobs))

    def _commit(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """Store what can be; return how many rows were stored, and how many are not stored now."""
        num_rows = sum(len(job.keys) for job in jobs)
        records, raw_bytes = list[Encoded](), 0
        for job in jobs if self._takes_more else ():
            try:
                records += self._encode(job, records)
                raw_bytes += job.num_bytes
            except (TypeError, ValueError, RuntimeError) as problem:  # of this batch alone
                self._warn(f"a batch cannot be stored: {problem}")
        if not records:
            return 0, num_rows
        num_new, num_stored = self.take(records, Totals(raw_bytes, 0, self._coder.codec))
        if num_stored < num_new:
            self._write_again_at = time.monotonic() + RETRY_S
            where, limit = self._budget.directory, self._budget.limit_bytes / 1e6
            self._warn(
                f"{where} has reached its limit of {limit:.3g} MB: samples that are not stored yet "
                f"are computed in every epoch; raise limit=, or make room with `cache-inspect "
                f"{where} prune`", about="limit",
            )  # fmt: skip
        return num_stored, num_rows - len(records) + num_new - num_stored

    def _encode(self, job: Job, before: Records) -> list[Encoded]:
        """Return the records of a batch, of the layout of those before it."""
        for arrived in job.ready:
            arrived.synchronize()
        if self._coder.codec is None:
            self._choose_codec(job)
        with self._files.reading() as view:
            known = view.layout or (before[0].layout if before else None)
        identity = self._files.identity
        encoded = encode_rows(job.keys, job.rows, self._coder, identity, job.replaced, known)
        if not job.unchanged():
            raise ValueError("a tensor was changed after put_batch and before it was stored")
        return encoded

    def take(self, records: Records, told: Totals) -> tuple[int, int]:
        """Store encoded records in one commit, now, as far as there is room.

        Args:
            records: Of this generation.
            told: Of all of them: bytes decoded, and the codec.

        Returns:
            How many were not there yet, and how many of those were stored.

        Raises:
            GoneError: Void, closed, or removed under us.
            StoreError: Another process holds the directory's lock.
            ValueError: Others have stored records of another layout.
            OSError: The disk is full, or fails.
        """
        files = self._files
        files.check_present()
        with self._budget.locked(), files.reading(writes=True) as view:
            new = fitting = view.new_among(records)
            if new:
                growth = view.growth_bytes(new)
                free = self._budget.make_room(growth[-1])
                fitting = new[: sum(size <= free for size in growth)]
            if fitting:
                view.add(fitting, told.raw_bytes * len(fitting) // len(records), told)
        for one in fitting:
            files.hidden.pop(one.key, None)
        return len(new), len(fitting)

    def salvage(self, aside: Path) -> None:
        """Have the writer take in, bit by bit, what is intact in a file whose tree is damaged."""
        self._submit(Job(self, [], {}, aside=aside))

    def _take_from(self, aside: Path) -> None:
        num_found = 0
        try:
            for records in salvaged(aside, self._files.identity):
                num_found += self.take(records, Totals(sum(one.size for one in records)))[1]
                if not self._takes_more or not self._writer.alive:
                    break
        except (OSError, ValueError, StoreError) as error:
            logger.info("%s: salvaging ended: %s", self.name, error)
        logger.info("%s: %d records of %s were intact", self.name, num_found, aside.name)

    def _choose_codec(self, job: Job) -> None:
        """Decide once, from the first batch."""
        expected = self.num_expected * job.num_bytes // max(len(job.keys), 1)
        small = min(self._budget.limit_bytes, psutil.virtual_memory().total) // SMALL_PART
        if 0 < expected <= small:
            why = f"{Codec.RAW.label}: {expected / 1e6:.0f} MB for all samples are few"
            self._coder.codec = Codec.RAW
        else:
            why = record.choose_codec(job.keys, job.rows, self._coder)
        logger.info("%s: codec %s", self.name, why)

    # -- the end ----------------------------------------------------------------------------

    def void(self, reason: str) -> None:
        """Serve nothing more, at once and in every thread, then unlink: the space is back.

        A generation that another process uses stays on disk for it.
        """
        if self._stop(f"void: {reason}"):
            logger.info("%s is void: %s", self.name, reason)
        discarded = self._writer.discard(lambda job: job.target is self)
        with contextlib.suppress(OSError, StoreError), self._budget.locked():  # else they stay
            if self._held is not None:
                self._held.close(removes=True)
        self._queued(-discarded)
        self.release()

    def release(self) -> None:
        """This process no longer uses it; its records stay, and what is queued is still stored. May
        be called twice.
        """
        self._released, self.alive = True, False
        self._queued(0)

    def _queued(self, change: int) -> None:
        """Count the batches that wait; the last one of a released generation closes its files."""
        with self._lock:
            self._num_queued += change
            self.is_idle = self._num_queued <= 0
        if self._released and self.is_idle:
            self._stop("closed")
            if self._held is not None:
                self._held.close()

    def _stop(self, reason: str) -> bool:
        """From now on it serves and takes nothing; True for the call that stopped it."""
        with self._lock:
            first, self._stopped = self._stopped is None, self._stopped or reason
            self.alive = False
        return first

    def _warn(self, message: str, *, about: str = "trouble") -> None:
        with self._lock:
            warned, self._said = about in self._said, {*self._said, about}
        if not warned:
            logger.warning("cache generation %s: %s; training goes on", self.name, message)
