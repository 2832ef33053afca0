"""A directory of generations under one byte limit.

Opens, names and evicts generations, and owns the writer thread they share. Bytes on
disk: docs/format.md.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egeria_cache.arguments import Codec, StorageDtype, check_choice, names_known
from egeria_cache.errors import ForeignError, StoreError
from egeria_cache.store.codecs import Coder
from egeria_cache.store.disk import place
from egeria_cache.store.disk.files import GenerationFiles, is_unfinished, tree_problem
from egeria_cache.store.disk.place import DamagedError, Manifest, dumped
from egeria_cache.store.generation import Generation
from egeria_cache.store.writer import Writer
from egeria_cache.tables import PAGE_BYTES, parse_size

logger = logging.getLogger("egeria_cache.store")

REMOVAL_WAIT_S = 10.0
EMPTY_GENERATION_BYTES = 12 * PAGE_BYTES
"""What a new generation takes before its first record, except for its manifest."""


@dataclass(kw_only=True, slots=True)
class StoreStats:
    """Counts of this process since the store was opened, and sizes on disk now."""

    writes: int = 0
    """Rows committed."""
    dropped_writes: int = 0
    """Rows handed over and not stored: queue full, limit, disk trouble, changed tensors."""
    corrupt: int = 0
    """Records that failed their checksum; they counted as misses."""
    num_samples: int = 0
    """Records in the generations open here."""
    bytes_on_disk: int = 0
    """Of the whole directory, in whole pages."""
    raw_bytes: int = 0
    """Size before compression of the records in the generations open here."""
    stored_bytes: int = 0
    """Their size after compression."""
    limit_bytes: int = 0
    """Hard bound on `bytes_on_disk`."""


class ActivationStore:
    """Bounded, durable map from sample ID to activations.

    Any thread may use it. It must not cross fork(): open it in the process that uses it. Example:

        with ActivationStore("runs/cache", limit="8GB") as store:
            stored = store.open_generation({"model": "resnet50", "layer": "layer3"})
            stored.put_batch([3, 7], {"x": torch.randn(2, 512)})
            store.flush()
            found, hit = stored.get_batch([7, 9])      # hit: [True, False]

    Raises:
        StoreError: The directory cannot be written, is no cache, or is of a newer format.
        ValueError: A setting is out of range.
    """

    @names_known
    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit: int | str = "100GB",
        codec: str = "auto",
        *,
        storage_dtype: str | None = None,
        force_network: bool = False,
    ) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self.limit_bytes = parse_size(limit)
        check_choice("codec", codec, Codec)
        if storage_dtype is not None:
            check_choice("storage_dtype", storage_dtype, StorageDtype)
        self._codec, self._storage = codec, storage_dtype
        place.claim_directory(self.directory, force_network=force_network)
        self.was_used = bool(place.generation_directories(self.directory))
        """Whether it held generations when it was opened."""
        self._lock = threading.RLock()
        self._generations: dict[str, Generation] = {}
        self._budget = place.Budget(self.directory, self.limit_bytes)
        self.writer = Writer()
        """Shared by all generations."""
        self._closed = False
        # Dropped without close(), or at the interpreter's exit: the queue is still written.
        self._finalizer = weakref.finalize(
            self, _shut_down, self.writer, self._generations, os.getpid()
        )

    # -- generations ------------------------------------------------------------------------

    def open_generation(self, fields: Mapping[str, Any], *, num_expected: int = 0) -> Generation:
        """Return the generation these fields describe, opened or newly made.

        Args:
            fields: Plain JSON values; together they must determine every stored byte. The same
                fields name the same directory, in any process.
            num_expected: How many records it will hold, for `codec="auto"`; 0: not known.

        Raises:
            StoreError: The fields are no JSON, or the directory cannot be used.
        """
        if self._storage is not None:
            fields = {**fields, "storage_dtype": self._storage}
        manifest = Manifest.new(fields)
        with self._lock:
            if self._closed:
                raise StoreError(f"the store at {self.directory} is closed")
            known = self._generations.get(manifest.name)
            if known is not None and known.alive:
                return known
            if known is not None:
                known.release()
            generation = self._open_or_make(manifest, num_expected)
            self._generations[manifest.name] = generation
            return generation

    def _open_or_make(self, manifest: Manifest, num_expected: int) -> Generation:
        directory, deadline = self.directory / manifest.name, time.monotonic() + REMOVAL_WAIT_S
        while True:
            try:
                return self._open(directory, manifest, num_expected)
            except OSError as error:
                # It is being looked at, or was removed just now.
                passes = error.errno in (errno.EBUSY, errno.EWOULDBLOCK) or (
                    error.errno == errno.ENOENT and self.directory.is_dir()
                )
                if not passes or time.monotonic() > deadline:
                    raise StoreError(
                        f"{directory} cannot be opened: {error.strerror}; is the disk full, or was "
                        "the directory removed?"
                    ) from error
            time.sleep(0.001)

    def _open(self, directory: Path, manifest: Manifest, num_expected: int) -> Generation:
        aside = None
        if not place.in_use_elsewhere(directory):  # before the lock is held: it may take long
            with contextlib.suppress(OSError, StoreError):  # it is asked for again
                tree_problem(directory)
        with self._budget.locked():
            try:
                opened = self._open_files(directory, manifest)
            except DamagedError as damage:
                # It is only a cache: what cannot be salvaged is filled again, beside what is left.
                name = f"{place.SET_ASIDE}{directory.name}-{time.time_ns():x}"
                aside = directory.rename(self.directory / name)
                logger.warning("%s; it is set aside as %s", damage, aside.name)
                opened = self._open_files(directory, manifest)
            self._budget.make_room(0)  # the limit may be lower than it was
        generation = Generation(
            *opened, writer=self.writer, budget=self._budget,
            coder=Coder(self._codec, self._storage), num_expected=num_expected,
        )  # fmt: skip
        if aside is not None:
            generation.salvage(aside)
        return generation

    def _open_files(
        self, directory: Path, manifest: Manifest
    ) -> tuple[Manifest, GenerationFiles | str]:
        if not place.is_own_directory(directory) and os.path.lexists(directory):
            raise ForeignError(f"{directory} is no directory of this user's; it is left alone")
        if not is_unfinished(directory):
            return manifest.found_in(directory), GenerationFiles(directory)
        num_pages = -(-len(dumped(manifest.content())) // PAGE_BYTES)
        needed = EMPTY_GENERATION_BYTES + num_pages * PAGE_BYTES
        if self._budget.make_room(needed) >= needed:
            directory.mkdir(mode=0o700, exist_ok=True)
            manifest.write(directory)
            return manifest, GenerationFiles(directory)
        why = f"the limit of {self.limit_bytes} bytes has no room for another one"
        logger.warning("%s is not made, nothing is stored in it: %s", directory.name, why)
        return manifest, why

    # -- whole store ------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was handed over is on disk; False on timeout or a dead writer."""
        return self.writer.flush(timeout_s)

    def stats(self) -> StoreStats:
        """Return counts and sizes."""
        with self._lock:
            totals = [one.totals for one in self._generations.values() if one.alive]
        return StoreStats(
            **self.writer.numbers, num_samples=sum(one.num_samples for one in totals),
            raw_bytes=sum(one.raw_bytes for one in totals),
            stored_bytes=sum(one.stored_bytes for one in totals),
            bytes_on_disk=place.directory_bytes(self.directory), limit_bytes=self.limit_bytes,
        )  # fmt: skip

    def close(self, timeout_s: float = 60.0) -> None:
        """Write what is queued, stop the threads, release the generations. May be called twice, and
        again after it was interrupted.
        """
        self._closed = True
        _shut_down(self.writer, self._generations, os.getpid(), timeout_s)
        self._finalizer.detach()

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _shut_down(
    writer: Writer, generations: Mapping[str, Generation], process: int, timeout_s: float = 10.0
) -> None:
    if os.getpid() != process:  # a forked child has none of the threads
        return
    writer.close(timeout_s)
    for generation in list(generations.values()):
        generation.release()
