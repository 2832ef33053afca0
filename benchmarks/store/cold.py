"""Reads with nothing in memory: what the disk gives, beside threads that only read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Round, in_turns

from .contestants import BATCH, Contestant, Egeria, EgeriaRaw, Ids, Memmap

__all__ = ["measure_cold"]

NUM_THREADS = 16
PLAIN = f"pread, {NUM_THREADS} threads"
ENTERED = (Egeria.name, EgeriaRaw.name, Memmap.name)


def measure_cold(entered: Sequence[Contestant], place: Path, num_rounds: int) -> dict[str, Any]:
    """Return GB/s of rows per contestant, random batches, with the page cache emptied before each.

    Only this process's own files are dropped, with `posix_fadvise`; where the system keeps them all
    the same, or the disk has a cache of its own, the figures are of that.
    """
    chosen = [one for one in entered if one.name in ENTERED]
    memmap = next(one for one in chosen if one.name == Memmap.name)
    path, size = memmap.directory / "rows.bin", memmap.row_bytes
    descriptor = os.open(path, os.O_RDONLY)
    rng = np.random.default_rng(1)
    with ThreadPoolExecutor(NUM_THREADS) as pool:

        def plain(ids: Ids) -> None:
            def read(row: int) -> bytes:
                return os.pread(descriptor, size, row * size)

            list(pool.map(read, ids.tolist()))

        def rounds() -> Iterator[Round]:
            uses: dict[str, Any] = {one.name: one.read for one in chosen} | {PLAIN: plain}
            for _ in range(max(num_rounds, 2)):
                for name, use in uses.items():
                    empty_page_cache(place)
                    yield {name: partial(use, rng.permutation(memmap.num_samples)[:BATCH])}

        times = in_turns(rounds()).wall
    os.close(descriptor)
    return {name: BATCH * size / times.median(name) / 1e9 for name in times}


def empty_page_cache(place: Path) -> None:
    """Let go of what memory holds of the files below, as far as the system does that."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
