"""Which codec suits a generation: tried on its first records, by bytes and by decode time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from egeria_cache.store.codecs.codec import Codec, Coder
from egeria_cache.store.codecs.lossy import Storage
from egeria_cache.store.native import kernel
from egeria_cache.store.records.record import Encoded, Rows, encode_rows, open_record

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
        for codec in (Codec if kernel() is not None else (Codec.RAW, Codec.ZSTD))
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


def _try(
    codec: Codec, encoded: Sequence[Encoded], coder: Coder, clock: Callable[[], float]
) -> Trial:
    """Decode records one by one, as many times as it takes to know how long that takes."""
    records = [open_record(key, value, part.layout) for part in encoded for key, value in part]
    num_bytes = sum(int(part.sizes.sum()) for part in encoded)
    outs = [[np.empty(max(size, 0), np.uint8) for _, size in record.shapes] for record in records]
    times_s = []
    for _ in range(3):
        start_s = clock()
        for record, rows in zip(records, outs, strict=True):
            for position, out in enumerate(rows):
                if record.layout.fields[position].dtype is not None:
                    record.decode_into(position, coder, out)
        times_s.append(clock() - start_s)
    return Trial(codec, num_bytes, min(times_s))
