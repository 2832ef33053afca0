"""The cache can only make training faster: trouble costs one warning, never the run."""

import dataclasses
import gc
import inspect
import logging
import os
import shutil
import threading
import time

import pytest

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader, FrozenFront
from egeria_cache.store.disk.place import in_use_elsewhere
from egeria_core import ControllerConfig, FreezeController
from tests.helpers.nets import Images, frozen_net, make_net, sgd, train_steps
from tests.helpers.runs import assert_same, cached, kill_writer, run


@pytest.fixture
def computed(tmp_path):
    return run(tmp_path / "computed", gate="never")


TROUBLES = {
    "a removed directory": (lambda cache: shutil.rmtree(cache.directory), []),
    "a dead writer": (kill_writer, ["ERROR"]),
}


@pytest.mark.parametrize(("trouble", "errors"), TROUBLES.values(), ids=list(TROUBLES))
def test_trouble_in_mid_run_costs_one_warning(tmp_path, computed, caplog, trouble, errors):
    result = run(
        tmp_path / "a", gate="always", each_step=lambda step, cache: step == 3 and trouble(cache)
    )
    assert_same(result, computed)
    told = [r.levelname for r in caplog.records if r.levelno >= logging.WARNING]
    assert told == [*errors, "WARNING"], caplog.text


# Caches that nobody closes, directories that cannot be listed, closing that is interrupted.


def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def train(directory, *, close):
    model = frozen_net()
    cache = ActivationCache(model, directory, "layer1", gate="always")
    loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None, seed=3)
    train_steps(model, loader, sgd(model), 1)
    if close:
        cache.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_caches_leave_no_descriptor_thread_or_lock(tmp_path, count, close):
    train(tmp_path / "first", close=True)  # what is made once stays
    gc.collect()
    before = held()
    for number in range(count):
        train(tmp_path / f"cache-{number % 3}", close=close)
        gc.collect()
    deadline = time.monotonic() + 120  # an executor's thread ends by itself
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() <= before
    assert not any(in_use_elsewhere(path) for path in tmp_path.glob("cache-*/gen-*"))


@pytest.mark.parametrize("part", ["engine.detach", "readers.close", "store.close"])
def test_an_interrupted_close_is_finished_by_the_next(tmp_path, monkeypatch, part):
    model = frozen_net()
    cache = ActivationCache(model, tmp_path / "cache", "layer1", gate="always")
    loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None, seed=3)
    train_steps(model, loader, sgd(model), 1)
    owner, method = part.split(".")

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(getattr(cache.api, owner), method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    cache.close()
    assert "forward" not in model.__dict__
    assert not any(in_use_elsewhere(path) for path in tmp_path.glob("cache/gen-*"))


# Bad input gets an error that names what, where, and what to do.


def test_a_trainable_boundary_is_named(tmp_path):
    with pytest.raises(BoundaryError, match=r"'layer1\.0\.weight'.*trainable.*requires_grad_"):
        ActivationCache(make_net(), tmp_path, boundary="layer1")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": "-5GB"}, "not a size"),
        ({"limit": "many"}, "not a size"),
        ({"codec": "gzip"}, "codec"),
        ({"ring_batches": 0}, "ring_batches must be at least 1, got 0"),
        ({"audit_rate": 1.5}, r"audit_rate must be in \[0, 1\], got 1.5"),
        ({"gate": "perhaps"}, "gate must be 'auto', 'always' or 'never', got 'perhaps'"),
        ({"gate": "alway"}, "got 'alway'; did you mean 'always'"),
    ],
)
def test_arguments_out_of_range_are_value_errors(tmp_path, kwargs, match):
    with pytest.raises(ValueError, match=match):
        ActivationCache(make_net(), tmp_path, **kwargs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model: ActivationCache(model, "runs", bondary="auto"), "'bondary'.*'boundary'"),
        (lambda model: ActivationCache(model, "runs", 1), "boundary is the name of .* got int 1"),
        (lambda model: ActivationCache(model, "runs", limit=None), "the size limit is bytes"),
        (
            lambda model: ActivationCache(model, "runs", audit_rate="all"),
            "audit_rate must be a num",
        ),
        (lambda model: ActivationCache("runs", model), "takes the model first, then a directory"),
        (lambda model: EgeriaLoader([1], cache="runs"), "cache is an ActivationCache.* got str"),
        (lambda model: EgeriaLoader([1], cache=model), "cache is an ActivationCache.* got Net"),
        (lambda model: EgeriaLoader([1], augmentation_variants=1.5), "whole number, got 1.5"),
        (lambda model: EgeriaLoader([1], reuse="ever"), "reuse, .* whole number, got 'ever'"),
        (
            lambda model: EgeriaLoader([1], bach_size=3),
            "EgeriaLoader has no option 'bach_size'.*'batch_size'",
        ),
        (lambda model: FrozenFront([model], codek="raw"), "FrozenFront has no .*'codec'"),
        (
            lambda model: FreezeController(model, sgd(model), total_stepps=3),
            "FreezeController has no option 'total_stepps'; did you mean 'total_steps'",
        ),
    ],
)
@pytest.mark.cases(12)
def test_arguments_of_another_kind_are_told_by_name(tmp_path, monkeypatch, make, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=match):
        make(make_net())


def test_options_that_are_gone_do_nothing_for_one_release(tmp_path):
    with pytest.warns(FutureWarning, match="verify= does nothing any more: every read"):
        cache = ActivationCache(make_net(), tmp_path, verify="always")
    with pytest.warns(FutureWarning, match=r"fill\(\) does nothing any more: the first epoch"):
        cache.fill()
    with cache, pytest.warns(FutureWarning, match="EgeriaLoader: ragged= does nothing any more"):
        EgeriaLoader([1], cache=cache, ragged={"input_ids": 0})
    model = make_net()
    with pytest.warns(FutureWarning, match="FreezeController: probe_rows= does nothing any more"):
        FreezeController(model, sgd(model), total_steps=10, probe_rows=8).close()


def test_options_of_the_controller_are_those_of_its_configuration():
    told = inspect.signature(FreezeController).parameters
    for field in dataclasses.fields(ControllerConfig):
        assert told[field.name].default == field.default
    cache = inspect.signature(ActivationCache).parameters
    for name, option in inspect.signature(FrozenFront).parameters.items():
        if name in cache and name not in ("directory", "gate"):
            assert option.default == cache[name].default


def test_a_failed_construction_leaves_the_model_as_it_was(tmp_path):
    model = make_net()
    before = set(vars(model))
    with pytest.raises(BoundaryError):
        ActivationCache(model, tmp_path, boundary="nothing")
    assert set(vars(model)) == before


@pytest.mark.parametrize("num_stored", [0, 8])
def test_large_labels_that_the_loop_writes_to_are_not_stored_and_that_is_told(
    tmp_path, monkeypatch, num_stored
):
    monkeypatch.setattr("egeria_cache.batch.batch.SMALL_BYTES", 0)
    with cached(tmp_path) as (model, cache):
        for number, (images, targets) in enumerate(EgeriaLoader(Images(16), 8, cache=cache)):
            targets.clamp_(max=1 if number or not num_stored else 9)
            model(images)
        cache.flush()
        assert cache.stats().num_samples == num_stored
        assert cache.stats().why_not == "the loop writes to leaf '[1]' before the model is run"
