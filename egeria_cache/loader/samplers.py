"""A sampler that keeps each rank on its shard."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

_CHUNK = 1 << 16
_ODD, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
Indices: TypeAlias = npt.NDArray[np.uint64]


class ShardAffineSampler(Sampler[int]):
    """Gives every rank the same samples in every epoch, shuffled within them.

    A rank's own cache then hits from its second epoch on; with `DistributedSampler` each rank would
    see other samples in every epoch. The data set is cut into `num_shards` virtual shards by a
    permutation that only `seed` determines; rank r owns shards r, r + num_replicas, ... Step t of
    the epoch takes the t-th sample of every shard, so the global order is the same for every number
    of ranks that divides `num_shards`. A rank draws its own samples only, as it goes, whatever the
    size of the data set.

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
        on_node = 1 if ranks_per_node is None else ranks_per_node
        for whole, part, what in (
            (num_shards, num_replicas, "num_replicas must divide num_shards"),
            (num_replicas, on_node, "ranks_per_node must divide num_replicas"),
        ):
            if part < 1 or whole % part:
                raise ValueError(f"{what}, got {part} and {whole}")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be in [0, {num_replicas}), got {rank}")
        self.data_source, self.num_shards = data_source, num_shards
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._own = range(rank, num_shards, num_replicas)
        self._node = None if ranks_per_node is None else rank // on_node
        nodes = [shard % num_replicas // on_node for shard in range(num_shards)]
        self._nodes_shards = [shard for shard, node in enumerate(nodes) if node == self._node]
        self._per_shard = (len(data_source) + (0 if drop_last else num_shards - 1)) // num_shards

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._per_shard * len(self._own)

    def __iter__(self) -> Iterator[int]:
        per_chunk = max(1, _CHUNK // len(self._own))
        for start in range(0, self._per_shard, per_chunk):
            steps = np.arange(start, min(start + per_chunk, self._per_shard), dtype=np.uint64)
            columns = [self._samples(shard, steps) for shard in self._own]
            yield from np.stack(columns, axis=1).ravel().tolist()

    def _samples(self, shard: int, steps: Indices) -> Indices:
        """Return the samples that a shard has at these steps of the epoch."""
        shards: Indices = np.full_like(steps, shard)
        if self.shuffle and self._node is not None:
            # The node's shards lie end to end; what is dealt to this one is anywhere among them.
            dealt = steps + np.uint64(self._nodes_shards.index(shard) * self._per_shard)
            size = len(self._nodes_shards) * self._per_shard
            dealt = permuted(dealt, size, (self.seed, self.epoch, self.num_shards + self._node))
            hand, steps = np.divmod(dealt, np.uint64(self._per_shard))
            shards = np.array(self._nodes_shards, np.uint64)[hand]
        elif self.shuffle:
            steps = permuted(steps, self._per_shard, (self.seed, self.epoch, shard))
        places = steps * np.uint64(self.num_shards) + shards
        length = len(self.data_source)
        # Those beyond the last are the first ones again, as DistributedSampler does.
        return permuted(places % np.uint64(length), length, (self.seed,))


def permuted(indices: Indices, size: int, key: tuple[int, ...]) -> Indices:
    """Return where the permutation of range(size) that belongs to `key` takes these indices.

    A Feistel network over the next power of four, walked until it comes back below `size` (Black &
    Rogaway 2002): each index is had without the others, in constant memory.

    Args:
        indices: uint64, shape (N,), all below `size`.
        size: Of the permutation, at most 2^62.
        key: Integers; other ones give another permutation.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    seeds = np.random.SeedSequence([part % (1 << 64) for part in key])
    rounds = seeds.generate_state(8, np.uint64).astype(np.uint64)
    found, outside = indices.copy(), np.arange(len(indices))
    while len(outside):
        left, right = found[outside] >> half, found[outside] & mask
        for round_key in rounds:
            mixed = (right ^ round_key) * _ODD
            left, right = right, left ^ ((mixed ^ mixed >> _SHIFT) * _ODD >> _SHIFT) & mask
        found[outside] = left << half | right
        outside = outside[found[outside] >= size]
    return found
