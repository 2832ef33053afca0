"""SmartPipe's sixteen figures from one rule, and what holds for every schedule on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale import CLUSTER, JOB, hit_rates, weigh
from benchmarks.schedules import LAYOUTS, count_bubbles, count_plan
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
