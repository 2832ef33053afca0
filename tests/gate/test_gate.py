"""The cost model: it chooses the cut that saves most, or none, and says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from egeria_cache.gate.gate import CostMeter, Costs, Gate, choose
from egeria_cache.skip.serve.cut import Step

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


def test_what_has_no_rows_is_not_chosen():
    assert choose([replace(STEPS[0], row_bytes=0), STEPS[1]], FREE).boundary == STEPS[1].name
    assert choose([replace(STEPS[0], row_bytes=0)], FREE).boundary is None


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="module"):
        choose([], FREE)
    with pytest.raises(ValueError, match="overlap"):
        Costs(overlap=2.0)
    with pytest.raises(ValueError, match="negative"):
        Costs(write_s_per_byte=-1.0)


# ---- measured costs ---------------------------------------------------------------------------

GROWN = [*STEPS, Step("up", seconds_per_sample=2.1e-3, row_bytes=1_600_000)]
"""The last frozen module expands its input sixteen times, and costs next to nothing."""


def metered(seconds_per_byte=1e-8, lookup_s=0.0, sizes=(1_600_000,), *, waited=None, count=3):
    meter = CostMeter(max_overlap=0.5)
    for size in sizes:
        for _ in range(count):
            meter.read(10 * (lookup_s + size * seconds_per_byte), 10, size)
            if waited is not None:
                meter.waited(10 * waited, 10)
    return meter


def test_reading_is_laid_to_bytes_and_to_samples_as_two_sizes_show():
    costs = metered(2e-9, 30e-6, sizes=(1_000, 1_000_000)).costs
    assert costs.fetch_s_per_byte == pytest.approx(2e-9)
    assert costs.fetch_s_per_sample == pytest.approx(30e-6)


def test_one_size_is_laid_to_its_bytes_but_for_the_lookup():
    costs = metered(2e-9, 30e-6, sizes=(1_000_000,)).costs
    assert costs.fetch_s_per_sample == pytest.approx(20e-6)
    assert costs.fetch_s(1_000_000) == pytest.approx(0.5 * (30e-6 + 2e-3))


@pytest.mark.parametrize(
    ("waited", "overlap"), [(None, 0.5), (0.0, 0.5), (0.012, 0.25), (0.016, 0.0), (0.1, 0.0)]
)
def test_what_the_training_thread_waits_for_is_not_overlapped(waited, overlap):
    assert metered(1e-8, waited=waited).costs.overlap == pytest.approx(overlap)


def test_a_profile_is_corrected_by_what_computing_costs_since():
    meter = metered()
    for seconds in (0.1, 0.042, 0.042, 0.042, 0.01):
        meter.computed("up", seconds, 10)
    corrected = meter.profile(GROWN)
    assert [step.seconds_per_sample for step in corrected] == pytest.approx(
        [2e-4, 2e-3, 4e-3, 4.2e-3]
    )
    assert meter.profile(STEPS) == STEPS


def test_the_gate_waits_until_reading_was_measured():
    meter = metered(count=2)
    gate = Gate(meter)
    assert gate.look(GROWN, was_served=False) is None
    assert not gate.is_settled
    meter.read(0.16, 10, 1_600_000)
    assert gate.look(GROWN, was_served=False) == "layer2"
    assert "'layer2', before the frozen boundary 'up'" in str(gate)
    assert "3 reads" in str(gate)
    assert "9.99 s per GB" in str(gate)


def test_where_reading_is_cheap_the_frozen_boundary_stays():
    gate = Gate(metered(1e-12))
    assert gate.look(GROWN, was_served=False) is None
    assert "'up', the frozen boundary, saves" in str(gate)


def test_the_gate_looks_again_once_when_steps_were_served():
    meter = metered(1e-12)
    gate = Gate(meter)
    assert gate.look(GROWN, was_served=False) is None
    for _ in range(64):
        meter.read(10 * 1_600_000 * 1e-8, 10, 1_600_000)
    assert gate.look(GROWN, was_served=False) is None
    assert gate.look(GROWN, was_served=True) == "layer2"


def test_a_filled_store_is_left_only_for_what_pays_for_filling_another():
    """A fifth of what it saves now is the price."""
    meter = metered(4e-10, count=3)  # 1.6 MB: 0.32 ms a sample; 0.1 MB: 0.02 ms
    steps = [*STEPS, Step("up", seconds_per_sample=2.2e-3, row_bytes=1_600_000)]
    assert Gate(meter).look(steps, was_served=True) is None
    dearer = metered(6e-9)
    assert Gate(dearer).look(steps, was_served=True) == "layer2"


def test_the_gate_moves_at_most_once_and_back_at_most_once():
    gate = Gate(metered())
    assert not gate.undo("nothing to undo")
    assert gate.look(GROWN, was_served=False) == "layer2"
    assert gate.look(GROWN, was_served=True) is None
    assert gate.undo("it was slower")
    assert "gone back from 'layer2': it was slower" in str(gate)
    assert gate.look(GROWN, was_served=True) is None
    assert not gate.undo("again")
    gate.reset()
    assert gate.look(GROWN, was_served=False) == "layer2"


def test_writing_is_spread_over_the_epochs_that_read():
    steps = STEPS[-1:]
    free = choose(steps, FREE).saved_s
    costs = Costs(fetch_s_per_byte=0, fetch_s_per_sample=0, write_s_per_byte=1e-9)
    assert choose(steps, costs).saved_s == pytest.approx(free - 1e-9 * 100_000 / 5)


def test_figures_are_given_whatever_was_measured():
    """A small read that was slow by chance, and a large one that was fast."""
    meter = CostMeter()
    meter.read(1e-3, 1, 1000)
    meter.read(1e-9, 1, 1500)
    assert meter.costs.fetch_s_per_byte == 0.0
    assert "2 reads" in str(meter)
