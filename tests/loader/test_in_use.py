"""Promises that take a loader, a cache and a way of use together."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader, ShardAffineSampler
from tests.helpers.nets import Images, freeze, make_net


class DrawsLate(Dataset):
    """Some samples draw, each from another generator; the first ones do not."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        draws = [random.random, np.random.rand, lambda: torch.rand(()).item(), lambda: 0.0]
        return index, draws[index % 4]() if index >= 7 else 0.0


def batches(loader, num=None):
    found = []
    for x, y in loader:
        found.append((x.tolist(), y.tolist()))
        if len(found) == num:
            break
    return found


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 4), shuffle=st.booleans(), draws=st.booleans())
def test_while_nothing_is_frozen_a_resumed_run_is_the_uninterrupted_one(
    tmp_path_factory, cut, shuffle, draws
):
    """Whichever samples the resumed process sees draw first."""
    with ActivationCache(nn.Linear(1, 1), tmp_path_factory.mktemp("cache")) as cache:

        def loader():
            generator = torch.Generator().manual_seed(5)
            return EgeriaLoader(
                DrawsLate(),
                4,
                shuffle=shuffle,
                cache=cache,
                reuse=None,
                seed=2,
                generator=generator,
            )

        whole = loader()
        expected = [batches(whole) for _ in range(3)]
        begun = loader()
        if draws:  # the order of discovery is another one
            begun.source.samples.drawn = frozenset({"random"})
        assert batches(begun) == expected[0]
        assert batches(begun, cut) == expected[1][:cut]
        state = begun.state_dict()
        resumed = loader()
        resumed.load_state_dict(state)
        assert batches(resumed) == expected[1][cut:]
        assert batches(resumed) == expected[2]


class Columns(Dataset):
    """Its batched access gives columns, not a list of samples."""

    def __init__(self, draws=False):
        self.draws = draws

    def __len__(self):
        return 12

    def __getitems__(self, indices):
        noise = torch.rand(len(indices)) if self.draws else torch.zeros(len(indices))
        return {"x": torch.tensor(indices), "noise": noise}


def as_it_is(batch):
    return batch


@pytest.mark.parametrize("kwargs", [{}, {"seed": 1}, {"seed": 1, "num_workers": 1}])
def test_a_batched_access_that_gives_no_list_is_given_on_as_it_is(kwargs):
    loader = EgeriaLoader(Columns(), 4, collate_fn=as_it_is, **kwargs)
    for _ in range(2):
        assert [batch["x"].tolist() for batch in loader] == [[*range(i, i + 4)] for i in (0, 4, 8)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_own_cache_has_all_of_its_shard_from_the_second_epoch(tmp_path, rank):
    model = make_net()
    freeze(model, "layer1")
    data = Images()
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        sampler = ShardAffineSampler(data, 2, rank, num_shards=4)
        loader = EgeriaLoader(data, 6, sampler=sampler, cache=cache, reuse=None)
        orders = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.append([])
            for images, targets in loader:
                model(images)
                orders[-1] += targets.tolist()
                cache.flush()
        assert cache.stats().hits == 2 * 24
        assert cache.stats().misses == 24
    assert len({tuple(order) for order in orders}) == 3


class Slow(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index >= 8:
            time.sleep(2)  # a batch of these takes far longer than the interrupt
        return torch.tensor(index)


@pytest.fixture
def interruptible():
    """A process started in a shell's background ignores SIGINT from its beginning."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_interrupts_a_loader_that_waits_and_leaves_nothing_behind(
    tmp_path, workers, interruptible
):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    with ActivationCache(nn.Linear(1, 1), tmp_path) as cache:
        loader = EgeriaLoader(Slow(), 4, cache=cache, reuse=None, num_workers=workers)
        iterator = iter(loader)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        timer = threading.Timer(0.2, interrupt)

        def wait(iterator):
            timer.start()  # in here: on a busy machine it may come before anything else does
            next(iterator)

        with pytest.raises(KeyboardInterrupt):
            wait(iterator)
        timer.join()
        del iterator
        gc.collect()
    assert multiprocessing.active_children() == []
