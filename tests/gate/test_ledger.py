"""The gate: skipping goes on exactly where whole steps are measured to be faster."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.gate.gate import CostMeter, Costs
from egeria_cache.gate.ledger import Ledger
from egeria_cache.skip.serve.cut import Step
from tests.helpers.nets import Images, Net, freeze, make_net, sgd, train_steps


def ledger_of(computed, served, num_served=20):
    ledger = Ledger()
    for _ in range(10):
        ledger.computed(computed * 8, 8)
    for _ in range(num_served):
        ledger.served(served * 8, 8)
    return ledger


@pytest.mark.parametrize(
    ("served", "pays"), [(0.1, True), (0.97, True), (1.04, False), (2.0, False)]
)
def test_skipping_pays_while_a_served_sample_costs_less(served, pays):
    assert ledger_of(1.0, served).verdict[0] is pays


def test_without_experience_skipping_goes_on():
    assert Ledger().verdict[0]
    assert ledger_of(1.0, 9.0, num_served=3).verdict[0]


def test_a_few_slow_steps_do_not_decide():
    ledger = ledger_of(1.0, 0.5, num_served=60)
    for _ in range(4):
        ledger.served(1000, 8)
    assert ledger.verdict[0]


def test_the_first_step_of_each_epoch_counts():
    ledger = ledger_of(1.0, 0.9, num_served=20)
    for _ in range(4):
        ledger.served(3 * 8, 8)
    assert not ledger.verdict[0]


def test_controls_tell_what_a_computed_step_costs_without_capture():
    ledger = ledger_of(2.0, 1.0)
    assert ledger.verdict[0]
    planned = [ledger.wants_control() for _ in range(40)]
    assert sum(planned) == 10
    assert not any(a and b for a, b in itertools.pairwise(planned))
    for _ in range(6):
        ledger.computed(0.5 * 8, 8, is_control=True)
    assert not ledger.wants_control()
    assert not ledger.verdict[0]
    assert "500000 us computed" in ledger.verdict[1]


def test_nothing_is_computed_for_comparison_before_something_was_served():
    assert not any(Ledger().wants_control() for _ in range(9))


@pytest.mark.parametrize("workers", [0, 2])
def test_controls_are_computed_and_change_nothing(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(Ledger, "verdict", property(lambda self: (True, "goes on")))
    losses, misses = [], []
    for gate in ("always", "auto", "never"):
        model = make_net()
        freeze(model, "layer1")
        with ActivationCache(model, tmp_path / gate, "layer1", gate=gate) as cache:
            loader = EgeriaLoader(
                Images(96), 8, shuffle=True, cache=cache, reuse=None, seed=3, num_workers=workers,
                generator=torch.Generator().manual_seed(5),
            )  # fmt: skip
            losses.append(
                train_steps(model, loader, sgd(model), 5, on_step=lambda _: cache.flush())[0]
            )
            misses.append(cache.stats().misses)
    assert losses[0] == losses[1] == losses[2]
    assert misses[0] == 96
    assert 96 + 6 * 8 <= misses[1] <= 96 + 10 * 8  # some more are planned before the sixth is timed


def test_saved_time_is_the_difference_to_computing():
    assert ledger_of(2.0, 0.5, 10).saved_s == pytest.approx(10 * 8 * 1.5)
    assert ledger_of(1.0, 2.0, 10).saved_s == pytest.approx(-10 * 8)


@pytest.mark.parametrize(("gate", "serves"), [("auto", False), ("always", True)])
def test_the_gate_stops_what_does_not_pay_and_says_why(tmp_path, monkeypatch, gate, serves):
    monkeypatch.setattr(Ledger, "verdict", property(lambda self: (False, "it was slower")))
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate=gate) as cache:
        loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None)
        train_steps(model, loader, sgd(model), 4, on_step=lambda _: cache.flush())
        assert (cache.stats().hits > 0) is serves
        assert "it was slower" in cache.stats().gate
        assert ("off" in cache.stats().gate) is not serves
        assert "it was slower" in cache.report()


def test_an_epoch_ends_with_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "egeria")
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None)
        train_steps(model, loader, sgd(model), 3, on_step=lambda _: cache.flush())
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("epoch")]
    assert len(lines) == 3
    assert "epoch 2 of 'train': boundary layer1, 67 % hits so far" in lines[2]


class Expanding(Net):
    """The last frozen part makes sixteen numbers of each."""

    def __init__(self):
        super().__init__()
        self.layer2 = nn.Conv2d(4, 64, 1)
        self.layer3 = nn.Sequential(nn.Conv2d(64, 8, 3), nn.BatchNorm2d(8))


def dear(meter):
    """Reading a byte costs more than computing it."""
    return Costs(fetch_s_per_byte=1.0, fetch_s_per_sample=0.0)


def expanding():
    torch.manual_seed(0)
    model = Expanding()
    freeze(model, "layer2")
    return model


@pytest.mark.parametrize(
    ("verdict", "boundary"), [((True, "goes on"), "layer1"), ((False, "it was slower"), "layer2")]
)
def test_an_activation_that_grew_is_cut_before_it_grew_and_whole_steps_confirm(
    tmp_path, monkeypatch, verdict, boundary
):
    """Costs are given, not measured; the losses are those of a run that skips nothing."""
    monkeypatch.setattr(CostMeter, "costs", property(dear))
    monkeypatch.setattr(
        CostMeter, "profile",
        lambda meter, steps: [replace(s, seconds_per_sample=2e4 if s.name == "layer1" else 1e4)
                              for s in steps],
    )  # fmt: skip
    results = []
    for gate in ("auto", "never"):
        model = expanding()
        with ActivationCache(model, tmp_path / gate, "layer2", gate=gate) as cache:
            judged = {"done": False}

            def judge(ledger, judged=judged, cache=cache):
                """At the earlier cut, once: `verdict`; else go on."""
                if cache._pilot._gate.earlier and ledger.is_served_enough:
                    judged["done"] = True
                    return verdict
                return True, "goes on"

            monkeypatch.setattr(Ledger, "verdict", property(judge))
            loader = EgeriaLoader(Images(96), 8, shuffle=True, cache=cache, reuse=None, seed=3)
            torch.manual_seed(1)
            results.append(
                train_steps(model, loader, sgd(model), 6, on_step=lambda _: cache.flush())[0]
            )
            assert cache.boundary == "layer2"
            if gate == "auto":
                assert judged["done"]
                assert cache.port.views(loader.source.key)[0].cut.boundary == boundary
                assert cache.stats().hits >= 3 * 96
                text = cache.stats().gate
                assert "'train' at 'layer1'" in text
                if verdict[0]:
                    assert "'layer1', before the frozen boundary 'layer2', saves" in text
                else:
                    assert "gone back from 'layer1': it was slower" in text
                assert text in cache.report()
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_costs_are_measured_while_training(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "verdict", property(lambda self: (True, "goes on")))
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1") as cache:
        loader = EgeriaLoader(Images(96), 8, cache=cache, reuse=None)
        train_steps(model, loader, sgd(model), 2, on_step=lambda _: cache.flush())
        costs, meter = cache._pilot.meter.costs, cache._pilot.meter
        assert meter.num_reads > 3
        assert costs.fetch_s_per_byte > 0
        assert costs.write_s_per_byte > 0
        (step,) = meter.profile([Step("layer1", 1.0, 100)])
        assert 0 < step.seconds_per_sample < 1.0
        assert "reads: " in cache.stats().gate
        assert "s per GB" in cache.report()


@pytest.mark.parametrize("called", [False, True])
def test_a_model_that_is_never_called_with_the_batches_is_pointed_out_once(
    tmp_path, caplog, called
):
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(), 1, cache=cache, reuse=None)
        for _ in range(3):
            for images, _ in loader:
                if called:
                    model(images)
    assert caplog.text.count("4 batches were yielded and the model was not called") == (not called)
