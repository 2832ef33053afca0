"""The gate: skipping goes on exactly where whole steps are measured to be faster."""

from __future__ import annotations

import logging

import pytest
from nets import Images, freeze, make_net, sgd, train_steps

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.gate import Decision
from egeria_cache.ledger import Ledger


def ledger_of(computed, served, num_served=20):
    ledger = Ledger()
    for _ in range(10):
        ledger.computed(computed * 8, 8)
    for _ in range(num_served):
        ledger.served(served * 8, 8)
    return ledger


@pytest.mark.parametrize(("served", "pays"), [(0.1, True), (1.0, True), (1.04, True), (1.1, False)])
def test_skipping_pays_while_a_served_sample_costs_no_more(served, pays):
    assert ledger_of(1.0, served).verdict[0] is pays


def test_without_experience_skipping_goes_on():
    assert Ledger().verdict[0]
    assert ledger_of(1.0, 9.0, num_served=3).verdict[0]


def test_a_few_slow_steps_do_not_decide():
    ledger = ledger_of(1.0, 0.5, num_served=60)
    for _ in range(20):
        ledger.served(1000, 8)
    assert ledger.verdict[0]


def test_saved_time_is_the_difference_to_computing():
    assert ledger_of(2.0, 0.5, 10).saved_s == pytest.approx(10 * 8 * 1.5)
    assert ledger_of(1.0, 2.0, 10).saved_s == pytest.approx(-10 * 8)


@pytest.mark.parametrize(("gate", "serves"), [("auto", False), ("always", True)])
def test_the_gate_stops_what_does_not_pay_and_says_why(tmp_path, monkeypatch, gate, serves):
    monkeypatch.setattr(Ledger, "verdict", property(lambda self: (False, "it was slower")))
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate=gate) as cache:
        loader = EgeriaLoader(Images(), 8, cache=cache)
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
        loader = EgeriaLoader(Images(), 8, cache=cache)
        train_steps(model, loader, sgd(model), 3, on_step=lambda _: cache.flush())
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("epoch")]
    assert len(lines) == 3
    assert "epoch 2 of 'train': boundary layer1, 67 % hits so far" in lines[2]


def test_an_earlier_cut_is_taken_when_the_cost_model_says_so(tmp_path, monkeypatch):
    def earlier(steps, costs, mode="auto"):
        names = [step.name for step in steps]
        assert names[-1] in ("layer2", "stem")
        return Decision("stem", 1e-3, "a smaller output")

    monkeypatch.setattr("egeria_cache.cache.choose", earlier)
    results = []
    for gate in ("auto", "never"):
        model = make_net()
        freeze(model, "layer2")
        with ActivationCache(model, tmp_path / gate, "layer2", gate=gate) as cache:
            monkeypatch.setattr(Ledger, "verdict", property(lambda self: (True, "goes on")))
            loader = EgeriaLoader(Images(), 8, shuffle=True, cache=cache, seed=3)
            results.append(
                train_steps(model, loader, sgd(model), 4, on_step=lambda _: cache.flush())[0]
            )
            assert cache.boundary == "layer2"
            if gate == "auto":
                assert cache.stats().hits >= 2 * 48
                assert {v.cut.boundary for v in cache.views(loader.source.key)} == {"stem"}
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("called", [False, True])
def test_a_model_that_is_never_called_with_the_batches_is_pointed_out_once(
    tmp_path, caplog, called
):
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(), 1, cache=cache)
        for _ in range(3):
            for images, _ in loader:
                if called:
                    model(images)
    assert caplog.text.count("64 batches were yielded and the model was not called") == (not called)
