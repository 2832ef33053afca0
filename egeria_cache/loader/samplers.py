"""A sampler that keeps each rank on its shard."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler


class ShardAffineSampler(Sampler[int]):
    """Gives every rank the same samples in every epoch, shuffled within them.

    A rank's own cache then hits from its second epoch on; with `DistributedSampler` each rank would
    see other samples in every epoch. The data set is dealt to `num_shards` virtual shards, each
    hand of samples that follow one another beginning with another shard, which `seed` determines;
    rank r owns shards r, r + num_replicas, ... Step t of the epoch takes the t-th sample of every
    shard, so the global order is the same for every number of ranks that divides `num_shards`. A
    rank draws its own samples only, whatever the size of the data set.

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
        steps, shards = self._dealt()
        begins = np.random.RandomState(self.seed % (1 << 32)).randint(
            self.num_shards, size=self._per_shard
        )
        places = steps * self.num_shards + (shards + begins[steps]) % self.num_shards
        # Those beyond the last are the first ones again, as DistributedSampler does.
        yield from (places.T.ravel() % len(self.data_source)).tolist()

    def _dealt(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return hands and shards of this rank's samples, in this epoch's order, by own shard."""
        own = np.array(self._own)
        if self.shuffle and self._node is not None:
            # The node's shards lie end to end; what is dealt to one of them is anywhere among them.
            size, ours = len(self._nodes_shards), np.array(self._nodes_shards)
            anywhere = self._permutation(size * self._per_shard, self.num_shards + self._node)
            mine = anywhere.reshape(size, -1)[np.searchsorted(ours, own)]
            return mine % self._per_shard, ours[mine // self._per_shard]
        orders = [
            self._permutation(self._per_shard, shard) if self.shuffle else range(self._per_shard)
            for shard in self._own
        ]
        return np.array(orders, np.int64), own[:, None]

    def _permutation(self, size: int, which: int) -> npt.NDArray[np.int64]:
        # The stream of `RandomState` is the same in every release of NumPy: all ranks agree.
        return np.random.RandomState([self.seed % (1 << 32), self.epoch, which]).permutation(size)
