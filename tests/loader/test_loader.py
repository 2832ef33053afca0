"""EgeriaLoader without a boundary: DataLoader's batches, with stateless sample randomness."""

import itertools
import random
import tracemalloc
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from egeria_cache.loader.loader import EgeriaLoader
from egeria_cache.loader.plan import Planner
from egeria_cache.loader.samplers import ShardAffineSampler
from egeria_cache.samples.draws import Clock, sample_seed
from egeria_cache.store.disk.files import LOCATED


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
    expected = [ids_of(DataLoader(data, 6, shuffle=shuffle, num_workers=workers))]
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
        assert all(map(torch.equal, serial, epoch_of(workers, 2)))
    late = EgeriaLoader(Augmented(), 6, seed=5)
    late._outer_epoch = lambda: 1  # a trainer counts epochs, too, and has resumed in the second
    assert torch.equal(torch.cat([x for x, _ in late]), serial[1])
    torch.manual_seed(0)
    shuffled = epoch_of(2, 1, shuffle=True)[0]
    order = shuffled[:, 0].argsort()
    assert torch.equal(shuffled[order], serial[0])


def test_sample_seeds_differ_by_seed_id_kind_and_draw():
    kinds = itertools.product((0, 1), (0, 1, "1", (1,), ("a", 1)), (0, 1))
    seeds = {sample_seed(seed, sample, draw) for seed, sample, draw in kinds}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(0, 7, 3) == 7737423588448388413


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_an_iterable_dataset_passes_through_and_says_so_once(caplog):
    loader = EgeriaLoader(Stream(), batch_size=2, seed=0)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    assert caplog.text.count("IterableDataset has no sample IDs") == 1


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


class Columns(list):
    def __getitem__(self, indices):
        return torch.tensor(indices)

    def __getitems__(self, indices):
        raise AssertionError("asked for a batch of batches")


@pytest.mark.parametrize("workers", [0, 2])
def test_where_the_sampler_makes_batches_the_data_set_is_given_each(workers):
    whole = {"batch_size": None, "sampler": [[0, 1, 2], [3, 4]], "num_workers": workers}
    plain, ours = (list(kind(Columns([0] * 5), **whole)) for kind in (DataLoader, EgeriaLoader))
    assert [rows.tolist() for rows in ours] == [rows.tolist() for rows in plain] == whole["sampler"]


# Shards that stay with their rank.


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_the_global_order_is_the_same_for_every_world_size(ranks):
    def steps(ranks):
        samplers = [ShardAffineSampler(range(100), ranks, r, num_shards=12) for r in range(ranks)]
        per_step = 12 // ranks
        columns = [list(s) for s in samplers]
        return [
            {i for column in columns for i in column[t * per_step : (t + 1) * per_step]}
            for t in range(len(columns[0]) // per_step)
        ]

    assert steps(ranks) == steps(12)


@given(
    length=st.integers(1, 60),
    layout=st.sampled_from([(1, 1), (2, 1), (3, 1), (6, 1), (4, 2), (6, 3), (6, 2)]),
    shards=st.sampled_from([12, 24]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_samples_stay_on_their_node_and_go_from_rank_to_rank_inside_it(
    length, layout, shards, drop_last, epoch
):
    """Each rank has as many, and together they have all."""
    ranks, per_node = layout

    def of(rank, epoch):
        sampler = ShardAffineSampler(
            range(length), ranks, rank, num_shards=shards, ranks_per_node=per_node,
            drop_last=drop_last,
        )  # fmt: skip
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
        return list(sampler)

    per_rank = [of(rank, epoch) for rank in range(ranks)]
    assert len({len(indices) for indices in per_rank}) == 1
    for first in range(0, ranks, per_node):
        own = range(first, first + per_node)
        assert sorted(chain(*(of(rank, 0) for rank in own))) == sorted(
            chain(*(per_rank[rank] for rank in own))
        )
    together = [*chain(*per_rank)]
    if drop_last:
        assert len(set(together)) == len(together) == length // shards * shards
    else:
        assert set(together) == set(range(length))


def test_inside_a_node_ranks_exchange_samples():
    def first_rank(epoch):
        sampler = ShardAffineSampler(range(400), 4, 0, ranks_per_node=2)
        sampler.set_epoch(epoch)
        return set(sampler)

    assert 30 < len(first_rank(0) & first_rank(1)) < 70, "about half of a hundred"
    with pytest.raises(ValueError, match="ranks_per_node must divide num_replicas, got 3 and 4"):
        ShardAffineSampler(range(10), 4, 0, ranks_per_node=3)


@pytest.mark.parametrize("ranks_per_node", [None, 8])
def test_a_rank_draws_its_own_samples_of_a_billion_alone(ranks_per_node):
    sampler = ShardAffineSampler(range(10**9), 10_000, 7, ranks_per_node=ranks_per_node)
    sampler.set_epoch(3)
    tracemalloc.start()
    try:
        distinct = len(set(sampler))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert distinct == len(sampler) == 100_000
    assert peak_bytes < 100e6


def test_where_several_cuts_serve_as_much_the_deepest_does():
    found = SimpleNamespace(locate=lambda ids, variant: np.ones(1, LOCATED))
    deep, shallow = (SimpleNamespace(generation=found, cut=name) for name in ("layer2", "layer1"))
    source = EgeriaLoader(range(1)).source
    planner = Planner(iter(()), source, Clock(), None, None, None, nullcontext(), None, 0, 0)
    assert planner._plans([[0]], (deep, shallow), True, 0)[0].entry.view is deep
