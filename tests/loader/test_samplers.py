"""Samplers: RandomSampler's order in less memory; shards that stay with their rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from egeria_cache.loader.samplers import LeanRandomSampler, ShardAffineSampler


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
