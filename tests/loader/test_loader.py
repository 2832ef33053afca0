"""EgeriaLoader without a boundary: DataLoader's batches, with stateless sample randomness."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from egeria_cache.batch.seeds import sample_seed
from egeria_cache.loader.loader import EgeriaLoader
from egeria_cache.samples.generators import preserved, seed_all


class Augmented(Dataset):
    """Each sample draws from all three global generators."""

    def __init__(self, n=20):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([float(index), *noise]), index


def ids_of(loader):
    return [batch[1].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_without_cache_and_seed_it_is_dataloader(workers, shuffle):
    data = TensorDataset(torch.arange(20.0), torch.arange(20))
    torch.manual_seed(3)
    expected = [ids_of(DataLoader(data, 6, shuffle=shuffle, num_workers=workers))] * 1
    after = torch.rand(1)
    torch.manual_seed(3)
    loader = EgeriaLoader(data, 6, shuffle=shuffle, num_workers=workers)
    assert isinstance(loader, DataLoader)
    assert [ids_of(loader)] == expected
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_seeded_loader_gives_the_same_order_and_consumes_the_same_random_numbers(
    workers, persistent
):
    if persistent and not workers:
        pytest.skip("DataLoader refuses it")
    data = TensorDataset(torch.arange(20.0), torch.arange(20))
    kwargs = {"shuffle": True, "num_workers": workers, "persistent_workers": persistent}
    torch.manual_seed(3)
    plain = DataLoader(data, 6, **kwargs)
    expected = [ids_of(plain), torch.rand(1), ids_of(plain), torch.rand(1)]
    torch.manual_seed(3)
    loader = EgeriaLoader(data, 6, seed=0, **kwargs)
    assert [ids_of(loader), torch.rand(1), ids_of(loader), torch.rand(1)] == expected


def epoch_of(workers, epochs=1, **kwargs):
    loader = EgeriaLoader(Augmented(), 6, seed=5, num_workers=workers, **kwargs)
    return [torch.cat([x for x, _ in loader]) for _ in range(epochs)]


def test_augmentation_depends_on_sample_and_epoch_alone():
    serial = epoch_of(0, 2)
    assert not torch.equal(serial[0], serial[1])
    for workers in (1, 2):
        for a, b in zip(serial, epoch_of(workers, 2), strict=True):
            assert torch.equal(a, b)
    torch.manual_seed(0)
    shuffled = epoch_of(2, 1, shuffle=True)[0]
    order = shuffled[:, 0].argsort()
    assert torch.equal(shuffled[order], serial[0])


def test_loading_in_this_process_leaves_the_global_generators_alone():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = EgeriaLoader(Augmented(), 6, seed=0)
    iterator = iter(loader)
    next(iterator)
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # DataLoader's own base seed
    random.seed(1)
    np.random.seed(1)
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())


def test_sample_seeds_differ_by_seed_id_kind_and_draw():
    seeds = {
        sample_seed(seed, sample, draw)
        for seed in (0, 1)
        for sample in (0, 1, "1", (1,), ("a", 1))
        for draw in (0, 1)
    }
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(0, 7, 3) == 7737423588448388413


def test_preserved_rng_restores_after_an_exception():
    before = torch.default_generator.get_state(), random.getstate()

    def draw_and_fail():
        with preserved():
            seed_all(3)
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(torch.default_generator.get_state(), before[0])
    assert random.getstate() == before[1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_an_iterable_dataset_passes_through_and_says_so_once(caplog):
    loader = EgeriaLoader(Stream(), batch_size=2, seed=0)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    assert caplog.text.count("IterableDataset has no sample IDs") == 1


class Failing(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise OSError("sample 3 is unreadable")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_keeps_its_type_and_the_next_batch_follows(workers):
    iterator = iter(EgeriaLoader(Failing(), 2, seed=0, num_workers=workers))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(OSError, match="sample 3 is unreadable"):
        next(iterator)
    assert next(iterator).tolist() == [4, 5]
    with pytest.raises(StopIteration):
        next(iterator)


def test_worker_init_sees_the_users_dataset():
    seen = []

    def init(worker_id):
        dataset = torch.utils.data.get_worker_info().dataset
        dataset.n = 100 + worker_id
        seen.append(type(dataset).__name__)

    data = Augmented(4)
    data.__class__ = ReportsItsLength
    loader = EgeriaLoader(data, 2, seed=0, num_workers=1, worker_init_fn=init)
    assert torch.cat(list(loader)).tolist() == [100] * 4


class ReportsItsLength(Augmented):
    def __getitem__(self, index):
        return self.n


@pytest.mark.parametrize("variants", [0, -1])
def test_augmentation_variants_must_be_positive(variants):
    with pytest.raises(ValueError, match="augmentation_variants must be at least 1"):
        EgeriaLoader(Augmented(), augmentation_variants=variants)


def test_ids_must_be_ints_strings_or_tuples():
    loader = EgeriaLoader(Augmented(), seed=0, sample_id=lambda index: [index])
    with pytest.raises(TypeError, match=r"sample ID must be .* got list"):
        next(iter(loader))
