"""Ctrl-C in the middle of a step, and going on in the same process, as in a notebook."""

from __future__ import annotations

import copy
import functools
import random
import signal

import pytest
import torch

from tests.helpers.skip_harness import Harness, assert_same, freeze, step
from tests.skip.test_front import BATCHES, DATA, Net, call, held


@pytest.fixture
def alarm():
    """Raise KeyboardInterrupt after so many seconds, wherever the main thread is then."""
    armed = False

    def ring(number, frame):
        if armed:
            raise KeyboardInterrupt

    def interrupted(run, delay_s):
        nonlocal armed
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            run()
            armed = False
        except KeyboardInterrupt:
            armed = False
            return True
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    before = signal.signal(signal.SIGALRM, ring)
    yield interrupted
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
# The interrupt may come within a callback of the garbage collector, where nobody can catch it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_after_an_interrupted_one_is_as_if_there_had_been_none(alarm, count):
    rng, num_interrupted = random.Random(count), 0
    for trial in range(count):
        if trial % 10 == 0:
            torch.manual_seed(0)
            model = Net().train()
            model.encoder.drop = 0
            freeze(model, "encoder.layers.0", "encoder.layers.1")
            plain = copy.deepcopy(model)
            held(plain)
            harness = Harness(model, DATA)
            harness.engine.set_boundary("encoder.layers.1")
        ids = BATCHES[trial % 3]
        run = functools.partial(step, model, call, harness.batch(ids), trial)
        num_interrupted += alarm(run, rng.uniform(2e-5, 0.006 if trial % 10 else 0.03))
        torch.set_grad_enabled(True)  # of the test's own step, too
        ours = step(model, call, harness.batch(ids), trial)
        assert model.encoder.seen[-2:] == [True, True]  # behind the boundary
        assert_same(ours, step(plain, call, harness.plain(ids), trial), exact=False)
        assert model.training
        assert model.encoder.training
    assert harness.host.refusals == []
    assert num_interrupted > count // 5
