"""Quotients of times that are measured in turns, and forecasts that fall from front to back."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egeria_cache.inspect.pairs import Share, falling
from egeria_cache.inspect.prospect import Forecast, Prospect, in_order


def test_a_share_survives_what_slows_both_and_what_slows_one():
    rng = random.Random(0)
    plain, served = [], []
    for _ in range(60):
        load = rng.choice([1, 1, 2, 5])  # of the whole machine, for a while
        plain.append(0.010 * load * rng.uniform(0.95, 1.05) + rng.choice([0, 0, 0, 0.05]))
        served.append(0.004 * load * rng.uniform(0.95, 1.05) + rng.choice([0, 0, 0, 0.05]))
    share = Share.of(served, plain)
    assert share.value == pytest.approx(0.4, abs=0.03)
    assert abs(share.value - 0.4) <= share.error < 0.2


def test_the_interval_holds_the_true_median_19_times_in_20():
    rng, held, trials = random.Random(1), 0, 2000
    for _ in range(trials):
        share = Share.of([rng.lognormvariate(0, 0.5) for _ in range(25)], [1.0] * 25)
        held += abs(share.value - 1.0) <= share.error * 1.5
    assert held / trials > 0.95


def test_few_quotients_are_not_known():
    assert Share.of([1.0] * 5, [2.0] * 5).error == float("inf")
    assert Share.of([1.0] * 60, [2.0] * 60) == Share(0.5, 0.0)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 0.5)), min_size=1, max_size=12))
def test_what_their_errors_allow_falls(pairs):
    shares = [Share(*pair) for pair in pairs]
    smoothed = falling(shares)
    assert len(smoothed) == len(shares)
    for before, after in zip(shares, smoothed, strict=True):
        assert abs(before.value - after.value) <= before.error + 1e-9


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_what_is_hardly_known_never_rises(values):
    smoothed = falling([Share(value, 2.0) for value in values])
    assert all(a.value >= b.value - 1e-9 for a, b in itertools.pairwise(smoothed))
    assert sum(share.value for share in smoothed) == pytest.approx(sum(values))


def test_noise_is_ordered_and_a_real_rise_stays():
    noisy = [Share(v, 0.1) for v in (0.9, 0.95, 0.7, 0.75, 0.3)]
    values = [share.value for share in falling(noisy)]
    assert values == sorted(values, reverse=True)
    real = [Share(0.3, 0.01), Share(0.9, 0.01)]
    assert falling(real) == real


def prospect(boundary, served, *, error=0.02, stored=1000.0, refused=None):
    return Prospect(
        boundary=boundary, refused=refused, stored_bytes=stored, forward_s=1e-3,
        served_forward_s=served * 1e-3, forward_error=error, step_s=2e-3,
        served_step_s=served * 2e-3, step_error=error, read_s=1e-5, write_s=1e-5,
    )  # fmt: skip


def of(*prospects, limit_bytes=None):
    return Forecast(
        model="Net", device="cpu", batch_size=8, num_measured=16, num_samples=1000, variants=1,
        limit_bytes=limit_bytes, load_s=0.0, prospects=tuple(in_order(prospects)),
    )  # fmt: skip


def test_the_shortest_later_epochs_are_recommended_and_of_equals_the_smaller_one():
    found = of(prospect("a", 0.8), prospect("b", 0.41, stored=500.0), prospect("c", 0.4))
    assert found.recommended().boundary == "b"
    assert found.recommended().epoch_ratio == pytest.approx(0.41, abs=0.02)
    assert of(prospect("a", 0.8), prospect("b", 0.3)).recommended().boundary == "b"
    limited = of(prospect("a", 0.6, stored=500.0), prospect("b", 0.4, stored=4e4),
                 limit_bytes=1_000_000)  # fmt: skip
    assert limited.recommended().boundary == "a"
    assert of(prospect("a", 1.2), prospect("b", 1.1)).recommended() is None


def test_refused_boundaries_keep_their_place():
    found = of(prospect("a", 0.5), prospect("b", 0.0, refused="no"), prospect("c", 0.51))
    assert [one.boundary for one in found.prospects] == ["a", "b", "c"]
    assert found.prospects[1].refused == "no"
    assert found.prospects[0].served_step_s == pytest.approx(found.prospects[2].served_step_s)
