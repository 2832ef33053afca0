"""What people do in notebooks: cells run again, look at objects, fork."""

import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.tables import size
from tests.helpers.nets import Images, frozen_net, sgd, train_steps


def one_line(text):
    assert "\n" not in text
    return text


# ---- what objects tell ------------------------------------------------------------------------


def test_a_cache_tells_what_is_frozen_its_hits_and_its_size(tmp_path):
    model = frozen_net()
    with ActivationCache(model, tmp_path, gate="always") as cache:
        assert one_line(repr(cache)) == (
            "ActivationCache(nothing frozen, 0 of 0 samples from the cache, "
            f"{size(cache.stats().bytes_on_disk)} in {str(tmp_path)!r})"
        )
        cache.set_boundary("layer1")
        loader = EgeriaLoader(Images(noise=0), 8, cache=cache)
        train_steps(model, loader, sgd(model))
        cache.flush()
        train_steps(model, loader, sgd(model))
        text = one_line(repr(cache))
        assert "frozen up to 'layer1', 48 of 96 samples from the cache" in text
        assert f"{size(cache.stats().bytes_on_disk)} in" in text
    assert "closed, " in one_line(repr(cache))


def test_a_loader_tells_what_it_loads_and_where_it_stands(tmp_path):
    plain = EgeriaLoader(Images(), 8)
    assert one_line(repr(plain)) == (
        "EgeriaLoader('train', 48 samples by 8, epoch 0, 0 batches given out, no cache)"
    )
    with ActivationCache(frozen_net(), tmp_path, "layer1") as cache:
        loader = EgeriaLoader(Images(), 8, cache=cache, name="val")
        list(loader)
        next(iter(loader))
        assert one_line(repr(loader)) == (
            "EgeriaLoader('val', 48 samples by 8, epoch 1, 1 batches given out, cached at 'layer1')"
        )


# ---- a cell that is run again -----------------------------------------------------------------


def ours(threads):
    return [thread for thread in threads if thread.name.startswith("egeria")]


def test_a_cell_that_is_run_again_leaves_no_threads_of_the_first_time(tmp_path, caplog):
    caplog.set_level(logging.INFO, "egeria")
    of_other_tests = {thread.ident for thread in ours(threading.enumerate())}
    model, earlier, caches = frozen_net(), set(), []
    for number in range(3):
        cache = ActivationCache(model, tmp_path / str(number), "layer1", gate="always")
        loader = EgeriaLoader(Images(noise=0), 8, cache=cache)
        for _ in range(2):
            train_steps(model, loader, sgd(model))
            cache.flush()
        # How many decode together follows from what that costs just now.
        running = set(ours(threading.enumerate()))
        assert any(thread.ident not in of_other_tests for thread in running)
        assert not earlier & running
        earlier = {thread for thread in running if thread.ident not in of_other_tests}
        caches.append(cache)
    closed = [r for r in caplog.records if "is given to another cache" in r.getMessage()]
    assert [record.levelname for record in closed] == ["INFO", "INFO"]
    assert [cache.api.is_closed for cache in caches] == [True, True, False]
    assert caches[2].stats().hits == 48
    caches[2].close()
    assert {thread.ident for thread in ours(threading.enumerate())} <= of_other_tests
    assert "forward" not in model.__dict__


def test_a_pickled_cache_and_its_loader_serve_the_model_that_came_with_them(tmp_path):
    model = frozen_net()
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(noise=0), 8, shuffle=True, cache=cache, seed=3)
        torch.manual_seed(1)
        optimizer = sgd(model)
        train_steps(model, loader, optimizer)
        cache.flush()
        packed = pickle.dumps((model, loader, cache, torch.get_rng_state()))
        expected, _ = train_steps(model, loader, sgd(model), epochs=2)
    model, loader, cache, generator = pickle.loads(packed)
    assert "not opened yet" in one_line(repr(cache))
    torch.set_rng_state(generator)
    with cache:
        losses, _ = train_steps(model, loader, sgd(model), epochs=2)
        assert cache.boundary == "layer1"
        assert cache.stats().hits > 0
    assert losses == pytest.approx(expected, rel=1e-5)


# ---- fork -------------------------------------------------------------------------------------

FORK = """
    import faulthandler, os, tempfile
    import torch
    from egeria_cache import ActivationCache, EgeriaLoader
    from tests.helpers.nets import Images, frozen_net, sgd, train_steps

    torch.set_num_threads(1)  # a forked child has no OpenMP threads: without a cache neither
    model = frozen_net()
    cache = ActivationCache(model, tempfile.mkdtemp(), "layer1", gate="always")
    loader = EgeriaLoader(Images(noise=0), 8, cache=cache)
    optimizer = sgd(model)
    for _ in range(2):
        train_steps(model, loader, optimizer)
        cache.flush()
    assert cache.stats().hits == 48

    def fork(child):
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(60, exit=True)
            try:
                child()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run_script(body):
    script = textwrap.dedent(FORK) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_child_may_take_the_cache_up():
    run_script(
        """
        def child():
            assert "forked" in cache.stats().why_not
            assert cache.reopen()
            assert not cache.reopen()
            for _ in range(2):
                train_steps(model, loader, optimizer)
                cache.flush()
            assert cache.stats().hits >= 48
            assert cache.stats().why_not is None
            cache.close()

        assert not cache.reopen()
        assert fork(child) == 0
        train_steps(model, loader, optimizer)
        assert cache.stats().hits == 96
        cache.close()
        """
    )
