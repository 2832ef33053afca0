"""Samplers: a random one that costs 8 bytes a sample, and one that keeps each rank on its shard."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler

__all__ = ["LeanRandomSampler", "ShardAffineSampler"]

_CHUNK = 1 << 16


class LeanRandomSampler(RandomSampler):
    """`RandomSampler` without replacement: the same order from the same random numbers.

    The permutation stays a tensor (8 bytes a sample) instead of a list of Python ints (about 40).
    """

    def __iter__(self) -> Iterator[int]:
        generator = self.generator
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        yield from _ints(torch.randperm(len(self.data_source), generator=generator))
        if self.generator is not None:
            # RandomSampler draws once more at its end, for a remainder that is empty here.
            torch.randperm(len(self.data_source), generator=generator)


class ShardAffineSampler(Sampler[int]):
    """Gives every rank the same samples in every epoch, shuffled within them.

    A rank's own cache then hits from its second epoch on; with `DistributedSampler` each rank would
    see other samples in every epoch. The data set is cut into `num_shards` virtual shards by a
    permutation that only `seed` determines; rank r owns shards r, r + num_replicas, ... Step t of
    the epoch takes the t-th sample of every shard, so the global order is the same for every number
    of ranks that divides `num_shards`.

    Args:
        data_source: The data set, or anything with its length.
        num_replicas: Number of ranks; must divide `num_shards`.
        rank: This process, 0 <= rank < num_replicas.
        num_shards: Virtual shards; defaults to `num_replicas`.
        shuffle: Shuffle within the shards, anew in each epoch.
        seed: Of the shards and of the shuffles; the same on all ranks.
        drop_last: Drop the samples that do not fill all shards evenly, instead of repeating some.
        ranks_per_node: So many ranks share a directory: the samples of a node's shards are dealt
            anew among its ranks in each epoch, so that they stay on their node and are shuffled
            inside it. Ranks are counted node by node, as `torchrun` does; must divide
            `num_replicas`. None: each rank keeps its own.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        data_source: Sized,
        num_replicas: int,
        rank: int,
        *,
        num_shards: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        ranks_per_node: int | None = None,
    ) -> None:
        num_shards = num_replicas if num_shards is None else num_shards
        if num_replicas < 1 or num_shards % num_replicas:
            raise ValueError(
                f"num_replicas must divide num_shards, got {num_replicas} and {num_shards}"
            )
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be in [0, {num_replicas}), got {rank}")
        if ranks_per_node is not None and (ranks_per_node < 1 or num_replicas % ranks_per_node):
            raise ValueError(
                f"ranks_per_node must divide num_replicas, got {ranks_per_node} and {num_replicas}"
            )
        self.data_source = data_source
        self.num_shards = num_shards
        self._node = None if ranks_per_node is None else rank // ranks_per_node
        self._nodes_shards = [
            shard
            for shard in range(num_shards)
            if ranks_per_node is not None and shard % num_replicas // ranks_per_node == self._node
        ]
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._own = range(rank, num_shards, num_replicas)
        length, self._rounding = len(data_source), (0 if drop_last else num_shards - 1)
        self._per_shard = (length + self._rounding) // num_shards

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._per_shard * len(self._own)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.data_source), generator=_generator(self.seed))
        if self._node is not None and self.shuffle:
            columns = self._dealt(order)
        else:
            columns = [self._shuffled(self._members(order, shard), shard) for shard in self._own]
        if self._per_shard:
            yield from _ints(torch.stack(columns, dim=1).flatten())

    def _shuffled(self, members: Tensor, number: int) -> Tensor:
        if not self.shuffle:
            return members
        generator = _generator(self.seed, self.epoch, number)
        return members[torch.randperm(len(members), generator=generator)]

    def _dealt(self, order: Tensor) -> list[Tensor]:
        """Return what each of our shards has of this epoch's deal among those of our node."""
        assert self._node is not None
        pool = torch.cat([self._members(order, shard) for shard in self._nodes_shards])
        hands = self._shuffled(pool, self.num_shards + self._node).view(-1, self._per_shard)
        return [hands[self._nodes_shards.index(shard)] for shard in self._own]

    def _members(self, order: Tensor, shard: int) -> Tensor:
        members = order[shard :: self.num_shards][: self._per_shard]
        if len(members) < self._per_shard:
            # One short: repeat the first of all samples, as DistributedSampler does.
            members = torch.cat([members, order[: self._per_shard - len(members)]])
        return members


def _generator(*parts: int) -> torch.Generator:
    mixed = 0
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


def _ints(indices: Tensor) -> Iterator[int]:
    for chunk in torch.split(indices, _CHUNK):
        yield from chunk.tolist()
