"""How far index batches may be drawn ahead without anybody noticing.

What a sampler draws may depend on when it is asked: on losses, on a generator that training draws
from too, on a list that the loop edits. Only of torch's own samplers and ours is it known what
they do, and when; all others are asked when DataLoader would ask them.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from egeria_cache.loader.samplers import LeanRandomSampler, ShardAffineSampler

__all__ = ["num_foreseeable"]

_DRAW_AT_ONCE = (
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    ShardAffineSampler,
    range,
    tuple,
)
"""Whatever they draw, they draw with their first sample."""

_ACCELERATE = "accelerate.data_loader"
_WRAPPERS = {(_ACCELERATE, "BatchSamplerShard"), (_ACCELERATE, "SkipBatchSampler")}
"""They hand on, or leave out, what the batch sampler inside draws."""
_PERMUTES = {(_ACCELERATE, "SeedableRandomSampler")}
"""They draw as `RandomSampler` does. All of these by name: nothing of theirs is imported here."""


def num_foreseeable(batch_sampler: Any) -> int:
    """Return how many of an epoch's first index batches may be drawn at any time after its start.

    Not the last one: with it, or after it, `RandomSampler` draws from its generator again.
    """
    inner = batch_sampler
    while _name(inner) in _WRAPPERS:
        inner = inner.batch_sampler
    if type(inner) is not BatchSampler or not _draws_at_once(inner.sampler):
        return 0
    return len(batch_sampler) - 1


def _name(thing: Any) -> tuple[str, str]:
    return type(thing).__module__, type(thing).__qualname__


def _draws_at_once(sampler: Any) -> bool:
    if type(sampler) in _DRAW_AT_ONCE:
        return True
    if type(sampler) not in (RandomSampler, LeanRandomSampler) and _name(sampler) not in _PERMUTES:
        return False
    # Without a generator it makes one of its own; else it may be anybody's.
    is_permutation = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return sampler.generator is None or is_permutation
