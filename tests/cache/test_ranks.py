"""Several ranks and one directory: each finds what any of them has stored, one epoch later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from egeria_cache import (
    ActivationCache,
    BoundaryError,
    EgeriaLoader,
    FrozenFront,
    ShardAffineSampler,
)
from egeria_cache.samples.fingerprint import NUM_AGAIN
from tests.cache.test_auto import data, frozen_blocks, train
from tests.helpers.gloo import run_ranks
from tests.helpers.steps import take_step
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


# A model that tensor parallelism cuts trains as without a cache, and says so, by name.


def build(num_ranks: int, sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    shape = (2, num_ranks // 2) if sharded else (1, num_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    model[0].requires_grad_(False)
    if sharded:
        fully_shard(model, mesh=mesh["data"])
    return model


def run(rank: int, directory: Path, num_ranks: int, sharded: bool, boundary: str | None) -> Any:
    model = build(num_ranks, sharded)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 8, generator=draw), torch.arange(16) % 4)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, foreach=False)
    path = directory / f"{boundary}-{rank}"
    with ActivationCache(model, path, boundary, gate="always") as cache:
        loader = EgeriaLoader(data, 4, cache=cache, seed=3)
        batches = (batch for _ in range(2) for batch in loader)
        losses = [take_step(F.cross_entropy(model(x), y), optimizer).item() for x, y in batches]
        return losses, cache.stats().hits, cache.stats().why_not


def told(rank: int, directory: Path, num_ranks: int, sharded: bool) -> Any:
    ways = (None, "auto", "0")
    plain, *found = (run(rank, directory, num_ranks, sharded, name) for name in ways)
    assert [each[:2] for each in found] == [(plain[0], 0)] * 2
    return [each[2] for each in found]


@pytest.mark.parametrize(
    ("num_ranks", "sharded"), [(2, False), pytest.param(4, True, marks=pytest.mark.long)]
)
def test_it_is_computed_and_told_by_name(tmp_path, num_ranks, sharded):
    for messages in run_ranks(told, num_ranks, tmp_path / "r", tmp_path, num_ranks, sharded):
        for message in messages:
            assert "'1.weight' is cut by tensor parallelism" in message
            assert "FrozenFront" in message


# A frozen front of its own: served as in a whole model, beside blocks of other ranks.

NUM = 24


class Numbers(Dataset[tuple[Tensor, int]]):
    """Counts what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.loaded.append(index)
        return torch.linspace(-1, 1, 6) * index, index


def make_blocks(num_here: int) -> list[nn.Sequential]:
    """Four blocks; those behind the first `num_here` lie on another rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return [block if i < num_here else block.to("meta") for i, block in enumerate(blocks)]


def freeze(front: FrozenFront, blocks: list[nn.Sequential], depth: int) -> None:
    for index, block in enumerate(blocks):
        block.requires_grad_(index >= depth)
    front.freeze(depth)


@pytest.mark.parametrize("num_here", [2, 4])
def test_rows_are_those_of_the_blocks_and_are_computed_once(directory: Path, num_here: int) -> None:
    blocks, data = make_blocks(num_here), Numbers()
    front = FrozenFront(blocks, directory)
    assert front.cache is not None
    loader = EgeriaLoader(data, 6, shuffle=True, cache=front.cache, reuse=None)
    expected = torch.stack([torch.linspace(-1, 1, 6) * i for i in range(NUM)])
    # What was stored at the first boundary is where the second one's rows are computed from.
    for depth, hits, most_loaded in [
        (0, 0, NUM), (1, 0, 4 * NUM), (1, NUM, 0), (2, NUM - 6, 11), (2, NUM, 0), (0, 0, NUM),
    ]:  # fmt: skip
        freeze(front, blocks, depth)
        with torch.no_grad():
            wanted = nn.Sequential(*blocks[:depth])(expected)
        front.cache.flush()
        before, data.loaded[:] = front.cache.stats(), []
        for rows, targets in loader:
            output, numbers = front.plain(front(rows)), front.plain(targets)
            assert type(output) is Tensor
            assert type(numbers) is Tensor
            torch.testing.assert_close(output, wanted[numbers], rtol=1e-6, atol=1e-6)
        after = front.cache.stats()
        assert after.hits - before.hits == hits
        # How many audits and looks at the data set, where a pass begins and where it ends, there
        # are depends on the time they take.
        assert len(data.loaded) <= most_loaded + after.audited - before.audited + 2 * NUM_AGAIN
    front.close()


def test_what_cannot_be_a_front_is_refused_by_name() -> None:
    blocks = make_blocks(2)
    front = FrozenFront(blocks)
    with pytest.raises(BoundaryError, match=r"'0\.0\.weight' .* is trainable"):
        front.freeze(1)
    for block in blocks:
        block.requires_grad_(False)
    with pytest.raises(BoundaryError, match=r"'2\.0\.weight' .* is not on this rank"):
        front.freeze(3)
    with pytest.raises(ValueError, match=r"depth must be in \[0, 4\], got 5"):
        front.freeze(5)
    assert front.depth == 0
