"""`fully_shard` and a cache: the same losses as one process, and a front out of all collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, BoundaryMoved, EgeriaLoader, ShardAffineSampler
from egeria_core import FreezeController, StaticPolicy
from tests.helpers.gloo import run_ranks
from tests.helpers.sharded import Block, Blocks, CountBytes, dataset, freeze, shard, train

SCHEDULE = {4: "blocks.0", 9: "blocks.1", 18: None, 20: "blocks.1"}
EPOCHS = 8
LAYERS = r"stem|blocks\.\d|head"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


def epochs(
    number: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    sampler: Any,
    cache: Any = None,
    *,
    before: Callable[[int], None] = lambda epoch: None,
    after: Callable[[Tensor], None] = lambda loss: None,
) -> list[float]:
    """Train; call `before` with each epoch, and `after` with each loss."""
    losses: list[float] = []
    for epoch in range(number):
        before(epoch)
        sampler.set_epoch(epoch)
        losses += train(model, optimizer, loader, after)
        if cache is not None:
            cache.flush()
    return losses


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, sampler: Any, cache: Any = None
) -> list[float]:
    """Train through freeze, move, unfreeze, freeze."""
    controller = FreezeController(
        model, optimizer, cache, policy=StaticPolicy(SCHEDULE), layers=LAYERS
    )
    losses = epochs(EPOCHS, model, optimizer, loader, sampler, cache, after=controller.step)
    controller.close()
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


def samples(cache: Any = None) -> tuple[Any, Any]:
    """A rank's loader and its sampler; without a cache those of one process."""
    if cache is None:
        sampler = ShardAffineSampler(dataset(), 1, 0, num_shards=4, seed=1)
        return DataLoader(dataset(), 8, sampler=sampler), sampler
    world = dist.get_world_size()
    sampler = ShardAffineSampler(dataset(), world, dist.get_rank(), num_shards=4, seed=1)
    return EgeriaLoader(dataset(), 8 // world, sampler=sampler, cache=cache, seed=0), sampler


def assert_mean(found: list[list[float]], expected: list[float]) -> None:
    """Of the ranks' losses."""
    mean = torch.tensor(found).mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def through_freezes(rank: int, directory: Path, kind: str, how: str) -> dict[str, Any]:
    model: Any = shard(Blocks()) if how == "fsdp" else DistributedDataParallel(Blocks())
    optimizer = OPTIMIZERS[kind](model.parameters())
    parameters = list(model.parameters())
    with ActivationCache(model, directory, gate="always", audit_rate=0) as cache:
        losses = run(model, optimizer, *samples(cache), cache)
        stats = cache.stats()
        same = all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    weights = {name.removeprefix("module."): value for name, value in whole(model).items()}
    return {"losses": losses, "weights": weights, "hits": stats.hits, "same": same}


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("num_ranks", "kind", "how"),
    [
        (2, "adamw", "fsdp"),
        (2, "sgd", "ddp"),
        pytest.param(2, "sgd", "fsdp", marks=LONG),
        pytest.param(4, "sgd", "fsdp", marks=LONG),
        pytest.param(4, "adamw", "fsdp", marks=LONG),
        pytest.param(2, "adamw", "ddp", marks=LONG),
        pytest.param(4, "sgd", "ddp", marks=LONG),
        pytest.param(4, "adamw", "ddp", marks=LONG),
    ],
)
def test_losses_and_weights_equal_one_process_through_freeze_move_and_unfreeze(
    tmp_path: Path, num_ranks: int, kind: str, how: str
) -> None:
    ranks = run_ranks(through_freezes, num_ranks, tmp_path / "ranks", tmp_path / "cache", kind, how)
    model = Blocks()
    expected = run(model, OPTIMIZERS[kind](model.parameters()), *samples())
    assert_mean([rank["losses"] for rank in ranks], expected)
    for rank in ranks:
        assert rank["hits"] >= 32 // num_ranks * 2
        assert rank["same"], "the very parameters that the optimizer has stand in the model"
        for name, value in whole(model).items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=1e-5, atol=1e-5)


# ---- one launch for what follows -----------------------------------------------------------------


class Active(nn.Module):
    """What is left of `Blocks` behind the boundary."""

    def __init__(self, model: Blocks) -> None:
        super().__init__()
        self.blocks, self.head = model.blocks[2:], model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def bytes_of_hits(rank: int, directory: Path) -> dict[str, Any]:
    active = shard(Active(Blocks()))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(active.parameters(), 0.1)
    features, expected = torch.randn(4, 8), CountBytes()
    train(active, optimizer, [(features, torch.zeros(4, dtype=torch.long))])
    with expected:
        train(active, optimizer, [(features, torch.zeros(4, dtype=torch.long))])
    model = shard(Blocks())
    freeze(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = [p for p in model.parameters() if not p.requires_grad]
    found, trained = [], []
    with ActivationCache(model, directory, "blocks.1", gate="always", audit_rate=0) as cache:
        loader, _ = samples(cache)
        for _ in range(3):
            for batch in loader:
                count = CountBytes()
                with count:
                    train(model, optimizer, [batch])
                found.append(dict(count.bytes))
            cache.flush()
        hits = cache.stats().hits
        trained = [p.requires_grad for p in own]
    return {"found": found[-8:], "expected": dict(expected.bytes), "hits": hits, "own": trained}


def by_itself(rank: int, directory: Path) -> dict[str, Any]:
    """The boundary is found, and follows what is frozen."""
    model = shard(Blocks())
    freeze(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    with ActivationCache(model, directory, "auto", gate="always", audit_rate=0) as cache:
        loader, _ = samples(cache)
        for epoch in range(6):
            if epoch == 3:
                freeze(model, 3)
            losses = train(model, optimizer, loader)
            cache.flush()
            found.append((cache.boundary, cache.stats().hits))
    return {"found": found, "last": losses}


def uneven(rank: int, directory: Path) -> list[float]:
    """One rank serves, the other computes everything."""
    model = shard(Blocks())
    freeze(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gate = "always" if rank else "never"
    with ActivationCache(model, directory / str(rank), "blocks.1", gate=gate) as cache:
        losses = epochs(3, model, optimizer, *samples(cache), cache)
        assert (cache.stats().hits > 0) is bool(rank)
    return losses


def by_hand(rank: int, directory: Path) -> list[float]:
    """Weights are loaded into the frozen front, a block is thawed, and frozen again."""
    model = shard(Blocks())
    freeze(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ActivationCache(model, directory, "blocks.1", gate="always") as cache:
        return change_by_hand(model, optimizer, *samples(cache), cache)


def change_by_hand(model: Blocks, optimizer: Any, loader: Any, sampler: Any, cache: Any) -> Any:
    def change(epoch: int) -> None:
        if epoch == 2:
            with torch.no_grad():
                for parameter in model.blocks[0].parameters():
                    parameter.mul_(1.5)
        if epoch == 5:
            model.eval()  # the next call is in another mode
            with torch.no_grad():
                model(torch.zeros(2, 6))
            for parameter in model.blocks[0].parameters():
                parameter.data.mul_(0.5)
        if epoch == 3:
            model.blocks[1].requires_grad_(True)
        if epoch == 4:
            model.blocks[1].requires_grad_(False)

    return epochs(6, model, optimizer, loader, sampler, cache, before=change)


def in_bf16(rank: int, directory: Path) -> dict[str, Any]:
    """Mixed precision, with and without a cache."""
    losses = []
    for use in (False, True):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = shard(Blocks(), mp_policy=policy)
        freeze(model, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gate = "always" if use else "never"
        with ActivationCache(model, directory / str(use), "blocks.1", gate=gate) as cache:
            losses.append(epochs(3, model, optimizer, *samples(cache), cache))
            hits = cache.stats().hits
    return {"losses": losses, "hits": hits}


def resumed(rank: int, directory: Path) -> dict[str, Any]:
    """Stopped in mid-epoch with a frozen front, and taken up by other objects."""
    losses: list[float] = []
    saved: dict[str, Any] = {}
    hits = 0
    for part in ("before", "after"):
        model = shard(Blocks())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with ActivationCache(model, directory / "cache", gate="always", audit_rate=0) as cache:
            loader, sampler = samples(cache)
            controller = FreezeController(
                model, optimizer, cache, policy=StaticPolicy(SCHEDULE), layers=LAYERS
            )
            if part == "after":
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments}
                dcp.load(state, checkpoint_id=directory / "checkpoint")
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
                loader.load_state_dict(saved["loader"])
                controller.load_state_dict(saved["controller"])
            for epoch in range(0 if part == "before" else 3, 4 if part == "before" else EPOCHS):
                sampler.set_epoch(epoch)
                for at, batch in enumerate(loader):
                    losses += train(model, optimizer, [batch], controller.step)
                    if part == "before" and (epoch, at) == (3, 1):
                        break
                cache.flush()
            if part == "before":
                weights, moments = get_state_dict(model, optimizer)
                dcp.save(
                    {"model": weights, "optimizer": moments}, checkpoint_id=directory / "checkpoint"
                )
                saved = {"loader": loader.state_dict(), "controller": controller.state_dict()}
            controller.close()
            hits = cache.stats().hits
    return {"losses": losses, "hits": hits}


def several(rank: int, directory: Path) -> dict[str, Any]:
    cases = (bytes_of_hits, by_itself, uneven, by_hand, in_bf16, resumed)
    return {case.__name__: case(rank, directory / case.__name__) for case in cases}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("sharded")
    return run_ranks(several, 2, directory / "ranks", directory)


def test_on_hits_collectives_carry_the_bytes_of_the_active_units_alone(ranks: Any) -> None:
    for rank in ranks:
        result = rank["bytes_of_hits"]
        assert result["hits"] == 32
        assert result["expected"]["allgather_base"] > 0
        assert result["found"] == [result["expected"]] * 8
        assert not any(result["own"])


def one_process() -> tuple[Any, ...]:
    model = Blocks()
    freeze(model, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1), *samples()


def test_a_rank_of_hits_and_one_of_misses_go_on_together(ranks: Any) -> None:
    assert_mean([rank["uneven"] for rank in ranks], epochs(3, *one_process()))


def test_weights_written_and_blocks_thawed_by_hand_are_seen(ranks: Any) -> None:
    assert_mean([rank["by_hand"] for rank in ranks], change_by_hand(*one_process(), None))


def test_the_boundary_is_found_by_itself(ranks: Any) -> None:
    for rank in ranks:
        found = rank["by_itself"]["found"]
        assert [boundary for boundary, _ in found] == ["blocks.0"] * 3 + ["blocks.2"] * 3
        hits = [hits for _, hits in found]
        assert hits[2] - hits[1] == hits[5] - hits[4] == 16


def test_mixed_precision_gives_the_same_losses(ranks: Any) -> None:
    for rank in ranks:
        plain, cached = rank["in_bf16"]["losses"]
        assert rank["in_bf16"]["hits"] == 32
        assert cached == pytest.approx(plain, abs=1e-2)
        assert cached[:4] == plain[:4]


def test_a_run_that_was_stopped_in_mid_epoch_goes_on_as_if_nothing_had_happened(ranks: Any) -> None:
    model = Blocks()
    expected = run(model, OPTIMIZERS["adamw"](model.parameters()), *samples())
    assert_mean([rank["resumed"]["losses"] for rank in ranks], expected)
    assert all(rank["resumed"]["hits"] > 0 for rank in ranks)


# Every way to call `fully_shard`, with a cache: the same losses as one process, and hits.

WAYS = ("grouped", "root alone", "not resharded", "prefetched", "offloaded", "checkpointed")


def made_in(way: str) -> Blocks:
    model = Blocks()
    if way == "grouped":
        fully_shard([model.blocks[0], model.blocks[1]])
        fully_shard([model.blocks[2], model.blocks[3]])
        return fully_shard(model)
    if way == "root alone":
        return fully_shard(model)
    if way == "not resharded":
        return shard(model, reshard_after_forward=False)
    if way == "offloaded":
        return shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if way == "hybrid":
        mesh = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards")
        )
        return shard(model, mesh=mesh)
    if way == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    if way == "compiled":
        for block in model.blocks:
            block.compile(backend="eager")
    shard(model)
    if way == "prefetched":
        blocks: Any = list(model.blocks)
        model.set_modules_to_forward_prefetch([blocks[0]])  # type: ignore[operator]
        for here, following in itertools.pairwise(blocks):
            here.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([here])
    return model


def run_ways(model: Blocks, loader: Any, sampler: Any, cache: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def move(epoch: int) -> None:
        if epoch in (1, 4, 5):
            boundary = None if epoch == 4 else "blocks.1"
            freeze(model, 2 if boundary else 0)
            if cache is not None:
                cache.on_boundary_moved(BoundaryMoved(8 * epoch, boundary, None, "as planned"))

    return epochs(7, model, optimizer, loader, sampler, cache, before=move)


def train_ways(rank: int, directory: Path, ways: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ways:
        model = made_in(way)
        with ActivationCache(model, directory / way, gate="always", audit_rate=0) as cache:
            losses = run_ways(model, *samples(cache), cache)
            stats = cache.stats()
            found[way] = {"losses": losses, "hits": stats.hits, "why_not": stats.why_not}
    return found


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [
        pytest.param(2, WAYS, marks=pytest.mark.long),
        pytest.param(4, ("hybrid",), marks=pytest.mark.long),
        (2, ("grouped", "compiled")),
    ],
    ids=str,
)
def test_losses_equal_one_process(tmp_path: Path, num_ranks: int, ways: tuple[str, ...]) -> None:
    ranks = run_ranks(train_ways, num_ranks, tmp_path / "ranks", tmp_path, ways)
    expected = run_ways(Blocks(), *samples())
    for way in ways:
        assert_mean([rank[way]["losses"] for rank in ranks], expected)
        for rank in ranks:
            if way == "compiled":  # refused, with the reason
                assert rank[way]["hits"] == 0
                assert "compiled and cut by fully_shard" in rank[way]["why_not"]
            else:
                assert rank[way]["hits"] == 3 * 32 // num_ranks
