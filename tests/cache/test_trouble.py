"""The cache can only make training faster: trouble costs one warning, never the run."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch

from egeria_cache import ActivationCache, BoundaryMoved, EgeriaLoader
from tests.helpers.nets import Images, freeze, make_net, sgd, train_steps
from tests.helpers.runs import assert_same, kill_writer, run


def train(directory, trouble=None, *, epochs=3, at=7, limit="1GB", data=None, **loader_kwargs):
    model = make_net()
    freeze(model, "layer1")
    with ActivationCache(model, directory, "layer1", gate="always", limit=limit) as cache:
        loader = EgeriaLoader(
            data or Images(), 8, shuffle=True, cache=cache, reuse=None, seed=3, **loader_kwargs
        )

        def on_step(step):
            cache.flush()
            if trouble and step == at:
                trouble(cache)

        losses, gradients = train_steps(model, loader, sgd(model), epochs, on_step)
        return losses, gradients, model.state_dict(), cache.stats()


@pytest.fixture
def computed(tmp_path):
    return run(tmp_path / "computed", gate="never")


def test_a_removed_directory_costs_one_warning(tmp_path, computed, caplog):
    result = train(tmp_path / "a", lambda cache: shutil.rmtree(tmp_path / "a"), at=3)
    assert_same(result, computed)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1, caplog.text


def test_a_dead_writer_costs_one_warning(tmp_path, computed, caplog):
    result = train(tmp_path / "a", kill_writer, at=2)
    assert_same(result, computed)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1, caplog.text


def test_a_full_limit_gives_mixed_batches(tmp_path, computed):
    result = train(tmp_path / "a", limit=300_000)
    torch.testing.assert_close(result[0], computed[0], rtol=1e-5, atol=1e-6)
    stats = result[3]
    assert stats.bytes_on_disk <= 300_000


def test_a_controller_at_an_uncuttable_module_costs_one_warning(tmp_path, caplog):
    class Centring(type(make_net())):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    torch.manual_seed(0)
    model = Centring()
    freeze(model, "layer1")
    with ActivationCache(model, tmp_path, gate="always") as cache:
        cache.on_boundary_moved(BoundaryMoved(1, "layer1", None, "converged"))
        loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None)
        train_steps(model, loader, sgd(model), 2)
        assert cache.stats().hits == 0
        assert cache.stats().why_not
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1, caplog.text


class Unrepeatable(Images):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image + self.num_loaded, target


def test_a_sample_that_differs_each_time_is_not_cached_and_the_leaf_is_named(tmp_path, caplog):
    result = train(tmp_path, data=Unrepeatable())
    assert result[3].hits == 0
    assert "'[0]'" in caplog.text
    assert caplog.text.count("is not cached") == 1
