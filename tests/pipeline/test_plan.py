"""Plans: every block is somewhere, moves bring it there, and rows reach the pipelines' ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria_core.pipeline import PipelinePlan, partition, split_sizes


@st.composite
def plans(draw: st.DrawFn) -> PipelinePlan:
    schedule = draw(st.sampled_from(["GPipe", "1F1B"]))
    ranks = draw(st.integers(1, 5))
    microbatches = ranks * draw(st.integers(1, 4))
    blocks = ranks + draw(st.integers(0, 6))
    costs = draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0]), min_size=blocks, max_size=blocks)
    )
    return PipelinePlan.start(costs, ranks, schedule=schedule, microbatches=microbatches)


WAYS = st.tuples(st.sampled_from(["repartition", "replicate", "stay"]), st.booleans())


def check(plan: PipelinePlan) -> None:
    """Stages follow each other, and every rank that runs a block holds it."""
    bounds = [bound for stage in plan.stages for bound in stage]
    assert bounds == sorted(bounds)
    assert all(left[1] == right[0] for left, right in pairwise(plan.stages))
    assert plan.stages[0][0] in (0, plan.front)
    assert (max(plan.front, plan.stages[0][0]), plan.stages[-1][1]) == (plan.front, plan.blocks)
    ranks = [rank for lane in plan.pipelines for rank in lane]
    assert len(set(ranks)) == len(ranks)
    assert set(ranks) <= set(range(plan.ranks))
    assert plan.microbatches % len(plan.pipelines) == 0
    for lane in plan.pipelines:
        for rank, (start, stop) in zip(lane, plan.stages, strict=True):
            assert all(rank in homes for homes in plan.homes[start:stop])
    for block in range(plan.front, plan.blocks):
        assert set(plan.homes[block]) <= set(ranks)
        assert len(plan.homes[block]) == len(set(plan.homes[block])) == len(plan.pipelines)
    for rank in range(plan.ranks):
        place = plan.place_of(rank)
        assert (place is None) == (rank not in ranks)
        assert place is None or plan.pipelines[place[0]][place[1]] == rank


@given(plans(), st.lists(st.tuples(st.integers(0, 20), WAYS), max_size=4))
@settings(max_examples=200, deadline=None)
def test_moves_bring_every_block_to_where_the_next_plan_wants_it(
    first: PipelinePlan, moves: list[tuple[int, tuple[Any, bool]]]
) -> None:
    where = {block: set(homes) for block, homes in enumerate(first.homes)}
    plan = first
    check(plan)
    way = moves[0][1] if moves else None
    for depth, _ in [*moves, (0, None)]:
        on_freeze, has_front = way or ("repartition", True)
        frozen = depth % plan.blocks
        new = plan.frozen_to(frozen, on_freeze, has_front=has_front)
        check(new)
        assert new.frozen == frozen
        assert new.front == (frozen if has_front or on_freeze != "stay" else 0)
        for move in plan.moves(new):
            assert move.source in where[move.block]
            assert move.target not in where[move.block]
            where[move.block].add(move.target)
            assert on_freeze != "stay"
        for block, homes in enumerate(new.homes):
            assert set(homes) <= where[block]
            where[block] = set(homes)
        for block, source in plan.copies(new):
            assert source in where[block]
            assert plan.front <= block < new.front
        if frozen > plan.frozen and has_front:
            # What freezes stays where it was.
            assert all(plan.homes[b][0] == new.homes[b][0] for b in range(frozen))
        if on_freeze == "repartition":
            assert len(new.pipelines) == 1
            assert len(new.pipelines[0]) == min(plan.ranks, plan.blocks - frozen)
        plan = new
    assert plan == first


def test_freed_ranks_become_replicas_without_a_rank_holding_more() -> None:
    plan = PipelinePlan.start([1.0] * 8, 4, schedule="GPipe", microbatches=6)
    assert plan.stages == ((0, 2), (2, 4), (4, 6), (6, 8))
    half = plan.frozen_to(4, "replicate")
    assert half.pipelines == ((0, 1), (2, 3))
    assert half.stages == ((4, 6), (6, 8))
    assert [tuple(move) for move in plan.moves(half)] == [
        (4, 2, 0),
        (5, 2, 0),
        (6, 3, 1),
        (7, 3, 1),
    ]
    # Three ranks would be needed for five blocks, and there is no room for a second replica.
    assert plan.frozen_to(3, "replicate").pipelines == ((0, 1, 2, 3),)
    # Four replicas of one block would have one and a half micro-batches each.
    assert len(plan.frozen_to(7, "replicate").pipelines) == 3
    stay = plan.frozen_to(4, "stay")
    assert (stay.pipelines, stay.stages) == (((2, 3),), ((4, 6), (6, 8)))
    spread = plan.frozen_to(4, "repartition")
    assert spread.stages == ((4, 5), (5, 6), (6, 7), (7, 8))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_no_partition_has_a_cheaper_dearest_run(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        with pytest.raises(ValueError, match="cannot cut"):
            partition(costs, 0, parts)
        return
    runs = partition(costs, 0, parts)
    assert [runs[0][0], *(stop for _, stop in runs)][-1] == len(costs)
    assert all(start < stop for start, stop in runs)

    def best(start: int, left: int) -> int:
        if left == 1:
            return sum(costs[start:])
        cuts = range(start + 1, len(costs) - left + 2)
        return min(max(sum(costs[start:cut]), best(cut, left - 1)) for cut in cuts)

    assert max(sum(costs[start:stop]) for start, stop in runs) == best(0, parts)


@given(plans(), st.lists(st.integers(0, 9), min_size=5, max_size=5), st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_every_row_reaches_one_pipeline_in_order(
    plan: PipelinePlan, brought: list[int], depth: int
) -> None:
    plan = plan.frozen_to(depth % plan.blocks, "replicate")
    counts = brought[: plan.ranks]
    total = sum(counts)
    size, bounds = plan.rows_of(total)
    share = plan.microbatches // len(plan.pipelines)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(total))
    assert all(stop - start <= size * share for start, stop in bounds)
    wanted = [(0, 0)] * plan.ranks
    for lane, run in zip(plan.pipelines, bounds, strict=True):
        wanted[lane[0]] = run
    # A dictionary of queues plays the exchange: row numbers go out in runs, and arrive in order.
    rows = iter(range(total))
    arrived: dict[int, list[int]] = {rank: [] for rank in range(plan.ranks)}
    for sizes in split_sizes(counts, wanted):
        for receiver, number in enumerate(sizes):
            arrived[receiver] += [next(rows) for _ in range(number)]
    assert next(rows, None) is None
    assert all(arrived[rank] == list(range(*run)) for rank, run in enumerate(wanted))


def test_bad_plans_are_refused() -> None:
    def start(blocks: int = 8, ranks: int = 4, **options: Any) -> PipelinePlan:
        return PipelinePlan.start(
            [1.0] * blocks, ranks, **({"schedule": "GPipe", "microbatches": 4} | options)
        )

    for match, options in [
        ("too few", {"blocks": 3}),
        ("as many micro-batches as stages", {"schedule": "1F1B", "microbatches": 3}),
        ("several stages on a rank.* take 1F1B", {"schedule": "Interleaved1F1B"}),
        ("must be positive", {"microbatches": 0}),
        ("no weight gradients", {"schedule": "ZBVZeroBubble"}),
    ]:
        with pytest.raises(ValueError, match=match):
            start(**options)
    with pytest.raises(ValueError, match=r"frozen must be in \[0, 8\)"):
        start().frozen_to(8, "stay")
