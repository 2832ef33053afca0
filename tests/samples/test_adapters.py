"""Sample identities, versions, transforms with a state of their own."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import Dataset, Subset

from egeria_cache.loader.loader import EgeriaLoader
from egeria_cache.samples.loading import SampleLoader, Task


class OwnState:
    """A transform with its own generator, seeded as albumentations' are."""

    def __init__(self):
        self.random = random.Random()

    def set_random_seed(self, seed):
        self.random.seed(seed)

    def __call__(self, value):
        return value + self.random.random()


class Transformed(Dataset):
    def __init__(self):
        self.transform = OwnState()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.transform(float(index))


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(6))])
def test_a_transform_with_its_own_state_is_seeded_per_sample(wrap):
    first = [b.tolist() for b in EgeriaLoader(wrap(Transformed()), 2, seed=0)]
    assert first == [b.tolist() for b in EgeriaLoader(wrap(Transformed()), 2, seed=0)]
    workers = EgeriaLoader(wrap(Transformed()), 3, seed=0, num_workers=1)
    assert torch.cat(list(workers)).tolist() == [x for b in first for x in b]


class Files(Dataset):
    """Named samples whose content may change."""

    def __init__(self, names, versions=None):
        self.names, self.versions = names, versions or dict.fromkeys(names, 0)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return torch.rand(1)

    def sample_id(self, index):
        return self.names[index]

    def sample_version(self, index):
        return self.versions[self.names[index]]


def test_named_samples_keep_their_augmentation_when_the_list_is_reordered():
    one = torch.cat(list(EgeriaLoader(Files(["a", "b", "c"]), seed=0)))
    other = torch.cat(list(EgeriaLoader(Files(["c", "a", "b"]), seed=0)))
    assert torch.equal(other, one[[2, 0, 1]])


def test_a_new_version_is_a_new_sample():
    names = ["a", "b"]
    loader = EgeriaLoader(Files(names, {"a": 1, "b": 1}), seed=0)
    edited = EgeriaLoader(Files(names, {"a": 1, "b": 2}), seed=0)
    assert loader.source.identify([0, 1]) == [("a", "1"), ("b", "1")]
    assert edited.source.identify([0, 1]) == [("a", "1"), ("b", "2")]


def test_callables_go_before_the_datasets_methods():
    loader = EgeriaLoader(Files(["a"]), seed=0, sample_id=lambda i: i + 7, sample_version=str)
    assert loader.source.identify([0]) == [(7, "0")]


class Batched(Dataset):
    """Has only a batched access."""

    def __len__(self):
        return 4

    def __getitems__(self, indices):
        return [10 * index for index in indices]


def test_a_dataset_with_batched_access_alone_works():
    assert next(iter(EgeriaLoader(Batched(), 4, seed=0))).tolist() == [0, 10, 20, 30]
    assert SampleLoader(Batched(), list).load(Task(0, [2], [2], [0], None)) == [20]
