"""Rows of a few bytes, and many of them: what they take on disk, and what opening them takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
import numpy as np
import torch

from egeria_cache.store import ActivationStore

from .contestants import BATCH, FIELDS, OFFER_AGAIN_S, Ids

__all__ = ["measure_open", "measure_small"]

ROW_BYTES = 64, 256, 512, 2048
GROUP = 1 << 19
"""Samples that are stored at once where only their number matters."""


def measure_small(place: Path, counts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return bytes of the file per byte of its records, as batches leave it, and of a copy without
    free pages, which is what its tree takes at least.
    """
    rng, found = np.random.default_rng(0), {}
    for count in counts:
        orders = {"in order": np.arange(count), "shuffled": rng.permutation(count)}
        for row_bytes in ROW_BYTES if count == counts[0] else ROW_BYTES[:2]:
            for order, ids in orders.items():
                with TemporaryDirectory(dir=place) as directory:
                    name = f"{count:,} rows of {row_bytes} B, {order}"
                    found[name] = _sizes(Path(directory), ids, row_bytes)
    return found


def _sizes(directory: Path, ids: Ids, row_bytes: int) -> dict[str, float]:
    with ActivationStore(directory, codec="raw") as store:
        stored = store.open_generation(FIELDS)
        for start in range(0, len(ids), BATCH):
            some = ids[start : start + BATCH]
            rows = torch.zeros(len(some), row_bytes, dtype=torch.uint8)
            while not stored.put_batch(some, {"x": rows}):  # type: ignore[arg-type]
                time.sleep(OFFER_AGAIN_S)
        assert store.flush()
        records = store.stats().stored_bytes
    (path,) = directory.glob("gen-*")
    copied = directory / "copied"
    copied.mkdir()
    with lmdb.open(str(path), readonly=True, max_dbs=3) as environment:
        environment.copy(str(copied), compact=True)
    sizes = [(one / "data.mdb").stat().st_size / records for one in (path, copied)]
    return dict(zip(("file", "without free pages"), sizes, strict=True))


def measure_open(place: Path, count: int) -> dict[str, float]:
    """Return seconds, and bytes of memory a sample, of opening so many samples named by texts that
    were stored in shuffled order, and of the first look-up; in a process of its own.
    """
    numbers = np.random.default_rng(0).permutation(count)
    with TemporaryDirectory(dir=place) as directory:
        for name, some in (("one", numbers[:1]), ("all", numbers)):
            with ActivationStore(Path(directory, name), codec="raw") as store:
                stored = store.open_generation(FIELDS)
                for start in range(0, len(some), GROUP):
                    ids = [f"sample-{one:09}" for one in some[start : start + GROUP].tolist()]
                    assert stored.put_batch(ids, {"x": torch.zeros(len(ids), 4)})
                    assert store.flush()
        command = [sys.executable, "-c", OPENING, directory, f"sample-{numbers[0]:09}"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    open_s, taken, num_samples = json.loads(said)
    assert num_samples == count
    return {"samples": count, "open_s": open_s, "memory_bytes_a_sample": max(taken, 0) / count}


OPENING = """
import json, sys, time
import psutil
from egeria_cache.store import ActivationStore

directory, known = sys.argv[1:]
for name in ("one", "all"):  # the first one loads what is used for the first time
    before, started_s = psutil.Process().memory_info().rss, time.perf_counter()
    with ActivationStore(f"{directory}/{name}") as store:
        stored = store.open_generation({"use": "benchmark"})
        assert stored.contains([known, "none"]).tolist() == [True, False]
        open_s = time.perf_counter() - started_s
        taken = psutil.Process().memory_info().rss - before
        num_samples = store.stats().num_samples
print(json.dumps([open_s, taken, num_samples]))
"""
