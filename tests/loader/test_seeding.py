"""Seeds are set where they are drawn from, and nowhere else; what is drawn is always stateless."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from egeria_cache import EgeriaLoader, sample_seed
from egeria_cache.samples import SampleLoader, Task
from egeria_cache.seeds import preserved_rng, seed_rngs

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
    with preserved_rng():
        for index in range(24):
            seed_rngs(sample_seed(7, index, epoch))
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
        seed_rngs(3)
        if keeps_a_normal_deviate:
            np.random.randn()
        use()
        return [random.random(), np.random.randn(), np.random.randn(), torch.rand(()).item()]

    samples = SampleLoader(Sometimes(DRAWS[kind], first))

    def load():
        for start in range(0, 24, 4):
            ids = list(range(start, start + 4))
            samples.load(Task(0, ids, ids, 0, 7))

    assert drawn(load) == drawn(lambda: None)
    assert drawn(load) == drawn(lambda: None)


def test_a_sample_is_loaded_again_only_where_drawing_is_found_late():
    for first, loaded in ((0, 24), (24, 24), (9, 24 + 4)):
        data = Sometimes(random.random, first)
        np.random.seed(0)
        list(EgeriaLoader(data, 4, seed=7))
        assert data.num_loaded == loaded


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
