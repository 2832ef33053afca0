"""Seeds are set where they are drawn from, and nowhere else; what is drawn is always stateless."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader, sample_seed
from egeria_cache.samples.generators import preserved, seed_all
from egeria_cache.samples.loading import SampleLoader, Task

DRAWS = {
    "nothing": lambda: 0.0,
    "random": random.random,
    "shuffle": lambda: float(random.sample(range(100), 1)[0]),
    "numpy": np.random.rand,
    "normal": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "torch's seed": lambda: float(torch.initial_seed() % 1000),
}


class Sometimes(Dataset):
    """Samples from `first` on draw; those before do not."""

    def __init__(self, draw, first):
        self.draw, self.first, self.num_loaded = draw, first, 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.num_loaded += 1
        return float(index), self.draw() if index >= self.first else -1.0


def expected(kind, first, epoch=0):
    values = []
    with preserved():
        for index in range(24):
            seed_all(sample_seed(7, index, epoch))
            values.append((float(index), DRAWS[kind]() if index >= first else -1.0))
    return values


def rows(loader):
    return [tuple(row) for x, y in loader for row in zip(x.tolist(), y.tolist(), strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [0, 2, 4, 9, 24])
@pytest.mark.parametrize("kind", DRAWS)
def test_what_a_sample_draws_is_its_own_wherever_drawing_begins(kind, first, workers):
    if workers and (first != 9 or kind == "shuffle"):
        pytest.skip("one is enough with workers")
    np.random.randn()  # NumPy now keeps a second normal deviate
    loader = EgeriaLoader(Sometimes(DRAWS[kind], first), 4, seed=7, num_workers=workers)
    for epoch in range(2):
        assert rows(loader) == expected(kind, first, epoch)


@pytest.mark.parametrize("keeps_a_normal_deviate", [False, True])
@pytest.mark.parametrize("first", [0, 9, 24])
@pytest.mark.parametrize("kind", DRAWS)
def test_the_training_loops_own_generators_are_left_alone(kind, first, keeps_a_normal_deviate):
    def drawn(use):
        seed_all(3)
        if keeps_a_normal_deviate:
            np.random.randn()
        use()
        return [random.random(), np.random.randn(), np.random.randn(), torch.rand(()).item()]

    samples = SampleLoader(Sometimes(DRAWS[kind], first), list)

    def load():
        for start in range(0, 24, 4):
            ids = list(range(start, start + 4))
            samples.load(Task(0, ids, ids, [0] * len(ids), 7))

    assert drawn(load) == drawn(lambda: None)
    assert drawn(load) == drawn(lambda: None)


@pytest.mark.parametrize(("first", "again"), [(0, 1), (2, 1), (9, 4), (24, 0)])
def test_samples_are_loaded_again_only_where_drawing_is_noticed(first, again):
    """One sample of the first batch, or one whole batch later on."""
    data = Sometimes(random.random, first)
    loader = EgeriaLoader(data, 4, seed=7)
    for _ in range(3):
        list(loader)
    assert data.num_loaded == 3 * 24 + again


@pytest.mark.parametrize("kind", ["random", "numpy", "torch", "nothing"])
def test_what_workers_see_drawn_is_known_in_the_next_epoch(kind):
    loader = EgeriaLoader(Sometimes(DRAWS[kind], 9), 4, seed=7, num_workers=2)
    list(loader)
    assert loader.source.samples.drawn == ({kind} - {"nothing"})
    assert rows(loader) == expected(kind, 9, epoch=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [0, 3, 9])
@pytest.mark.parametrize("kind", ["random", "numpy", "normal", "torch"])
def test_while_nothing_is_frozen_samples_draw_what_they_always_draw(tmp_path, kind, first, workers):
    np.random.seed(0)  # NumPy now keeps no normal deviate
    with ActivationCache(nn.Linear(1, 1), tmp_path) as cache:
        data = Sometimes(DRAWS[kind], first)
        loader = EgeriaLoader(data, 4, cache=cache, seed=7, num_workers=workers)
        for epoch in range(2):
            assert rows(loader) == expected(kind, first, epoch)
        kind = "numpy" if kind == "normal" else kind
        assert loader.source.samples.drawn == {kind}


def test_while_nothing_is_frozen_a_data_set_that_draws_nothing_is_not_seeded(tmp_path):
    """It may see the seed of the training loop's own generator, as it would under DataLoader."""
    torch.manual_seed(12)
    with ActivationCache(nn.Linear(1, 1), tmp_path) as cache:
        loader = EgeriaLoader(Sometimes(DRAWS["torch's seed"], 0), 4, cache=cache, seed=7)
        assert {drawn for _, drawn in rows(loader)} == {12.0}
    assert rows(EgeriaLoader(loader.dataset, 4, seed=7)) == expected("torch's seed", 0)


class Failing(Sometimes):
    def __getitem__(self, index):
        value = super().__getitem__(index)
        if index == 10:
            raise OSError(f"unreadable after {value}")
        return value


@pytest.mark.parametrize("kind", ["nothing", "random"])
def test_an_exception_is_the_seeded_samples_own(kind):
    iterator = iter(EgeriaLoader(Failing(DRAWS[kind], 9), 4, seed=7))
    next(iterator), next(iterator)
    state = random.getstate()
    with pytest.raises(OSError, match=str(expected(kind, 9)[10][1])):
        next(iterator)
    assert random.getstate() == state
    assert next(iterator)[0].tolist() == [12, 13, 14, 15]


def test_another_global_bit_generator_of_numpy_is_no_trouble():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(5))
    try:
        assert rows(EgeriaLoader(Sometimes(np.random.rand, 5), 4, seed=7)) == expected("numpy", 5)
    finally:
        np.random.set_bit_generator(before)
