"""What a pipeline gives beside losses, what it refuses, and what it must leave alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from egeria_cache import EgeriaError
from egeria_core import FreezeController
from egeria_core.pipeline import ElasticPipeline
from tests.helpers.gloo import run_ranks
from tests.helpers.pipelines import WIDTH, make_blocks, spawn

ROWS = 6


class Two(nn.Module):
    """Hands two tensors on, one of which is not contiguous."""

    def forward(self, rows: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        return rows + extra.mean(1, keepdim=True), extra.t().contiguous().t()


class Normed(nn.Module):
    """A norm with statistics of its own, whose momentum no step of the optimizer moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(rows))
        return result


def make(blocks: list[nn.Module], **options: Any) -> tuple[ElasticPipeline, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], lr=0.1)
    options = {"microbatches": 2, "schedule": "GPipe"} | options
    return ElasticPipeline(blocks, optimizer, F.cross_entropy, **options), optimizer


def rows(rank: int, number: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(number, WIDTH, generator=generator), torch.arange(number) % WIDTH


def together() -> tuple[Tensor, Tensor]:
    parts = [rows(rank, ROWS - 3 * rank) for rank in range(dist.get_world_size())]
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def norms_and_evaluation() -> dict[str, Any]:
    """Ranks that bring different numbers of rows; the norm of all gradients; forwards alone."""
    rank = dist.get_rank()
    pipeline, _ = make(make_blocks(), schedule="1F1B", microbatches=4)
    model = nn.Sequential(*make_blocks())
    mine, all_ = rows(rank, ROWS - 3 * rank), together()
    expected = F.cross_entropy(model(all_[0]), all_[1])
    expected.backward()
    found = [pipeline.evaluate(*mine), pipeline.step(*mine), pipeline.evaluate(*mine)]
    wrong = pipeline.evaluate(*mine, lambda out, y: (out.argmax(1) != y).float().mean())
    # One rank brings nothing.
    alone = pipeline.evaluate(*rows(0, 0 if rank else ROWS))
    torch.testing.assert_close(alone, F.cross_entropy(model(rows(0)[0]), rows(0)[1]).detach())
    norm = pipeline.clip_grad_norm_(0.01)
    expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for index, block in enumerate(pipeline.model):
        if pipeline.owner(index) == rank:
            for own, theirs in zip(block.parameters(), model[index].parameters(), strict=True):
                torch.testing.assert_close(own.grad, theirs.grad)
        else:
            assert all(p.is_meta and p.grad is None for p in block.parameters())
    torch.testing.assert_close(found, [expected.detach()] * 3)
    torch.testing.assert_close(wrong, (model(all_[0]).argmax(1) != all_[1]).float().mean())
    torch.testing.assert_close(norm, expected_norm)
    return {}


def several_tensors() -> dict[str, Any]:
    """Blocks with two arguments; the front is one of them."""
    torch.manual_seed(0)
    blocks = [Two(), Two(), *make_blocks()[:1]]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, rows: Tensor, extra: Tensor) -> Tensor:
            result: Tensor = self.linear(rows * extra)
            return result

    blocks.insert(2, Both())
    pipeline, _ = make(blocks)
    plain = [Two(), Two(), Both(), make_blocks()[0]]
    for index, block in enumerate(plain):
        block.load_state_dict(
            {k.partition(".")[2]: v for k, v in pipeline.full_state_dict().items()
             if k.startswith(f"{index}.")}
        )  # fmt: skip
    inputs, targets = rows(dist.get_rank())
    both = [rows(rank) for rank in range(dist.get_world_size())]
    left = torch.cat([x for x, _ in both])
    out: Any = (left, left.cos())
    for block in plain:
        out = block(*out) if isinstance(out, tuple) else block(out)
    expected = F.cross_entropy(out, torch.cat([y for _, y in both])).detach()
    torch.testing.assert_close(pipeline.step((inputs, inputs.cos()), targets), expected)
    pipeline.freeze_to(1)
    assert pipeline.front.depth == 1
    torch.testing.assert_close(pipeline.step((inputs, inputs.cos()), targets), expected)
    return {}


def statistics() -> dict[str, Any]:
    """Learning the shapes leaves no trace in statistics; they move with their block."""
    torch.manual_seed(0)
    blocks = [Normed() for _ in range(4)]
    pipeline, _ = make(blocks)
    inputs, targets = rows(dist.get_rank())
    pipeline.step(inputs, targets)
    state = pipeline.full_state_dict()
    assert [int(state[f"{i}.norm.num_batches_tracked"]) for i in range(4)] == [2] * 4
    assert all(value.isfinite().all() for value in state.values())
    for parameter in blocks[0].parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    pipeline.freeze_to(1)
    moved = pipeline.full_state_dict()
    assert all(torch.equal(moved[name], value) for name, value in state.items())
    return {}


def refusals() -> dict[str, Any]:
    rank = dist.get_rank()
    blocks = make_blocks()
    with pytest.raises(ValueError, match="no weight gradients"):
        make(make_blocks(), schedule="ZBVZeroBubble")
    with pytest.raises(ValueError, match="on_freeze must be"):
        make(make_blocks(), on_freeze="spread")
    shared = [*make_blocks(), blocks[0], blocks[0].linear]  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"block '9' .* block '8' .*untie"):
        make(shared)
    with pytest.raises(ValueError, match="block '8' is block '0' too"):
        make([*blocks, blocks[0]])
    with pytest.raises(ValueError, match="8 blocks and 9 costs"):
        make(make_blocks(), costs=[1.0] * 9)
    pipeline, _ = make(blocks)
    inputs, targets = rows(rank)
    with pytest.raises(EgeriaError, match="rank 1 differs from rank 0 in its rows of another"):
        pipeline.step(inputs.double() if rank else inputs, targets)
    with pytest.raises(EgeriaError, match="rank 1 brings inputs and targets of different numbers"):
        pipeline.step(inputs, targets[rank:])
    with pytest.raises(ValueError, match=r"'0\.linear\.weight' of the first 2 blocks is trainable"):
        pipeline.freeze_to(2)
    with pytest.raises(EgeriaError, match="was given the state of rank"):
        pipeline.load_state_dict(pipeline.state_dict() | {"rank": 1 - rank})
    state = pipeline.state_dict() | {"frozen": 2}
    pipeline.load_state_dict(state)
    with pytest.raises(EgeriaError, match="has 2 frozen blocks: load the controller's state"):
        pipeline.step(inputs, targets)
    return {}


WORK = (norms_and_evaluation, several_tensors, statistics, refusals)


def run(work: Any, directory: Path) -> Any:
    return work()


def test_two_ranks(tmp_path: Path) -> None:
    spawn(2, tmp_path, WORK, run)


# A rank that ends, and a state of another number of ranks: every rank is told, and ends.

GONE = 1


def done(rank: int, directory: Path, found: Any) -> None:
    """End past everything that the ranks would do together."""
    torch.save(found, directory / f"{rank}.pt")
    os._exit(0)


def pipeline() -> ElasticPipeline:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return ElasticPipeline(model, optimizer, F.cross_entropy, microbatches=4)


def steps_of_a_pipeline(rank: int) -> Callable[[], Any]:
    elastic = pipeline()
    x, y = torch.randn(4, 8), torch.randint(3, (4,))
    return lambda: elastic.step(x, y)


def steps_of_a_controller(rank: int) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    controller = FreezeController(model, optimizer, total_steps=100)
    return lambda: controller._ranks.agree(1.0)


def one_ends(rank: int, make: Callable[[int], Callable[[], Any]], directory: Path) -> None:
    step = make(rank)
    step()
    if rank == GONE:
        done(rank, directory, None)
    try:
        while True:
            step()
    except RuntimeError as error:
        done(rank, directory, str(error))


@pytest.mark.parametrize(
    ("make", "num_ranks"),
    [(steps_of_a_pipeline, 2), (steps_of_a_controller, 2), (steps_of_a_pipeline, 4)],
)
def test_where_a_rank_has_ended_all_others_are_told(tmp_path, make, num_ranks):
    found = run_ranks(partial(one_ends, make=make, directory=tmp_path), num_ranks, tmp_path)
    for rank, told in enumerate(found):
        if rank != GONE:
            assert told


def resumes(rank: int, states: list[dict[str, Any]]) -> str:
    elastic = pipeline()
    with pytest.raises(EgeriaError) as raised:
        elastic.load_state_dict(states[rank])
    return str(raised.value)


def saved(rank: int) -> dict[str, Any]:
    return copy.deepcopy(pipeline().state_dict())


@pytest.mark.cases(1)
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4)])
def test_a_state_of_another_number_of_ranks_is_refused_by_all(tmp_path, before, now):
    states = run_ranks(saved, before, tmp_path / "before")
    given = [states[rank % before] for rank in range(now)]
    found = run_ranks(resumes, now, tmp_path / "now", given)
    assert found == [f"rank 0 of {now} was given the state of rank 0 of {before}"] * now
