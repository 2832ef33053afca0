"""SmartPipe's sixteen figures from one rule, and what holds for every schedule on paper."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import FORWARD, ScheduleInterleaved1F1B

from benchmarks.scale import (
    CLUSTER,
    JOB,
    TROUBLE,
    Trouble,
    expect,
    hit_rates,
    machines,
    slowest,
    weigh,
)
from benchmarks.schedules import LAYOUTS, Bubbles, Task, count_bubbles, count_plan, rank_order
from egeria_core.pipeline import PipelinePlan

SLIDES: list[tuple[str, int, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
    ("GPipe", 6, {}, (24, 18, 24), (9, 16, 28)),
    ("GPipe", 3, {"minibatches": 2}, (48, 24, 48), (13, 18, 36)),
    ("1F1B", 6, {}, (24, 18, 24), (9, 16, 28)),
    ("1F1B", 3, {"minibatches": 2, "flush": False}, (32, 20, 32), (10, 16, 28)),
    # Not on the slides: what PyTorch's 1F1B could at best reach.
    ("1F1B", 3, {"minibatches": 2}, (48, 24, 48), (13, 18, 36)),
]


@pytest.mark.parametrize(("schedule", "microbatches", "options", "before", "after"), SLIDES)
def test_the_figures_of_the_slides(
    schedule: str, microbatches: int, options: dict[str, Any], before: tuple[int, ...],
    after: tuple[int, ...],
) -> None:  # fmt: skip
    for frozen, figures in ((0, before), (2, after)):
        found = count_bubbles(schedule, 4, microbatches, frozen, **options)
        assert (found.bubbles, found.time, found.idle) == figures


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_what_the_cache_and_the_freed_ranks_bring(schedule: str) -> None:
    times = [count_bubbles(schedule, 4, 6, 2, layout=layout).time for layout in LAYOUTS]
    assert times == [17, 16, 14, 9, 8]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_plan_costs_what_its_layout_does(schedule: str) -> None:
    plan = PipelinePlan.start([2.0] * 8, 4, schedule=schedule, microbatches=6)
    assert count_plan(plan) == count_bubbles(schedule, 4, 6)
    for way, has_front, layout in [
        ("stay", False, "rebuilt"), ("stay", True, "cached"), ("repartition", True, "repartition"),
    ]:  # fmt: skip
        found = count_plan(plan.frozen_to(4, way, has_front=has_front))  # type: ignore[arg-type]
        expected = count_bubbles(schedule, 4, 6, 2, layout=layout)  # type: ignore[arg-type]
        assert (found.time, found.bubbles, found.idle) == (
            expected.time, expected.bubbles, expected.idle,
        )  # fmt: skip
    # A boundary inside a stage: half of its backward is left.
    assert 16 < count_plan(plan.frozen_to(3, "stay", has_front=False)).time < 18


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, dict[str, Any]]:
    schedule = draw(st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]))
    ranks, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    options: dict[str, Any] = {
        "minibatches": draw(st.integers(1, 3)), "backward": draw(st.sampled_from([1, 2, 0.5])),
        "ranks": ranks,
    }  # fmt: skip
    stages = ranks
    if schedule == "Interleaved1F1B":
        stages *= draw(st.integers(1, 3))
        microbatches -= microbatches % max(1, microbatches // ranks)
    if schedule == "1F1B":
        options["flush"] = draw(st.booleans())
    return schedule, stages, microbatches, draw(st.integers(0, stages - 1)), options


def check(found: Bubbles, stages: int) -> None:
    """No rank does two things at once, and nothing runs before what it needs."""
    ends = {slot.task: slot.end for slot in found.slots}
    assert len(ends) == len(found.slots)
    for rank in range(found.ranks):
        own = sorted((s for s in found.slots if s.rank == rank), key=lambda slot: slot.start)
        assert all(left.end <= right.start + 1e-9 for left, right in pairwise(own))
    for slot in found.slots:
        task = slot.task
        needs = [task._replace(stage=task.stage - 1)] if task.is_forward else []
        if not task.is_forward:
            needs = [task._replace(is_forward=True), task._replace(stage=task.stage + 1)]
        for need in needs:
            if 0 <= need.stage < stages:
                assert ends[need] <= slot.start + 1e-9
    busy = sum(slot.end - slot.start for slot in found.slots)
    assert found.idle == pytest.approx(found.ranks * found.time - busy)
    assert -1e-9 <= found.bubbles <= found.idle + 1e-9
    assert found.time == pytest.approx(max(ends.values()))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_possible_and_complete(
    case: tuple[str, int, int, int, dict[str, Any]],
) -> None:
    schedule, stages, microbatches, frozen, options = case
    total = microbatches * options["minibatches"]
    plain = count_bubbles(schedule, stages, microbatches, 0, **options)
    check(plain, stages)
    assert {slot.task for slot in plain.slots} == {
        Task(s, way, j) for s in range(stages) for way in (True, False) for j in range(total)
    }
    rebuilt = count_bubbles(schedule, stages, microbatches, frozen, **options)
    check(rebuilt, stages)
    assert {slot.task for slot in rebuilt.slots} == {
        slot.task for slot in plain.slots if slot.task.is_forward or slot.task.stage >= frozen
    }
    kept = count_bubbles(schedule, stages, microbatches, frozen, layout="kept", **options)
    check(kept, stages)
    if options.get("flush", True):
        # Doing less in the same order is never later; without a flush the order follows events.
        assert rebuilt.time <= kept.time <= plain.time


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [(4, 2, 8), (2, 3, 6), (4, 2, 10)])
def test_interleaved_order_is_pytorchs(ranks: int, per_rank: int, microbatches: int) -> None:
    rounds = max(1, microbatches // ranks)
    engine: Any = SimpleNamespace(
        n_local_stages=per_rank, pp_group_size=ranks, _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
    )  # fmt: skip
    for rank in range(ranks):
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(engine, rank)
        expected = [
            Task(action.stage_index, action.computation_type == FORWARD, action.microbatch_index)
            for action in theirs
            if action is not None
        ]
        found = rank_order("Interleaved1F1B", rank, ranks, ranks * per_rank, microbatches)
        assert found == expected


# The simulator of many ranks against measured runs, and against what must hold.

MEASURED = [
    # 512 samples, gloo, 2 and 4 processes: directories, samples stay, hit rates by epoch
    (2, False, [0, 0.51, 0.76, 0.86]),
    (4, False, [0, 0.28, 0.46, 0.57]),
    (2, False, [0, 0.54, 0.73, 0.87]),
    (1, False, [0, 1, 1, 1]),
    (4, True, [0, 1, 1, 1]),
    (2, True, [0, 1, 1, 1]),
]


@pytest.mark.parametrize(("directories", "affine", "rates"), MEASURED)
def test_hit_rates_are_those_that_were_measured(directories, affine, rates):
    assert hit_rates(directories, 4, affine=affine) == pytest.approx(rates, abs=0.045)


@given(directories=st.integers(1, 6), seed=st.integers(0, 3))
def test_hit_rates_are_those_of_a_set_for_each_directory(directories, seed):
    draw, samples = random.Random(seed), 2400
    known = [set() for _ in range(directories)]
    for expected in hit_rates(directories, 4, affine=False):
        order = draw.sample(range(samples), samples)
        hits = 0
        for place, sample in enumerate(order):
            here = known[place % directories]
            hits += sample in here
            here.add(sample)
        assert hits / samples == pytest.approx(expected, abs=0.06)


@given(
    nodes=st.integers(1, 200),
    disk=st.floats(1e9, 1e14),
    affine=st.booleans(),
    size=st.floats(1e3, 1e7),
)
def test_what_is_served_and_what_is_fetched_are_the_whole_epoch(nodes, disk, affine, size):
    cluster = replace(CLUSTER, nodes=nodes, disk_bytes=disk)
    job = replace(JOB, activation_bytes=size)
    epoch = weigh(cluster, job, affine=affine)
    served = epoch.disk_bytes / size
    fetched = epoch.network_bytes / job.input_bytes
    assert served + fetched == pytest.approx(job.samples)
    assert epoch.stored_bytes_per_node <= disk
    assert epoch.hit_rate == pytest.approx(served / job.samples)
    if affine:
        assert epoch.stored_bytes <= job.samples * size * 1.001


def test_a_disk_that_is_too_slow_makes_a_cache_slower_than_computing():
    assert weigh(CLUSTER, JOB).speedup > 1.4
    slow = replace(CLUSTER, disk_read=1e9)
    assert weigh(slow, JOB).bound_by == "disk"
    assert weigh(slow, JOB).speedup < 1


@pytest.mark.parametrize("ranks", [1, 8, 1000, 10_000])
@pytest.mark.parametrize("affine", [True, False])
def test_without_trouble_an_epoch_is_what_was_weighed(ranks, affine):
    cluster = machines(ranks)
    calm, expected = (
        weigh(cluster, JOB, affine=affine),
        expect(cluster, JOB, Trouble(), affine=affine),
    )
    # The first batch of all waits for its read.
    assert expected.seconds == pytest.approx(calm.seconds, rel=0.02)
    assert expected.computed_s == pytest.approx(calm.computed_s, rel=1e-6)
    assert expected.cold == 0


def test_a_slow_disk_slows_all_ranks_once_it_cannot_feed_its_own():
    slow = Trouble(slow_nodes=0.05, slow_by=2.0)
    assert slowest(CLUSTER, slow, 1.0, 0.45) == pytest.approx(1.0, rel=0.02)
    assert slowest(CLUSTER, slow, 1.0, 0.9) == pytest.approx(1.8, rel=0.02)


def test_a_new_node_makes_an_epoch_no_slower_than_computing():
    for often in (1, 100, 10_000):
        expected = expect(CLUSTER, JOB, replace(TROUBLE, node_mtbf_s=TROUBLE.node_mtbf_s / often))
        assert expected.speedup >= 1.0
    assert expected.cold > 0.9
    with pytest.raises(ValueError, match="failures"):
        replace(TROUBLE, node_mtbf_s=0.0)
