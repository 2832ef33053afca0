"""A rank that ends, and a state of another number of ranks: every rank is told, and ends."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from egeria_cache import EgeriaError
from egeria_core import FreezeController
from egeria_core.pipeline import ElasticPipeline
from tests.helpers.gloo import run_ranks

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
    except EgeriaError as error:
        done(rank, directory, str(error))


@pytest.mark.parametrize(
    ("make", "num_ranks"),
    [(steps_of_a_pipeline, 2), (steps_of_a_controller, 2), (steps_of_a_pipeline, 4)],
)
def test_where_a_rank_has_ended_all_others_are_told(tmp_path, make, num_ranks):
    found = run_ranks(partial(one_ends, make=make, directory=tmp_path), num_ranks, tmp_path)
    for rank, told in enumerate(found):
        if rank != GONE:
            assert told.startswith(f"a collective of {num_ranks} ranks failed: one of them has")


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


def test_a_state_of_one_wrong_rank_is_refused_by_all(tmp_path):
    states = run_ranks(saved, 2, tmp_path / "before")
    found = run_ranks(resumes, 2, tmp_path / "now", [states[0], states[0]])
    assert found == ["rank 1 of 2 was given the state of rank 0 of 2"] * 2
