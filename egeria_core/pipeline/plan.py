"""Which rank holds which block, and who sends what when the frozen front moves. Pure.

A plan holds no tensor, group or process; every rank computes the same one from the same numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

SCHEDULES = ("GPipe", "1F1B")

OnFreeze = Literal["repartition", "stay"]
"""What is done with the ranks when blocks freeze.

- `repartition`: the active blocks are spread over all ranks;
- `stay`: no block changes its rank.
"""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Where everything is. Make the first one with `start`, others from it with `frozen_to`."""

    schedule: str
    """One of `SCHEDULES`."""
    microbatches: int
    """In each batch."""
    ranks: int
    costs: tuple[float, ...] = field(repr=False)
    """Relative cost of each block."""
    frozen: int
    """Blocks at the front that are frozen."""
    front: int
    """Blocks that are no part of the pipeline: every rank runs them on its own rows, or reads what
    they gave from its cache. `frozen`, or 0 where frozen blocks stay in their stages."""
    stages: tuple[tuple[int, int], ...]
    """First block of each rank's stage, and the one behind its last. A stage without blocks hands
    on what it gets."""
    homes: tuple[int, ...]
    """The rank that holds each block's weights and optimizer state."""

    @classmethod
    def start(
        cls, costs: Sequence[float], ranks: int, *, schedule: str, microbatches: int
    ) -> PipelinePlan:
        """Return the plan for a model of which nothing is frozen.

        Args:
            costs: Relative cost of each block, such as its FLOPs or parameters.
            ranks: How many there are.
            schedule: "GPipe" or "1F1B".
            microbatches: Into how many a batch is cut.

        Raises:
            ValueError: The schedule cannot be had, or there are too few blocks or micro-batches.
        """
        if schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}. A pipeline "
                "that follows its frozen front has one stage on a rank; and where a schedule "
                "splits each backward, the first active stage behind the front gets no weight "
                "gradients, and no error"
            )
        if min(ranks, microbatches) < 1 or any(cost < 0 for cost in costs):
            raise ValueError("ranks and microbatches must be positive")
        if schedule == "1F1B" and microbatches < ranks:
            given = f"got {microbatches} for {ranks}"
            raise ValueError(f"1F1B needs as many micro-batches as stages, {given}")
        stages = partition(costs, 0, ranks)
        return cls(schedule, microbatches, ranks, tuple(costs), 0, 0, stages, _homes(stages))

    def time(self, backward: float = 2.0) -> float:
        """Return about how long a batch takes, in units of the blocks' costs.

        The busiest rank's work on its micro-batches, and once, as the pipeline fills and drains,
        that of the others; a front outside of the pipeline is taken to cost nothing.

        Args:
            backward: Cost of a block's backward, in forwards.
        """
        trained = [cost * (1 + backward * (i >= self.frozen)) for i, cost in enumerate(self.costs)]
        work = [sum(trained[start:stop]) for start, stop in self.stages]
        return self.microbatches * max(work) + sum(work) - max(work)

    def frozen_to(
        self, frozen: int, on_freeze: OnFreeze, *, has_front: bool = True
    ) -> PipelinePlan:
        """Return the plan with so many frozen blocks; 0 goes back to the first plan.

        Args:
            frozen: Frozen blocks at the front; the last block is never frozen.
            on_freeze: What is done with the ranks.
            has_front: Whether frozen blocks leave the pipeline. Always so except for `stay`.

        Raises:
            ValueError: The last block would be frozen.
        """
        if not 0 <= frozen < len(self.costs):
            raise ValueError(f"frozen must be in [0, {len(self.costs)}), got {frozen}")
        whole = partition(self.costs, 0, self.ranks)
        first = replace(self, frozen=0, front=0, stages=whole, homes=_homes(whole))
        if frozen == 0:
            return first
        if on_freeze == "stay":
            # What moved before, if anything did, is not asked: nothing moves.
            if not has_front:
                return replace(first, frozen=frozen)
            left = [(max(start, frozen), max(stop, frozen)) for start, stop in first.stages]
            return replace(first, frozen=frozen, front=frozen, stages=tuple(left))
        length = min(self.ranks, len(self.costs) - frozen)
        # The last blocks are on the last ranks already.
        empty = ((frozen, frozen),) * (self.ranks - length)
        stages = (*empty, *partition(self.costs, frozen, length))
        homes = (*self.homes[:frozen], *_homes(stages))
        return replace(first, frozen=frozen, front=frozen, stages=stages, homes=homes)

    def moves(self, new: PipelinePlan) -> list[tuple[int, int, int]]:
        """Return (block, source, target) of all that has to be sent until `new` holds."""
        pairs = enumerate(zip(self.homes, new.homes, strict=True))
        return [(block, old, target) for block, (old, target) in pairs if old != target]

    def held_by(self, rank: int) -> list[int]:
        """Return the blocks whose weights are on this rank, front included."""
        return [b for b, home in enumerate(self.homes) if b < self.front or home == rank]


def partition(costs: Sequence[float], start: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut the blocks from `start` on into runs, the dearest of which is as cheap as possible.

    Every run has a block. Among equally good cuts, earlier runs are the shorter ones.

    Raises:
        ValueError: There are fewer blocks than runs.
    """
    own = list(costs[start:])
    if not 1 <= parts <= len(own):
        raise ValueError(f"cannot cut {len(own)} blocks into {parts} stages: they are too few")
    sums = [*itertools.accumulate(own, initial=0.0)]

    @functools.cache
    def cut(stop: int, runs: int) -> tuple[float, tuple[int, ...]]:
        """Return the dearest of so many runs of the first blocks, and where they begin and end."""
        if runs == 1:
            return sums[stop], (0, stop)
        ways = range(runs - 1, stop)
        dearest, at = min((max(cut(at, runs - 1)[0], sums[stop] - sums[at]), at) for at in ways)
        return dearest, (*cut(at, runs - 1)[1], stop)

    return tuple(itertools.pairwise(start + end for end in cut(len(own), parts)[1]))


def _homes(stages: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the rank of each block of all ranks' stages."""
    return tuple(rank for rank, (start, stop) in enumerate(stages) for _ in range(start, stop))
