"""The gate: skipping goes on exactly where whole steps are measured to be faster."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.gate import ServingPolicy, policy
from egeria_cache.gate.policy import StepTimer
from egeria_cache.skip.serve.cut import Step
from tests.helpers.nets import Images, Net, freeze, sgd, train_steps
from tests.helpers.runs import cached, run

STEPS = [
    Step("stem", seconds_per_sample=1e-4, row_bytes=400_000),
    Step("layer1", seconds_per_sample=1e-3, row_bytes=200_000),
    Step("layer2", seconds_per_sample=2e-3, row_bytes=100_000),
]
GROWN = [*STEPS, Step("up", seconds_per_sample=2.05e-3, row_bytes=1_600_000)]
"""The last frozen module expands its input sixteen times, and costs next to nothing."""


@pytest.mark.parametrize(
    ("steps", "overlap", "cut"),
    [
        (GROWN, 0.5, "layer2"), (GROWN, 0.0, "layer2"), (GROWN, 1.0, "up"), (STEPS, 1.0, "layer2"),
        (STEPS[:1], 0.0, None), ([replace(STEPS[0], row_bytes=0), STEPS[1]], 1.0, "layer1"),
        ([replace(STEPS[0], row_bytes=0)], 1.0, None),
    ],
)  # fmt: skip
def test_the_cut_that_saves_most_is_chosen_and_none_while_the_front_is_cheap(steps, overlap, cut):
    found = policy.choose(steps, overlap)
    assert (None if found is None else found.name) == cut


def timer_of(computed, served, num_served=20, *, captured=None, proof_s=0.0):
    """The first steps warm up, and are not counted but for the proof."""
    timer = StepTimer()
    for _ in range(2):
        timer.step("computed", 1000, 8)
    timer.step("captured", 1000 + proof_s, 8, proof_s=proof_s)
    for _ in range(10):
        timer.step("captured", 8 * (captured or computed), 8)
    for number in range(num_served):
        timer.step("served", 8 * served, 8)
        if captured and number % 8 == 0:
            timer.step("computed", 8 * 1.5 * computed, 8)  # it warms up
            timer.step("computed", 8 * computed, 8)
    return timer


@pytest.mark.parametrize("served", [0.1, 0.97, 1.04, 2.0])
def test_skipping_pays_while_a_served_sample_costs_less(served):
    assert timer_of(1.0, served).verdict[0] is (served < 1)


def test_without_experience_skipping_goes_on():
    assert StepTimer().verdict[0]
    assert timer_of(1.0, 9.0, num_served=3).verdict[0]


def test_a_few_slow_steps_do_not_decide():
    timer = timer_of(1.0, 0.7, num_served=24)
    for _ in range(6):
        timer.step("served", 1000, 8)
    assert timer.verdict[0]


def test_what_a_busy_machine_scatters_is_no_reason_to_stop():
    timer = timer_of(1.0, 0.3, num_served=16)
    for _ in range(16):
        timer.step("served", 8 * 1.9, 8)
    assert "1,100,000 us" in timer.verdict[1]
    assert timer.verdict[0]


def test_what_makes_every_step_slower_is_measured_anew_before_serving_stops():
    timer = timer_of(1.0, 1.2, num_served=64)
    assert not timer.verdict[0]
    saved_s = timer.saved_s
    assert timer.measures_anew()
    assert timer.saved_s == saved_s
    assert [timer.wants_control() for _ in range(5)] == [True] * 4 + [False]
    for kind, seconds in [("computed", 2.4)] * 4 + [("served", 1.2)] * 16:
        timer.step(kind, 8 * seconds, 8)
    assert timer.verdict[0]
    assert not timer.measures_anew()


def test_controls_tell_what_a_computed_step_costs_without_capture():
    timer = timer_of(0.5, 1.0, captured=2.0)
    assert not timer.verdict[0]
    assert timer.verdict[1] == "1,000,000 us a sample from the cache, 500,000 computed"


@pytest.mark.parametrize(("timer", "num"), [(StepTimer(), 4), (timer_of(1.0, 0.5), 2)])
def test_controls_become_ever_rarer(timer, num):
    planned = [timer.wants_control() for _ in range(300)]
    expected = [at + more for at in (16, 64, 256) for more in range(num)]
    assert [at for at, wants in enumerate(planned, 1) if wants] == expected


def timer_of_steps(*steps):
    """Steps of eight samples: their kind, and seconds a sample."""
    timer = StepTimer()
    for kind, seconds in steps:
        timer.step(kind, 8 * seconds, 8)
    return timer


FEW = [("captured", 9.0), ("captured", 2.0), ("captured", 2.5), ("served", 0.5), ("served", 0.5)]
SLOW = [*[("computed", 2.0)] * 9, *[("computed", 50.0)] * 5, ("served", 0.5)]


@pytest.mark.parametrize(
    ("timer", "saved"),
    [
        (timer_of(2.0, 0.5, 10), 10 * 8 * 1.5), (timer_of(1.0, 2.0, 10), -10 * 8),
        (timer_of(2.0, 0.5, 10, proof_s=50), 10 * 8 * 1.5 - 50),
        (timer_of(2.0, 0.5, 16, captured=3.0), 16 * 8 * 1.5 - 10 * 8),  # what storing took
        (timer_of(2.0, 0.5, 0, proof_s=50), -50),
        (timer_of_steps(*FEW), 2 * 8 * 1.5),  # all was stored when the first steps were over
        (timer_of_steps(*SLOW), 8 * 1.5),  # what is computed is lost to nobody
    ],
)  # fmt: skip
def test_what_is_saved_is_net_of_all_that_the_cache_took(timer, saved):
    every = ServingPolicy("auto", 0.5)
    every.timers["train", "layer1"], every.beside_s = timer, 2.0
    assert (timer.saved_s, every.saved_s(math.inf)) == pytest.approx((saved, saved - 2))


def test_storing_costs_no_more_than_the_writer_works():
    """What was slower than that was so for another reason."""
    every = ServingPolicy("auto", 0.5)
    every.timers["train", "layer1"] = timer_of(2.0, 0.5, 16, captured=3.0)
    assert every.saved_s(3.0) == pytest.approx(16 * 8 * 1.5 - 3.0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_controls_are_computed_and_change_nothing(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(StepTimer, "verdict", property(lambda self: (True, "goes on")))
    runs = [
        run(tmp_path / gate, gate=gate, data=Images(96), epochs=5, num_workers=workers)
        for gate in ("always", "auto", "never")
    ]
    losses, misses = [one[0] for one in runs], [one[3].misses for one in runs]
    assert losses[0] == losses[1] == losses[2]
    assert misses[0] == 96
    assert misses[1] == 96 + 2 * 8  # of 48 batches that were planned from the cache


def test_a_mixed_batch_that_does_not_pay_stops_skipping(tmp_path, monkeypatch):
    monkeypatch.setattr(StepTimer, "verdict", property(lambda self: (False, "it was slower")))
    assert run(tmp_path, gate="auto", epochs=6, reuse=4)[3].gate == "off: it was slower"


@pytest.mark.parametrize(("gate", "serves"), [("auto", False), ("always", True)])
def test_the_gate_stops_what_does_not_pay_and_says_why(tmp_path, monkeypatch, gate, serves):
    monkeypatch.setattr(StepTimer, "verdict", property(lambda self: (False, "it was slower")))
    with cached(tmp_path, gate=gate) as (model, cache):
        loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None)
        train_steps(model, loader, sgd(model), 6, on_step=lambda _: cache.flush())
        assert cache.stats().hits == (5 * 48 if serves else 2 * 8 * 8)
        assert cache.stats().gate == ("on" if serves else "off") + ": it was slower"
        assert "it was slower" in cache.report()
        assert cache.api.may_store(loader.source.key) is serves
        assert cache.api.is_plain(loader.source.key) is not serves


def test_a_step_is_its_own_batchs_where_the_loop_asks_for_the_next_one_first(tmp_path, monkeypatch):
    """As Accelerate and the HF Trainer do; evaluations of few batches were stopped. One in which
    the model is validated as well tells nothing: serving was stopped for it.
    """
    noted, calls = [], []
    monkeypatch.setattr(StepTimer, "step", lambda *_, **__: noted.append(len(calls)))
    with cached(tmp_path, gate="always") as (model, cache):
        batches = iter(EgeriaLoader(Images(), 8, cache=cache))
        batch = next(batches)
        for ahead in batches:
            calls.append([model(batch[0]) for _ in range(2 if len(calls) == 2 else 1)])
            batch = ahead
    assert noted == [1, 2, 4, 5]


def test_an_epoch_ends_with_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "egeria")
    run(tmp_path, gate="always")
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("epoch")]
    assert len(lines) == 3
    assert "epoch 2 of 'train': boundary layer1, 67 % hits so far" in lines[2]


class Expanding(Net):
    """The last frozen part makes sixteen numbers of each."""

    def __init__(self):
        super().__init__()
        self.layer2 = nn.Conv2d(4, 64, 1)
        self.layer3 = nn.Sequential(nn.Conv2d(64, 8, 3), nn.BatchNorm2d(8))


def expanding():
    torch.manual_seed(0)
    model = Expanding()
    freeze(model, "layer2")
    return model


def test_an_activation_that_grew_is_cut_before_it_grew(tmp_path, monkeypatch):
    """The choice is given, not timed; the losses are those of a run that skips nothing."""
    monkeypatch.setattr(
        policy, "choose", lambda steps, _: next(one for one in steps if one.name == "layer1")
    )
    monkeypatch.setattr(StepTimer, "verdict", property(lambda self: (True, "goes on")))
    results = []
    for gate in ("auto", "never"):
        model = expanding()
        with ActivationCache(model, tmp_path / gate, "layer2", gate=gate) as cache:
            loader = EgeriaLoader(Images(96), 8, shuffle=True, cache=cache, reuse=None, seed=3)
            torch.manual_seed(1)
            results.append(
                train_steps(model, loader, sgd(model), 4, on_step=lambda _: cache.flush())[0]
            )
            assert cache.boundary == "layer2"
            if gate == "auto":
                assert cache.api.views.of(loader.source.key)[0].cut.boundary == "layer1"
                assert cache.stats().hits >= 2 * 96
                assert "cut at 'layer1', whose output is smaller" in cache.stats().gate
    assert results[0] == results[1]
