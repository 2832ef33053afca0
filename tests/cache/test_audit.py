"""Audits: hits are recomputed from the raw sample, and a stale one is found and never served."""

from __future__ import annotations

import math

import pytest
import torch

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.cache import engine_callbacks
from tests.helpers.nets import Images, freeze, make_net, sgd, train_steps
from tests.helpers.runs import assert_same, run


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_audits_change_nothing(tmp_path, rate, workers):
    settings = {"epochs": 3, "num_workers": workers}
    audited = run(tmp_path / "a", gate="always", cache_kwargs={"audit_rate": rate}, **settings)
    computed = run(tmp_path / "b", gate="never", **settings)
    assert_same(audited, computed)
    assert audited[3].audit_failures == 0
    if rate == 1.0:
        assert audited[3].audited == audited[3].hits == 96
    else:
        assert 0 < audited[3].audited < 20


@pytest.mark.parametrize(("share", "per_epoch"), [(0.0, 0), (math.inf, 2)])
def test_however_low_the_rate_hits_are_audited_as_far_as_that_takes_little_of_the_time(
    tmp_path, monkeypatch, share, per_epoch
):
    monkeypatch.setattr(engine_callbacks, "MAX_COST", share)
    result = run(tmp_path, gate="always", cache_kwargs={"audit_rate": 1e-9})
    num_epochs = result[3].hits // 48
    assert result[3].audited == max(1, per_epoch * num_epochs)  # of six batches each
    assert result[3].refetched == result[3].audited


@pytest.mark.parametrize("move", [lambda x: x.to("cpu"), lambda x: x.float() * 1.0])
def test_an_edited_sample_is_found_and_training_goes_on_with_the_new_one(tmp_path, caplog, move):
    class Trusted(Images):
        fingerprint = "always the same, it says"

    data, model = Trusted(noise=0), make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate="always", audit_rate=1.0) as cache:
        loader = EgeriaLoader(data, 8, cache=cache, reuse=None)
        model.eval()
        for epoch in range(3):
            start = 0
            if epoch == 1:
                data.images += 1.0  # without a sample_version nobody can know, but an audit sees it
            for images, _ in loader:
                with torch.no_grad():
                    outputs = model(move(images))
                    expected = model(data.images[start : start + 8])
                assert torch.equal(outputs, expected)
                start += 8
            cache.flush()
        stats = cache.stats()
    assert stats.audit_failures == 1
    assert stats.hits <= 48
    assert "audit failed" in stats.why_not
    assert caplog.text.count("AUDIT FAILED") == 1
    assert "at 'layer1' differs by" in caplog.text
    assert "sample_version" in caplog.text


def test_the_default_rate_audits_one_hit_in_a_thousand(tmp_path, monkeypatch):
    monkeypatch.setattr(
        engine_callbacks, "MAX_COST", 0.0
    )  # the floor would add some while they take little
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None)
        train_steps(model, loader, sgd(model), 60, on_step=lambda _: cache.flush())
        assert 0 < cache.stats().audited < 15
        assert cache.stats().audit_failures == 0
