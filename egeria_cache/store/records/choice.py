"""Which codec suits a generation: tried on its first records, by their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from egeria_cache.store.codecs.codec import Codec, Coder
from egeria_cache.store.codecs.lossy import Storage
from egeria_cache.store.native import kernel
from egeria_cache.store.records.record import Rows, encode_rows

__all__ = ["choose_codec"]

NUM_RECORDS = 16
MIN_SAVING = 0.05
"""A codec that saves less than this part of the raw bytes is not worth its decoding."""
SAME_BYTES = 0.03
"""Within this margin of the smallest, the codec that decodes fastest is taken."""
FASTEST = (Codec.SPLIT, Codec.BITMAP, Codec.ZSTD)
"""To decode. What the clock said of a few records beside a training changed from run to run."""


def choose_codec(
    keys: Sequence[bytes], picked: Sequence[int], rows: Rows, coder: Coder, storage: Storage = None
) -> tuple[Codec, str]:
    """Return the codec for these records, and what each made of them in words.

    Smallest wins; among equals the fastest to decode; raw unless something is saved.
    """
    sizes = {}
    for codec in Codec if kernel() is not None else (Codec.RAW, Codec.ZSTD):
        records = encode_rows(keys, picked[:NUM_RECORDS], rows, codec, coder, storage)
        sizes[codec] = int(records.sizes.sum())
    best, least = Codec.RAW, min(sizes.values())
    if least <= (1 - MIN_SAVING) * sizes[best]:
        small = [codec for codec, size in sizes.items() if size <= (1 + SAME_BYTES) * least]
        best = next((codec for codec in FASTEST if codec in small), small[0])
    return best, ", ".join(f"{codec.label} {size} B" for codec, size in sizes.items())
