"""Quotients of times that are measured in turns, and what is recommended."""

from __future__ import annotations

import random

import pytest

from egeria_cache.inspect.plan import Forecast, Prospect, Share


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


def prospect(boundary, served, *, error=0.02, stored=1000.0, refused=None):
    return Prospect(
        boundary=boundary, refused=refused, stored_bytes=stored, forward_s=1e-3,
        served_forward_s=served * 1e-3, forward_error=error, step_s=2e-3,
        served_step_s=served * 2e-3, step_error=error, read_s=1e-5, write_s=1e-5,
    )  # fmt: skip


def of(*prospects, limit_bytes=None):
    return Forecast(
        model="Net", device="cpu", batch_size=8, num_measured=16, num_samples=1000,
        limit_bytes=limit_bytes, load_s=0.0, prospects=prospects,
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
