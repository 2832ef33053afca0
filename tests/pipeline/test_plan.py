"""Plans: every block is somewhere, and moves bring it there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria_core.pipeline import PipelinePlan, partition


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


WAYS = st.tuples(st.sampled_from(["repartition", "stay"]), st.booleans())


def check(plan: PipelinePlan) -> None:
    """Stages follow each other, and every rank that runs a block holds it."""
    bounds = [bound for stage in plan.stages for bound in stage]
    assert bounds == sorted(bounds)
    assert all(left[1] == right[0] for left, right in pairwise(plan.stages))
    assert plan.stages[0][0] in (0, plan.front)
    assert (max(plan.front, plan.stages[0][0]), plan.stages[-1][1]) == (plan.front, len(plan.costs))
    assert len(plan.stages) == plan.ranks
    for rank, (start, stop) in enumerate(plan.stages):
        assert set(plan.homes[start:stop]) <= {rank}
    assert len(plan.homes) == len(plan.costs)


@given(plans(), st.lists(st.tuples(st.integers(0, 20), WAYS), max_size=4))
@settings(max_examples=200, deadline=None)
def test_moves_bring_every_block_to_where_the_next_plan_wants_it(
    first: PipelinePlan, moves: list[tuple[int, tuple[Any, bool]]]
) -> None:
    where = dict(enumerate(first.homes))
    plan = first
    check(plan)
    way = moves[0][1] if moves else None
    for depth, _ in [*moves, (0, None)]:
        on_freeze, has_front = way or ("repartition", True)
        frozen = depth % len(plan.costs)
        new = plan.frozen_to(frozen, on_freeze, has_front=has_front)
        check(new)
        assert new.frozen == frozen
        assert new.front == (frozen if has_front or on_freeze != "stay" else 0)
        for move in plan.moves(new):
            block, source, target = move
            assert source == where[block] != target
            where[block] = target
            assert on_freeze != "stay"
        assert where == dict(enumerate(new.homes))
        if frozen > plan.frozen and has_front:
            # What freezes stays where it was.
            assert plan.homes[:frozen] == new.homes[:frozen]
        if on_freeze == "repartition":
            filled = sum(start < stop for start, stop in new.stages)
            assert filled == min(plan.ranks, len(plan.costs) - frozen)
        plan = new
    assert plan == first


def test_active_blocks_stay_or_are_spread() -> None:
    plan = PipelinePlan.start([1.0] * 8, 4, schedule="GPipe", microbatches=6)
    assert plan.stages == ((0, 2), (2, 4), (4, 6), (6, 8))
    stay = plan.frozen_to(4, "stay")
    assert stay.stages == ((4, 4), (4, 4), (4, 6), (6, 8))
    spread = plan.frozen_to(4, "repartition")
    assert spread.stages == ((4, 5), (5, 6), (6, 7), (7, 8))
    assert [tuple(move) for move in plan.moves(spread)] == [(4, 2, 0), (5, 2, 1), (6, 3, 2)]


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


def test_bad_plans_are_refused() -> None:
    def start(blocks: int = 8, ranks: int = 4, **options: Any) -> PipelinePlan:
        return PipelinePlan.start(
            [1.0] * blocks, ranks, **({"schedule": "GPipe", "microbatches": 4} | options)
        )

    for match, options in [
        ("too few", {"blocks": 3}),
        ("as many micro-batches as stages", {"schedule": "1F1B", "microbatches": 3}),
        ("one stage on a rank", {"schedule": "Interleaved1F1B"}),
        ("must be positive", {"microbatches": 0}),
        ("no weight gradients", {"schedule": "ZBVZeroBubble"}),
    ]:
        with pytest.raises(ValueError, match=match):
            start(**options)
    with pytest.raises(ValueError, match=r"frozen must be in \[0, 8\)"):
        start().frozen_to(8, "stay")
