"""Reads with nothing in memory: what the disk gives, beside threads that only read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Round, in_turns

from .contestants import BATCH, Contestant, Egeria, EgeriaRaw, Ids, Memmap

__all__ = ["measure_cold"]

NUM_THREADS = 16
PLAIN = f"pread, {NUM_THREADS} threads"
ENTERED = (Egeria.name, EgeriaRaw.name, Memmap.name)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def measure_cold(
    entered: Sequence[Contestant], place: Path, num_rounds: int
) -> dict[str, float] | None:
    """Return GB/s of rows per contestant: random batches, each the first one after opening, with
    the machine's page cache emptied before; None where it cannot be, which only root may, or with
    too few rounds to be worth that. What the disk itself or its host remembers stays.
    """
    if num_rounds < 2 or not os.access(DROP_CACHES, os.W_OK):
        return None
    chosen = [one for one in entered if one.name in ENTERED]
    memmap = next(one for one in chosen if one.name == Memmap.name)
    path, size = memmap.directory / "rows.bin", memmap.row_bytes
    rng = np.random.default_rng(1)
    with ThreadPoolExecutor(NUM_THREADS) as pool:

        def plain(ids: Ids) -> None:
            descriptor = os.open(path, os.O_RDONLY)
            list(pool.map(lambda row: os.pread(descriptor, size, row * size), ids.tolist()))
            os.close(descriptor)

        def rounds() -> Iterator[Round]:
            for _ in range(num_rounds):
                for one in chosen:
                    one.close()  # nor does a mapping keep anything
                    empty_page_cache(place)
                    one.open()
                    yield {one.name: partial(one.read, rng.permutation(one.num_samples)[:BATCH])}
                for other in chosen:
                    other.close()
                empty_page_cache(place)
                yield {PLAIN: partial(plain, rng.permutation(memmap.num_samples)[:BATCH])}
                for other in chosen:
                    other.open()

        times = in_turns(rounds()).wall
    return {name: BATCH * size / times.median(name) / 1e9 for name in times}


def empty_page_cache(place: Path) -> None:
    """Let go of what memory holds of the files below."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.close(descriptor)
    DROP_CACHES.write_text("1")
