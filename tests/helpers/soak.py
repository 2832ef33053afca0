"""Steps of a training's store, for as long as asked: reads, writes, moves, voids, evictions.

python -m tests.helpers.soak DIRECTORY NUM_STEPS SEED: prints a JSON list of what the process held
(memory in MB, descriptors, threads) at each tenth, and what was wrong.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys

import psutil
import torch

from egeria_cache.store import ActivationStore

LIMIT_BYTES = 3_000_000
NUM_BOUNDARIES, NUM_SAMPLES, WIDTH = 5, 400, 800


def truth(boundary: int, ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.float32)[:, None] + 1000 * boundary + torch.arange(WIDTH)


def held() -> dict[str, float]:
    process = psutil.Process()
    return {
        "memory_mb": process.memory_info().rss / 1e6,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }


def run(directory: str, num_steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rng, wrong, hits, measured = random.Random(seed), [], 0, []
    with ActivationStore(directory, LIMIT_BYTES, codec="raw") as store:
        boundary, generation = 0, store.open_generation({"boundary": 0})
        for step in range(num_steps):
            if step % max(num_steps // 10, 1) == 0:
                measured.append(held())
            ids = rng.sample(range(NUM_SAMPLES), 8)
            got, hit = generation.get_batch(ids)
            want = truth(boundary, ids)
            if hit.any() and not torch.equal(got[torch.from_numpy(hit)], want[hit.tolist()]):
                wrong.append((step, ids))
            hits += int(hit.sum())
            generation.put_batch(ids, want)
            if rng.random() < 0.01:
                if rng.random() < 0.3:
                    generation.void("unfrozen")
                else:
                    generation.release()
                boundary = rng.randrange(NUM_BOUNDARIES)
                generation = store.open_generation({"boundary": boundary})
            if rng.random() < 0.01:
                with store._budget.locked():  # else what goes counts with what takes its place
                    if (used := store.stats().bytes_on_disk) > LIMIT_BYTES:
                        wrong.append((step, f"the limit is exceeded: {used}"))
        store.flush(60)
        measured.append(held())
        stats = store.stats()
    report = {"hits": hits, "writes": stats.writes, "corrupt": stats.corrupt, "wrong": wrong}
    print(json.dumps({**report, "measured": measured, "process": os.getpid()}))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
