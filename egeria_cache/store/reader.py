"""A batch of sample IDs -> one contiguous tensor per name, decoded by several threads. No state
but the threads; any number of callers at a time.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from egeria_cache.store.assemble import assemble
from egeria_cache.store.codecs.codec import Coder
from egeria_cache.store.disk.files import GenerationFiles, GoneError
from egeria_cache.store.disk.log import Spans
from egeria_cache.store.disk.segment import Segment
from egeria_cache.store.fill import Batch, fill
from egeria_cache.store.records.keys import SampleId, decode_key, encode_keys
from egeria_cache.store.records.layout import CHECKSUM_BYTES, Head
from egeria_cache.store.records.record import open_record
from egeria_cache.store.records.values import RecordError
from egeria_cache.store.varied import fill_varied
from egeria_cache.threads import compute_on_one_core

__all__ = ["BatchReader", "Fetched"]

logger = logging.getLogger("egeria_cache.store")

T = TypeVar("T")

MIN_BYTES_PER_THREAD = 512 * 1024
"""Decoding less takes about as long as waking a thread."""

MANY_ODD = 0.25
"""Part of a batch's records. Where more have another shape than the first one had, they are not
looked for together any more."""


@dataclass(slots=True)
class Fetched:
    """What was read for one batch of B samples."""

    bare: bool
    fields: dict[str, Tensor | list[Any]]
    """Full B rows each; empty if nothing at all was found."""
    hit: npt.NDArray[np.bool_]
    """Shape (B,)."""
    num_corrupt: int = 0


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
        ids: Sequence[SampleId],
        variant: int,
        *,
        pin_memory: bool,
    ) -> Fetched:
        """Return the samples that are stored and intact; never raises for a bad record."""
        keys = encode_keys(ids, variant)
        nothing = np.zeros(len(keys), np.bool_)
        try:
            segment, spans = files.locate(ids, variant, keys)
        except GoneError:
            return Fetched(False, {}, nothing)
        template = files.template
        if template is None:
            template, corrupt = _find_template(files, segment, spans, keys)
            if template is None:
                return Fetched(False, {}, nothing, self._forget(files, corrupt))
        batch = Batch(*template, files.identity, len(keys), pin_memory, nothing)
        if files.is_varied:
            fields = fill_varied(segment, spans, keys, batch, self._spread)
        else:
            fill(segment, spans, keys, batch, self._spread)
            files.is_varied = len(batch.odd) > MANY_ODD * len(keys)
            fields = assemble(batch) if batch.columns else {}
        num_corrupt = self._forget(files, batch.corrupt)
        if not files.usable:  # became void while we were reading
            batch.hit[:] = False
        return Fetched(batch.head.layout.bare, fields, batch.hit, num_corrupt)

    # -- parts ------------------------------------------------------------------------------

    def _spread(self, work: Callable[[slice, Coder], T], count: int, num_bytes: int) -> list[T]:
        """Call `work` for parts of `range(count)`, in threads if so many bytes are worth it."""

        def call(part: tuple[int, int]) -> T:
            return work(slice(*part), self._coder())

        num_parts = max(1, min(self._num_threads, count, num_bytes // MIN_BYTES_PER_THREAD))
        ends = [count * part // num_parts for part in range(num_parts + 1)]
        mine, *others = itertools.pairwise(ends)
        futures = [self._threads().submit(call, part) for part in others]
        return [call(mine), *(future.result() for future in futures)]

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._num_threads, "egeria-decode", initializer=compute_on_one_core
                )
            return self._pool

    def _coder(self) -> Coder:
        coder: Coder | None = getattr(self._local, "coder", None)
        if coder is None:
            coder = self._local.coder = Coder()
        return coder

    def _forget(self, files: GenerationFiles, corrupt: list[tuple[bytes, str]]) -> int:
        """Note the damaged records; return how many were not known to be."""
        news = [(key, message) for key, message in corrupt if files.index.deny(key)]
        for key, message in news:
            self._report(files, key, message)
        return len(news)

    def _report(self, files: GenerationFiles, key: bytes, message: str) -> None:
        place = str(files.directory)
        if place not in self._warned:
            self._warned.add(place)
            logger.warning(
                "%s: the record of sample %r is damaged (%s); it is computed again. Further "
                "damaged records are counted in stats().corrupt; run cache-inspect verify",
                place, decode_key(key)[0], message,
            )  # fmt: skip


def _find_template(
    files: GenerationFiles, segment: Segment, spans: Spans, keys: Sequence[bytes]
) -> tuple[tuple[Head, memoryview] | None, list[tuple[bytes, str]]]:
    """Return the head of the first intact record among the keys', and note it for later batches;
    without one, what is wrong with each.
    """
    corrupt = []
    for key, (place, size) in zip(keys, spans.tolist(), strict=True):
        if not size:
            continue
        try:
            value = segment.record(place, size)
            head = open_record(key, value, files.identity).head
        except (RecordError, OSError) as error:
            corrupt.append((key, str(error)))
            continue
        files.template = head, memoryview(bytes(value[CHECKSUM_BYTES : head.num_bytes]))
        return files.template, []
    return None, corrupt
