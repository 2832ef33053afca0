"""Which codec suits a generation: tried on its first records, by bytes and by decode time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from egeria_cache.store.codecs.codec import Codec, Coder, Elements, Fields
from egeria_cache.store.codecs.gather import Source
from egeria_cache.store.codecs.lossy import Storage
from egeria_cache.store.records.encoded import Encoded
from egeria_cache.store.records.layout import parse_head
from egeria_cache.store.records.record import Rows, encode_rows

__all__ = ["Trial", "choose_codec"]

NUM_RECORDS = 16
MIN_SAVING = 0.05
"""A codec that saves less than this part of the raw bytes is not worth its decoding."""
SAME_BYTES = 0.03
"""Within this margin of the smallest, the codec that decodes fastest is taken."""
MIN_DECODE_BYTES_PER_S = 50e6
"""Of decoded bytes, on one core: what is slower could not keep a training step fed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One codec on the first records."""

    codec: Codec
    num_bytes: int
    decode_s: float

    def __str__(self) -> str:
        return f"{self.codec.label} {self.num_bytes} B {1e6 * self.decode_s:.0f} us"


def choose_codec(
    keys: Sequence[bytes],
    picked: Sequence[int],
    rows: Rows,
    coder: Coder,
    storage: Storage = None,
    clock: Callable[[], float] = time.thread_time,
) -> tuple[Codec, str]:
    """Return the codec for these records, and all trials in words.

    Smallest wins; among equals the fastest to decode; raw unless something is saved. The clock is
    that of this thread's own work: what else the machine does must not decide.
    """
    chosen = picked[:NUM_RECORDS]
    trials = [
        _try(codec, encode_rows(keys, chosen, rows, codec, coder, storage), coder, clock)
        for codec in Codec
    ]
    raw = trials[0]
    slowest_s = raw.num_bytes / MIN_DECODE_BYTES_PER_S
    useful = [
        trial
        for trial in trials[1:]
        if trial.num_bytes <= (1 - MIN_SAVING) * raw.num_bytes and trial.decode_s <= slowest_s
    ]
    least = min((trial.num_bytes for trial in useful), default=0)
    best = min(
        (trial for trial in useful if trial.num_bytes <= (1 + SAME_BYTES) * least),
        key=lambda trial: trial.decode_s,
        default=raw,
    )
    return best.codec, ", ".join(map(str, trials))


def _try(codec: Codec, encoded: Encoded, coder: Coder, clock: Callable[[], float]) -> Trial:
    """Decode as a batch is read: the fields of one size and codec together."""
    values = [bytes(value) for _, value in encoded]
    source = Source.of(b"".join(values))
    groups: dict[tuple[int, int, Elements], list[tuple[int, int]]] = {}
    at = 0
    for value in values:
        head = parse_head(memoryview(value))
        start = at + head.num_bytes
        for field, (used, size) in zip(head.layout.fields, head.stored, strict=True):
            if field.dtype is not None:
                key = (used, field.num_bytes, field.elements)
                groups.setdefault(key, []).append((start, size))
            start += size
        at += len(value)
    batches = [(key, *np.array(places, np.int64).T) for key, places in groups.items()]
    times_s = []
    for _ in range(3):
        start_s = clock()
        for (used, num_bytes, elements), starts, sizes in batches:
            out = np.empty((len(starts), num_bytes), np.uint8)
            fields = Fields(source, starts, sizes, used, elements)
            coder.decode_many(fields, out, np.arange(len(fields)))
        times_s.append(clock() - start_s)
    return Trial(codec, sum(map(len, values)), min(times_s))
