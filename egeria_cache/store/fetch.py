"""Records from the disk to memory, verified, one by one: without the kernel, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from egeria_cache.store.codecs.gather import Bytes, Places
from egeria_cache.store.disk.index import Located
from egeria_cache.store.disk.log import Spans
from egeria_cache.store.disk.segment import Segment
from egeria_cache.store.records.keys import Keys
from egeria_cache.store.records.layout import CHECKSUM, CHECKSUM_BYTES, Head

__all__ = ["Rows", "Wanted", "fetch_records", "fetch_rows"]

Found = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The records of one batch of B samples."""

    segment: Segment
    """What they are read from."""
    keys: Keys
    located: Located
    identity: int
    """Of the generation; part of every checksum."""
    written: int
    """When the file was written to, as far as it was known before they were located."""

    @property
    def spans(self) -> Spans:
        """Shape (B, 2): where each record begins and how long it is; 0 if it is absent."""
        return self.located.spans


def fetch_rows(
    wanted: Wanted, rows: Rows, head: Head, head_bytes: memoryview, targets: Sequence[Bytes]
) -> Found:
    """Read records of raw tensors, all behind the same head, to where the tensors belong.

    Plain loops: in training the processor has forgotten this code from one batch to the next,
    and each NumPy function that it must fetch again takes as long as several records here. The seed
    of the checksum has the head that all should have, so that no record with another passes.

    Args:
        wanted: The batch.
        rows: Which of it.
        head: What all of them should have.
        head_bytes: The same as stored, behind the checksum.
        targets: Per tensor its bytes, shape (B, bytes).

    Returns:
        Which of the rows were read and are intact, shape (rows,).
    """
    size, head_seed, first_bytes = (
        head.record_bytes,
        head.seed ^ wanted.identity,
        bytearray(head.num_bytes),
    )
    behind_checksum = memoryview(first_bytes)[CHECKSUM_BYTES:]
    keys, read = wanted.keys, wanted.segment.read
    digest, checksum_of = xxhash.xxh3_64_intdigest, CHECKSUM.unpack_from
    # Slices of memory views: as a buffer, a row of an array takes longer than the rest.
    (flat, width), *more = [(target.reshape(-1).data, target.shape[1]) for target in targets]
    found = []
    for row, (place, stored) in zip(rows.tolist(), wanted.spans[rows].tolist(), strict=True):
        first = flat[row * width : (row + 1) * width]
        others = [one[row * wide : (row + 1) * wide] for one, wide in more] if more else ()
        intact = False
        try:
            if stored == size and read((first_bytes, first, *others), place) == size:
                seed = head_seed ^ digest(keys[row])  # payload_seed()
                made = _digest(first, others, seed) if others else digest(first, seed)
                intact = made == checksum_of(first_bytes)[0] and behind_checksum == head_bytes
        except OSError:  # a bad sector: of this record alone
            pass
        found.append(intact)
    return np.array(found, np.bool_)


def _digest(first: memoryview, others: Sequence[memoryview], seed: int) -> int:
    payload = xxhash.xxh3_64(first, seed)
    for one in others:
        payload.update(one)
    return payload.intdigest()


def fetch_records(wanted: Wanted, rows: Rows, starts: Places, out: Bytes, head_bytes: int) -> Found:
    """Read records as a whole.

    Args:
        wanted: The batch.
        rows: Which of it; their sizes are bounded already.
        starts: Where in `out` each goes.
        out: Bytes, 1-d.
        head_bytes: Length of the head that is expected.

    Returns:
        Which were read and are intact, and have a head of that length, shape (rows,).
    """
    view, keys, identity = out.data, wanted.keys, wanted.identity
    segment, digest, checksum_of = wanted.segment, xxhash.xxh3_64_intdigest, CHECKSUM.unpack_from
    found = []
    for row, start, (place, size) in zip(
        rows.tolist(), starts.tolist(), wanted.spans[rows].tolist(), strict=True
    ):
        record = view[start : start + size]
        intact = size >= head_bytes and segment.try_read(record, place) == size
        if intact:  # see payload_seed()
            seed = digest(record[CHECKSUM_BYTES:head_bytes]) ^ digest(keys[row]) ^ identity
            intact = digest(record[head_bytes:], seed) == checksum_of(record)[0]
        found.append(intact)
    return np.array(found, np.bool_)
