"""Caches that nobody closes, directories that cannot be listed, closing that is interrupted."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from types import SimpleNamespace

import pytest

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.store.disk.claims import in_use_elsewhere
from tests.helpers.nets import Images, freeze, make_net, sgd, train_steps
from tests.helpers.runs import assert_same, run


def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def train(directory, *, close):
    model = make_net()
    freeze(model, "layer1")
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


def test_an_epoch_ends_well_though_the_directory_cannot_be_listed(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    expected = run(tmp_path / "one", gate="always")

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    # Of that module alone: pathlib lists directories in the same way in later Pythons.
    mine = SimpleNamespace(**vars(os) | {"scandir": refuse})
    monkeypatch.setattr("egeria_cache.store.disk.budget.os", mine)
    assert_same(run(tmp_path / "two", gate="always"), expected)


@pytest.mark.parametrize("part", ["_engine.detach", "_readers.close", "_store.close"])
def test_an_interrupted_close_is_finished_by_the_next(tmp_path, monkeypatch, part):
    model = make_net()
    freeze(model, "layer1")
    cache = ActivationCache(model, tmp_path / "cache", "layer1", gate="always")
    loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None, seed=3)
    train_steps(model, loader, sgd(model), 1)
    owner, method = part.split(".")

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(getattr(cache, owner), method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    cache.close()
    assert "forward" not in model.__dict__
    assert not any(in_use_elsewhere(path) for path in tmp_path.glob("cache/gen-*"))
