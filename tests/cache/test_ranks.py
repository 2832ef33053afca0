"""Several ranks and one directory: each finds what any of them has stored, one epoch later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from egeria_cache import ActivationCache, EgeriaLoader, ShardAffineSampler
from tests.cache.test_auto import data, train
from tests.cache.test_filling import frozen_blocks
from tests.helpers.gloo import run_ranks
from tests.helpers.stored import stored_bytes

NUM_EPOCHS = 4


def worker(rank: int, directory: Path, own: bool, affine: bool) -> dict[str, Any]:
    world = dist.get_world_size()
    model = DistributedDataParallel(frozen_blocks())
    place = directory / (f"cache{rank}" if own else "cache")
    rates: list[float] = []
    with ActivationCache(model, place, "blocks.1", gate="always", audit_rate=0) as cache:
        dataset = data()
        make = ShardAffineSampler if affine else DistributedSampler
        sampler = make(dataset, world, rank, seed=1)
        loader = EgeriaLoader(dataset, batch_size=4, sampler=sampler, cache=cache, seed=0)
        seen = (0, 0)

        def each_epoch(epoch: int) -> None:
            nonlocal seen
            cache.flush()
            dist.barrier()
            sampler.set_epoch(epoch)
            hits, misses = cache.stats().hits, cache.stats().misses
            if epoch:
                rates.append((hits - seen[0]) / (hits + misses - sum(seen)))
            seen = hits, misses

        losses = train(model, loader, NUM_EPOCHS, each_epoch)
        each_epoch(NUM_EPOCHS)
        on_disk = stored_bytes(place)
    return {"rates": rates, "losses": losses, "weights": model.module.state_dict(), "disk": on_disk}


@pytest.mark.parametrize(
    ("num_ranks", "own", "affine"),
    [
        (2, False, False),
        pytest.param(2, False, True, marks=pytest.mark.long),
        pytest.param(2, True, True, marks=pytest.mark.long),
        pytest.param(4, False, False, marks=pytest.mark.long),
        pytest.param(4, True, True, marks=pytest.mark.long),
    ],
)
def test_every_layout_meant_for_it_hits_whole_from_the_second_epoch_on(
    tmp_path: Path, num_ranks: int, own: bool, affine: bool
) -> None:
    ranks = run_ranks(worker, num_ranks, tmp_path / "ranks", tmp_path, own, affine)
    for rank in ranks:
        assert rank["rates"] == [0, 1, 1, 1]
        for name, value in rank["weights"].items():
            if "running" not in name and "num_batches" not in name:  # DDP: rank 0's, at forwards
                assert torch.equal(value, ranks[0]["weights"][name])
    alone = one_process(tmp_path / "alone")
    on_disk = ranks[0]["disk"] if not own else sum(rank["disk"] for rank in ranks)
    assert on_disk <= 1.05 * alone


def one_process(directory: Path) -> int:
    """Bytes of all records where one process stores them."""
    model = frozen_blocks()
    with ActivationCache(model, directory, "blocks.1", gate="always") as cache:
        train(model, EgeriaLoader(data(), batch_size=4, cache=cache, seed=0), 1)
        cache.flush()
        return stored_bytes(directory)
