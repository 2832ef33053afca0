"""Pipelines on several ranks against one process: through freeze, move, cache, unfreeze, resume."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rivals import SmartPipePolicy
from egeria_core.pipeline import PipelinePlan
from egeria_core.policies import BudgetPolicy, HarmEstimate, PlasticityPolicy
from tests.helpers.pipelines import (
    MICROBATCHES,
    NUM_BLOCKS,
    NUM_SAMPLES,
    OPTIMIZERS,
    STEPS_PER_EPOCH,
    Case,
    alone,
    make_blocks,
    spawn,
)

ONE = [Case("1F1B", "repartition", "sgd", stop_at=14)]
FEW = {
    2: [
        # Frozen from the first step on, with a boundary inside a stage.
        Case("GPipe", "stay", "adamw", False, moves=((0, "1"), (5, "4"), (10, None)), epochs=3)
    ],
    4: [
        Case("GPipe", "repartition", "adamw", stop_at=10),
        Case("1F1B", "stay", "adamw", has_cache=False),
    ],
}
ALL = [
    Case(schedule, on_freeze, optimizer, has_cache, stop_at=stop_at)
    for schedule, on_freeze, optimizer, (has_cache, stop_at) in itertools.product(
        ("GPipe", "1F1B"), ("repartition", "stay"),
        ("sgd", "adamw"), ((True, None), (False, None), (True, 14)),
    )
]  # fmt: skip


@pytest.mark.long
def test_a_pipeline_trains_as_one_process_does(tmp_path: Path) -> None:
    check_all(2, ONE, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("world", FEW)
def test_pipelines_of_each_kind_train_as_one_process_does(tmp_path: Path, world: int) -> None:
    check_all(world, FEW[world], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("world", [2, 4])
def test_every_pipeline_trains_as_one_process_does(tmp_path: Path, world: int, part: int) -> None:
    check_all(world, ALL[part::4], tmp_path)


def check_all(world: int, cases: Sequence[Case], directory: Path) -> None:
    for case, ranks in zip(cases, spawn(world, directory, cases), strict=True):
        print(case)
        check_equal(case, world, ranks)
        check_messages(case, ranks)
        check_bytes(case, world, ranks)
        if case.has_cache and case.stop_at is None:
            check_served(world, ranks)


def check_equal(case: Case, world: int, ranks: list[dict[str, Any]]) -> None:
    losses, weights = alone(case, world)
    for found in ranks:
        torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=1e-5)
        assert found["weights"].keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-5)
        assert found["schedule"] == [move for move in case.moves if move != (0, None)]


def check_messages(case: Case, ranks: list[dict[str, Any]]) -> None:
    """No gradient goes into a stage whose blocks are all frozen; into others, one a micro-batch."""
    moves = sorted(case.moves)
    sent = [message for found in ranks for message in found["messages"]]
    for step, (stages, front) in enumerate(ranks[0]["stages"]):
        name = [name for at, name in moves if at <= step][-1]
        frozen = 0 if name is None else int(name) + 1
        assert front == (frozen if case.has_cache or case.on_freeze != "stay" else 0)
        for target, (_, stop) in enumerate(stages[:-1]):
            count = sent.count((step, target + 1))
            assert count == (0 if stop <= frozen else MICROBATCHES)


def check_bytes(case: Case, world: int, ranks: list[dict[str, Any]]) -> None:
    """Bytes moved are weights, buffers and optimizer state of the blocks that change rank."""
    block = make_blocks()[0]
    weights = sum(tensor.nbytes for tensor in block.state_dict().values())
    optimizer = OPTIMIZERS[case.optimizer](block.parameters())
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [value for own in optimizer.state.values() for value in own.values()]
    state = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    plan = PipelinePlan.start(
        [1.0] * NUM_BLOCKS, world, schedule=case.schedule, microbatches=MICROBATCHES
    )
    expected = [0] * world
    for step, name in sorted(case.moves):
        if (step, name) == (0, None):
            continue
        has_front = case.has_cache or case.on_freeze != "stay"
        frozen = 0 if name is None else int(name) + 1
        new = plan.frozen_to(frozen, case.on_freeze, has_front=has_front)  # type: ignore[arg-type]
        for _, source, _ in plan.moves(new):
            expected[source] += weights + state
        plan = new
    assert [found["moved"] for found in ranks] == expected
    assert any(expected) == (case.on_freeze != "stay")


def check_served(world: int, ranks: list[dict[str, Any]]) -> None:
    """From the second frozen epoch on nothing is computed in the front, and nothing is loaded."""
    for found in ranks:
        own = NUM_SAMPLES // world
        # Frozen in epochs 1 and 2 up to one block, in 3 and 4 up to another.
        for epoch in (2, 4):
            assert (found["hits"][epoch], found["misses"][epoch]) == (own, 0)
            # But for the few that are loaded to be compared with what is served, which a data set
            # that counts its loads need not see.
            assert found["loaded"][epoch] <= found["audited"][epoch] <= 2
        assert found["loaded"][0] == own
        assert len(found["losses"]) == 6 * STEPS_PER_EPOCH


# Policies that measure: decided alike on all ranks, wherever the first active block is.


class Eager(HarmEstimate):
    """Four readings suffice it, and every layer rests."""

    @property
    def ready(self) -> bool:
        return self._seen >= 4

    def rests(self, layer: int) -> bool:
        return True


class EagerPolicy(BudgetPolicy):
    def bind(self, boundaries: Sequence[str]) -> None:
        self.estimate = Eager()


QUICK: dict[str, Any] = {"evaluate_every": 2, "evaluator": "inline", "move_cost": 1e-6}
CASES = {
    "plasticity": Case(
        "1F1B", "repartition", "calm", moves=(), policy=partial(PlasticityPolicy, 3, 5.0),
        options=QUICK | {"bootstrap": None, "reference": "fp32"},
    ),
    "smartpipe": Case(
        "GPipe", "stay", "sgd", has_cache=False, moves=(), policy=SmartPipePolicy, options=QUICK
    ),
    "budget": Case(
        "GPipe", "repartition", "adamw", has_cache=False, moves=(), epochs=10,
        policy=partial(EagerPolicy, 100.0),
        options=QUICK | {"total_steps": 40},
    ),
}  # fmt: skip


@pytest.mark.long
def test_all_ranks_decide_alike_by_any_policy(tmp_path: Path) -> None:
    for name, ranks in zip(CASES, spawn(2, tmp_path, list(CASES.values())), strict=True):
        schedule = ranks[0]["schedule"]
        print(name, schedule)
        assert any(boundary is not None for _, boundary in schedule), name
        assert all(found["schedule"] == schedule for found in ranks)
        readings = [[r for r in found["history"] if r["kind"] == "reading"] for found in ranks]
        assert readings[0]
        for left, right in zip(*readings, strict=True):
            assert left["boundary"] == right["boundary"]
            assert left.get("values") == right.get("values")
            assert left["value"] == right["value"]
        # The same moves in one process: equal to the last step.
        replayed = Case(
            optimizer=CASES[name].optimizer, epochs=CASES[name].epochs, moves=tuple(schedule)
        )
        losses, weights = alone(replayed, 2)
        torch.testing.assert_close(ranks[0]["losses"], losses, rtol=1e-5, atol=1e-5)
        for key, weight in weights.items():
            torch.testing.assert_close(ranks[0]["weights"][key], weight, rtol=1e-5, atol=1e-5)
        if name == "plasticity":
            # Both ranks have had the first active block, and measured it.
            assert {int(r["boundary"]) for r in readings[0]} & {0, 1, 2, 3}
