"""Samplers: RandomSampler's order in less memory; shards that stay with their rank."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from egeria_cache.loader.samplers import LeanRandomSampler, ShardAffineSampler, permuted


@pytest.mark.parametrize("own", [False, True])
def test_the_lean_sampler_draws_what_randomsampler_draws(own):
    def orders(kind):
        generator = torch.Generator().manual_seed(4) if own else None
        torch.manual_seed(2)
        sampler = kind(range(1000), generator=generator)
        return list(sampler), list(sampler), torch.rand(1).item()

    assert orders(LeanRandomSampler) == orders(RandomSampler)


@given(
    length=st.integers(1, 60),
    ranks=st.sampled_from([1, 2, 3, 6]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_rank_keeps_its_samples_and_together_they_have_all(length, ranks, drop_last, epoch):
    def of(rank, epoch):
        sampler = ShardAffineSampler(range(length), ranks, rank, num_shards=6, drop_last=drop_last)
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
        return list(sampler)

    per_rank = [of(rank, epoch) for rank in range(ranks)]
    assert len({len(indices) for indices in per_rank}) == 1
    for rank in range(ranks):
        assert sorted(of(rank, 0)) == sorted(per_rank[rank])
    together = [i for indices in per_rank for i in indices]
    if drop_last:
        assert len(set(together)) == len(together) == length // 6 * 6
    else:
        assert set(together) == set(range(length))


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


def test_an_epoch_shuffles_within_the_shard():
    sampler = ShardAffineSampler(range(100), 2, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert sorted(sampler) == sorted(first)


@pytest.mark.parametrize(
    ("args", "match"),
    [((4, 4), r"rank must be in \[0, 4\)"), ((0, 0), "num_replicas"), ((5, 0), "must divide")],
)
def test_ranks_out_of_range_are_refused(args, match):
    with pytest.raises(ValueError, match=match):
        ShardAffineSampler(range(10), *args, num_shards=12)


@given(
    length=st.integers(1, 60),
    layout=st.sampled_from([(2, 1), (4, 2), (6, 3), (6, 2)]),
    shards=st.sampled_from([12, 24]),
    epoch=st.integers(1, 3),
)
def test_samples_stay_on_their_node_and_go_from_rank_to_rank_inside_it(
    length, layout, shards, epoch
):
    ranks, per_node = layout

    def of(node, epoch):
        found = []
        for rank in range(node * per_node, (node + 1) * per_node):
            sampler = ShardAffineSampler(
                range(length), ranks, rank, num_shards=shards, ranks_per_node=per_node
            )
            sampler.set_epoch(epoch)
            assert len(list(sampler)) == len(sampler)
            found += list(sampler)
        return found

    nodes = [of(node, epoch) for node in range(ranks // per_node)]
    for node, samples in enumerate(nodes):
        assert sorted(of(node, 0)) == sorted(samples)
    assert {i for samples in nodes for i in samples} == set(range(length))


def test_inside_a_node_ranks_exchange_samples():
    def first_rank(epoch):
        sampler = ShardAffineSampler(range(400), 4, 0, ranks_per_node=2)
        sampler.set_epoch(epoch)
        return set(sampler)

    assert 30 < len(first_rank(0) & first_rank(1)) < 70, "about half of a hundred"
    with pytest.raises(ValueError, match="ranks_per_node must divide num_replicas, got 3 and 4"):
        ShardAffineSampler(range(10), 4, 0, ranks_per_node=3)


def accuracy(layout, seed):
    """Test accuracy on handwritten digits; (ranks, ranks per node), or None: shuffled at large."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    cut = 1400
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    for epoch in range(12):
        if layout is None:
            order = torch.randperm(cut)
        else:
            ranks, per_node = layout
            columns = []
            for rank in range(ranks):
                sampler = ShardAffineSampler(
                    range(cut), ranks, rank, seed=seed, ranks_per_node=per_node
                )
                sampler.set_epoch(epoch)
                columns.append(torch.tensor(list(sampler)))
            order = torch.stack(columns, 1).flatten()
        for batch in order.split(56):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return (model(x[cut:]).argmax(1) == y[cut:]).float().mean().item()


@pytest.mark.long
def test_shuffling_inside_nodes_costs_no_accuracy_that_could_be_seen():
    seeds = range(3)
    at_large = sum(accuracy(None, seed) for seed in seeds) / len(seeds)
    for layout in [(8, 2), (8, 1)]:
        inside = sum(accuracy(layout, seed) for seed in seeds) / len(seeds)
        assert inside == pytest.approx(at_large, abs=0.015)


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


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_a_keyed_permutation_has_each_index_once_and_another_key_another_order(size):
    orders = {
        tuple(permuted(np.arange(size, dtype=np.uint64), size, (key,)).tolist())
        for key in range(20)
    }
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(orders) > 15 or size <= 3
