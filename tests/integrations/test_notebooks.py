"""What people do in notebooks: cells run again, look at objects, fork, press Ctrl-C."""

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

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
    assert [cache._status.is_closed for cache in caches] == [True, True, False]
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
    import faulthandler, os, sys, tempfile, threading
    import torch
    from torch.nn import functional as F
    from egeria_cache import ActivationCache, EgeriaLoader
    from tests.helpers.nets import Images, freeze, frozen_net, sgd, train_steps

    def same(left, right):
        assert len(left) == len(right), (left, right)
        assert all(abs(a - b) < 1e-5 for a, b in zip(left, right)), (left, right)

    torch.set_num_threads(1)  # a forked child has no OpenMP threads: without a cache neither
    WORKERS = int(sys.argv[1])
    model = frozen_net()
    cache = ActivationCache(model, tempfile.mkdtemp(), "layer1", gate="always")
    loader = EgeriaLoader(Images(noise=0), 8, cache=cache, num_workers=WORKERS)
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


def run_script(body, *args):
    script = textwrap.dedent(FORK) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_child_never_waits_for_what_threads_held_when_it_was_forked():
    run_script(
        """
        generation = cache._status.views.of(loader.source.key)[0].generation
        found, locks = [generation, cache._store, *vars(cache._store).values()], []
        found += vars(generation).values()
        for thing in found:
            for lock in getattr(thing, "__dict__", {}).values():
                lock = getattr(lock, "_lock", lock)  # a condition may stand on another's
                if hasattr(lock, "acquire") and all(lock is not other for other in locks):
                    locks.append(lock)
        assert len(locks) >= 3, locks
        held, done = threading.Event(), threading.Event()

        def hold():
            for lock in locks:
                lock.acquire()
            held.set()
            done.wait()
            for lock in locks:
                lock.release()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()

        def child():
            assert "48 of 96" in repr(cache), repr(cache)
            cache.flush()
            train_steps(model, loader, optimizer)
            cache.report()
            freeze(model, "stem")
            cache.set_boundary("stem")
            train_steps(model, loader, optimizer)
            cache.set_boundary(None)
            freeze(model, "layer1")
            again = ActivationCache(model, cache.directory, "layer1", gate="always")
            loader2 = EgeriaLoader(Images(noise=0), 8, cache=again)
            for _ in range(2):
                train_steps(model, loader2, optimizer)
                again.flush()
            assert again.stats().hits > 0
            again.close()
            cache.close()

        code = fork(child)
        done.set()
        thread.join()
        assert code == 0
        train_steps(model, loader, optimizer)
        assert cache.stats().hits == 96
        cache.close()
        """,
        0,
    )


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
        """,
        0,
    )


# ---- Ctrl-C -----------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 8, 15])
def test_a_loop_under_tqdm_that_was_interrupted_is_run_again(tmp_path, workers, stop):
    tqdm = pytest.importorskip("tqdm").tqdm

    def run(model, loader, flush=lambda: None):
        optimizer, losses, num_interrupts = sgd(model), [], 0
        torch.manual_seed(5)
        for _ in range(2):  # the cell, and the cell again
            try:
                for _ in range(3):
                    for images, targets in tqdm(loader, disable=None, leave=False):
                        loss = F.cross_entropy(model(images), targets)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        losses.append(loss.item())
                        if len(losses) == stop:
                            signal.raise_signal(signal.SIGINT)
                    flush()
            except KeyboardInterrupt:
                num_interrupts += 1
                flush()
        gc.collect()
        assert num_interrupts == 1
        return losses

    plain = frozen_net()
    for module in (plain.stem, plain.layer1):
        module.eval()
        module.train = lambda mode=True: None
    expected = run(plain, DataLoader(Images(noise=0), 8, shuffle=True, num_workers=workers))
    model = frozen_net()
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(noise=0), 8, shuffle=True, cache=cache, num_workers=workers)
        losses = run(model, loader, cache.flush)
        assert cache.stats().hits > 48
    assert losses == pytest.approx(expected, rel=1e-4)
