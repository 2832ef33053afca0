"""A batch of sample IDs -> one contiguous tensor per name. No state but the threads; any number of
callers at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from egeria_cache.store.assemble import assemble
from egeria_cache.store.decoders import Decoders
from egeria_cache.store.disk.files import GenerationFiles, GoneError
from egeria_cache.store.fetch import Wanted
from egeria_cache.store.fill import Batch, fill
from egeria_cache.store.helpers import Helpers
from egeria_cache.store.records.keys import Keys, SampleId, decode_key, plain_integers
from egeria_cache.store.records.layout import CHECKSUM_BYTES, Head
from egeria_cache.store.records.record import open_record
from egeria_cache.store.records.values import RecordError
from egeria_cache.store.serve import NUM_TURNS, Course, serve
from egeria_cache.store.varied import fill_varied

__all__ = ["BatchReader", "Fetched", "NotInMemoryError"]

logger = logging.getLogger("egeria_cache.store")

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
    num_hits: int = 0
    num_corrupt: int = 0


class NotInMemoryError(Exception):
    """A batch was to be read without waiting for a disk."""


class BatchReader:
    """Owns the helpers and the decoding threads."""

    def __init__(self, num_threads: int, *, verifies_always: bool = False) -> None:
        self._decoders, self._helpers = Decoders(num_threads), Helpers(num_threads - 1)
        self._verifies_always = verifies_always
        self._warned: set[str] = set()

    def close(self) -> None:
        """Join the threads."""
        self._decoders.close()
        self._helpers.close()

    def read(
        self,
        files: GenerationFiles,
        ids: Sequence[SampleId],
        variant: int,
        pin_memory: bool,
        in_memory: bool,
    ) -> Fetched:
        """Return the samples that are stored and intact; never raises for a bad record.

        Raises:
            NotInMemoryError: `in_memory`, and the short way does not lead to all of it.
        """
        begun, numbers = None, plain_integers(ids)
        turn = None if self._verifies_always else files.turn(len(ids)) % NUM_TURNS
        try:
            course: Course | None = files.course
            if course is None or not course.holds(variant):
                course = self._course(files, variant)
            if course is not None and numbers is not None:
                begun = course.serve(numbers, turn, self._decoders, pin_memory)
                if begun.num_news and begun.is_begun and turn is not None:
                    begun.note(files, Keys(ids, variant))
                if begun.num_news > 0:
                    course.take_back(begun)
                if begun.num_news >= 0 and files.reason_stopped is None:
                    hit = np.empty(len(ids), np.bool_)
                    hit.fill(True)
                    return Fetched(course.bare, course.fields(begun.columns), hit, len(ids))
            if in_memory:
                raise NotInMemoryError
            segment, keys, written = files.check(), Keys(ids, variant), files.written
            wanted = Wanted(segment, keys, files.locate(keys), files.identity, written)
        except GoneError:
            return Fetched(False, {}, np.zeros(len(ids), np.bool_))
        nothing = np.zeros(len(keys), np.bool_)
        # Another thread may note another head meanwhile: what was begun goes on with its own.
        template = files.template if course is None else course.template
        if template is None:
            template, corrupt = _find_template(files, wanted)
            if template is None:
                return Fetched(False, {}, nothing, 0, self._forget(files, corrupt))
        batch = Batch(*template, len(keys), pin_memory, nothing)
        if files.is_varied:
            fields = fill_varied(wanted, batch, self._decoders)
        else:
            if course is not None and begun is not None and begun.is_begun:
                begun.hand_over(batch)
                course.take_back(begun)
            serve(files, wanted, batch, self._decoders.coder, self._helpers, turn)
            if not batch.hit.all():
                fill(wanted, batch, self._decoders)
            if len(batch.odd) > MANY_ODD * len(keys):
                files.is_varied, files.course = True, None
            fields = assemble(batch) if batch.columns else {}
        num_corrupt = self._forget(files, batch.corrupt)
        if not files.usable:  # became void while we were reading
            batch.hit[:] = False
        num_hits = int(np.count_nonzero(batch.hit))
        return Fetched(batch.head.layout.bare, fields, batch.hit, num_hits, num_corrupt)

    # -- parts ------------------------------------------------------------------------------

    def _course(self, files: GenerationFiles, variant: int) -> Course | None:
        """Return a new short way, if there is one."""
        if files.is_varied or files.template is None:
            return None
        course = files.course = Course.of(files, files.check(), variant, self._helpers)
        if not files.usable:  # released by now: nothing may keep the file's space
            files.course = None
        return course

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
    files: GenerationFiles, wanted: Wanted
) -> tuple[tuple[Head, memoryview] | None, list[tuple[bytes, str]]]:
    """Return the head of the first intact record of the batch, and note it for later batches;
    without one, what is wrong with each.
    """
    corrupt = []
    for key, (place, size) in zip(wanted.keys, wanted.spans.tolist(), strict=True):
        if not size:
            continue
        try:
            value = wanted.segment.record(place, size)
            head = open_record(key, value, files.identity).head
        except (RecordError, OSError) as error:
            corrupt.append((key, str(error)))
            continue
        files.template = head, memoryview(bytes(value[CHECKSUM_BYTES : head.num_bytes]))
        return files.template, []
    return None, corrupt
