"""The cost model: it chooses the cut that saves most, or none, and says why."""

from __future__ import annotations

import pytest

from egeria_cache.cut import Step
from egeria_cache.gate import Costs, choose

STEPS = [
    Step("stem", seconds_per_sample=1e-4, row_bytes=400_000),
    Step("layer1", seconds_per_sample=1e-3, row_bytes=200_000),
    Step("layer2", seconds_per_sample=2e-3, row_bytes=100_000),
]
FREE = Costs(fetch_s_per_byte=0.0, fetch_s_per_sample=0.0)


def test_the_latest_cut_wins_where_reading_is_free():
    assert choose(STEPS, FREE).boundary == "layer2"
    assert choose(STEPS, FREE).saved_s == pytest.approx(2e-3)


def test_an_earlier_cut_wins_where_the_later_activation_is_larger():
    grown = [*STEPS, Step("up", seconds_per_sample=2.1e-3, row_bytes=1_000_000)]
    costs = Costs(fetch_s_per_byte=1e-9, fetch_s_per_sample=0.0, overlap=0.0)
    decision = choose(grown, costs)
    assert decision.boundary == "layer2"
    assert "before the frozen boundary 'up'" in decision.reason


def test_nothing_is_cut_while_the_front_is_cheap():
    decision = choose(STEPS[:1], Costs(fetch_s_per_byte=1e-9, overlap=0.0))
    assert decision.boundary is None
    assert "100 us" in decision.reason


def test_work_of_the_loader_counts_as_saved():
    slow = Costs(fetch_s_per_byte=1e-9, overlap=0.0, sample_s=0.01)
    assert choose(STEPS[:1], slow).boundary == "stem"


def test_what_does_not_fit_under_the_limit_is_not_chosen():
    decision = choose(STEPS, Costs(fetch_s_per_byte=0.0, free_bytes_per_sample=150_000))
    assert decision.boundary == "layer2"
    decision = choose(STEPS[:2], Costs(free_bytes_per_sample=1_000))
    assert decision.boundary is None
    assert "200000 bytes" in decision.reason


@pytest.mark.parametrize(("mode", "boundary"), [("always", "layer2"), ("never", None)])
def test_the_user_may_decide(mode, boundary):
    costs = Costs(fetch_s_per_byte=1.0) if mode == "always" else FREE
    decision = choose(STEPS, costs, mode)
    assert decision.boundary == boundary
    assert mode in decision.reason


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="sometimes"):
        choose(STEPS, FREE, "sometimes")
    with pytest.raises(ValueError, match="module"):
        choose([], FREE)
    with pytest.raises(ValueError, match="overlap"):
        Costs(overlap=2.0)
    with pytest.raises(ValueError, match="negative"):
        Costs(sample_s=-1.0)
