"""The simulator of many ranks against measured runs, and against what must hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
