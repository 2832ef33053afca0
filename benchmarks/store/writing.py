"""What a user gets who stores beside training: durable writes, and what they cost.

The store with its own settings, a queue that may fill, and batches that are offered again when it
has; beside LMDB that commits the same batches one after another.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Round, in_turns

from .contestants import BareLmdb, EgeriaRaw, LmdbHash

__all__ = ["measure_writing"]

TIMES = 4
"""So often are the rows written, as other samples: making a generation is not what is measured."""


def measure_writing(rows: Tensor, place: Path, num_pairs: int) -> dict[str, float]:
    """Return how writing compares with bare LMDB, raw, in alternating pairs.

    Returns:
        Of each pair bare LMDB's time over ours, the median, the least and the most, and over that
        of LMDB commits of rows that were hashed; the processor seconds per gigabyte of both, all
        threads; and what a put that was taken costs the thread that calls it, in microseconds. The
        first pair warms up: the allocator, and the disk's journal.
    """
    put_s: list[float] = []
    rows = torch.cat([rows] * TIMES)

    def rounds() -> Iterator[Round]:
        for _ in range(num_pairs + 1):
            with (
                tempfile.TemporaryDirectory(dir=place) as lmdb,
                tempfile.TemporaryDirectory(dir=place) as hashed,
                tempfile.TemporaryDirectory(dir=place) as own,
            ):
                ours = EgeriaRaw(Path(own), rows)
                pair = BareLmdb(Path(lmdb), rows), ours, LmdbHash(Path(hashed), rows)
                os.sync()  # neither pays for what was written before
                yield {one.name: partial(one.write, rows) for one in pair}
                put_s.extend(ours.put_s)
                check_all_stored(ours)

    turns = in_turns(rounds(), warm_up=1)
    ratios = [
        bare / own
        for bare, own in zip(turns.wall[BareLmdb.name], turns.wall[EgeriaRaw.name], strict=True)
    ]
    gigabytes = rows.nbytes / 1e9
    return {
        "write_ratio_to_bare_lmdb": statistics.median(ratios),
        "write_ratio_to_bare_lmdb_least": min(ratios),
        "write_ratio_to_bare_lmdb_most": max(ratios),
        "write_ratio_of_hashed_lmdb": turns.wall.ratio(BareLmdb.name, LmdbHash.name),
        "write_cpu_s_per_gb": turns.work.median(EgeriaRaw.name) / gigabytes,
        "write_cpu_s_per_gb_of_bare_lmdb": turns.work.median(BareLmdb.name) / gigabytes,
        "put_batch_thread_us": 1e6 * statistics.median(put_s),
    }


def check_all_stored(one: EgeriaRaw) -> None:
    """Refuse figures of a writer that dropped something."""
    one.open()
    missing = one.num_samples - int(one.stored.contains(range(one.num_samples)).sum())
    one.close()
    if missing:
        raise AssertionError(f"{missing} of {one.num_samples} records were not stored")
