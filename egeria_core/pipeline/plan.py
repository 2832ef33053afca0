"""Which rank holds which block, and who sends what when the frozen front moves. Pure.

A plan holds no tensor, group or process; every rank computes the same one from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

ScheduleName = Literal["GPipe", "1F1B"]
SCHEDULES: tuple[ScheduleName, ...] = ("GPipe", "1F1B")
_ZERO_BUBBLE = frozenset({"interleavedzerobubble", "zbvzerobubble", "zbv", "dualpipev"})

OnFreeze = Literal["repartition", "replicate", "stay"]
"""What is done with the ranks when blocks freeze.

- `repartition`: the active blocks are spread over all ranks;
- `replicate`: they stay on as few ranks as they need, the others become replicas of these;
- `stay`: no block changes its rank.
"""


def check_schedule(name: str) -> ScheduleName:
    """Return the schedule's name as it is written here, whatever its case.

    Raises:
        ValueError: It is not known, or it is one that freezing would make silently wrong.
    """
    lowered = name.lower().removeprefix("schedule")
    for known in SCHEDULES:
        if known.lower() == lowered:
            return known
    if lowered == "interleaved1f1b":
        raise ValueError(
            f"schedule {name!r} has several stages on a rank, which a pipeline that follows its "
            "frozen front has not: take 1F1B"
        )
    if lowered in _ZERO_BUBBLE:
        raise ValueError(
            f"schedule {name!r} splits each backward into one for the inputs and one for the "
            "weights; behind a frozen front the first active stage then gets no weight gradients, "
            f"and no error says so. Take one of {', '.join(SCHEDULES)}"
        )
    raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")


class Move(NamedTuple):
    """One block, with weights and optimizer state, from one rank to another."""

    block: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Where everything is. Make the first one with `start`, others from it with `frozen_to`."""

    schedule: ScheduleName
    microbatches: int
    """In each batch, through all replicas."""
    ranks: int
    costs: tuple[float, ...] = field(repr=False)
    """Relative cost of each block."""
    frozen: int
    """Blocks at the front that are frozen."""
    front: int
    """Blocks that are no part of the pipeline: every rank runs them on its own rows, or reads what
    they gave from its cache. `frozen`, or 0 where frozen blocks stay in their stages."""
    stages: tuple[tuple[int, int], ...]
    """First block of each stage, and the one behind its last. A stage without blocks hands on what
    it gets."""
    pipelines: tuple[tuple[int, ...], ...]
    """Ranks of each replica, one for each stage."""
    homes: tuple[tuple[int, ...], ...]
    """Ranks that hold each block's weights and optimizer state; the first one gives them away."""

    @classmethod
    def start(
        cls,
        costs: Sequence[float],
        ranks: int,
        *,
        schedule: str,
        microbatches: int,
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
        name = check_schedule(schedule)
        if min(ranks, microbatches) < 1 or any(cost < 0 for cost in costs):
            raise ValueError("ranks and microbatches must be positive")
        if len(costs) < ranks:
            raise ValueError(
                f"{len(costs)} blocks are too few for a stage on each of {ranks} ranks"
            )
        if not _fits(name, microbatches, ranks):
            raise ValueError(
                f"1F1B needs as many micro-batches as stages, got {microbatches} for {ranks}"
            )
        stages = partition(costs, 0, ranks)
        lane = tuple(range(ranks))
        homes = _homes(len(costs), stages, (lane,))
        return cls(name, microbatches, ranks, tuple(costs), 0, 0, stages, (lane,), homes)

    def time(self, backward: float = 2.0) -> float:
        """Return about how long a batch takes, in units of the blocks' costs.

        The busiest rank's work on its micro-batches, and once, as the pipeline fills and drains,
        that of the others; a front outside of the pipeline is taken to cost nothing.

        Args:
            backward: Cost of a block's backward, in forwards.
        """
        trained = [cost * (1 + backward * (i >= self.frozen)) for i, cost in enumerate(self.costs)]
        work = [sum(trained[start:stop]) for start, stop in self.stages]
        share = self.microbatches / len(self.pipelines)
        return share * max(work) + sum(work) - max(work)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.costs)

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
        if not 0 <= frozen < self.blocks:
            raise ValueError(f"frozen must be in [0, {self.blocks}), got {frozen}")
        first = PipelinePlan.start(
            self.costs, self.ranks, schedule=self.schedule, microbatches=self.microbatches
        )
        if frozen == 0:
            return first
        if on_freeze == "stay":
            # What moved before, if anything did, is not asked: nothing moves.
            if not has_front:
                return replace(first, frozen=frozen)
            left = [(max(start, frozen), stop) for start, stop in first.stages if stop > frozen]
            lane = first.pipelines[0][-len(left) :]
            return replace(
                first, frozen=frozen, front=frozen, stages=tuple(left), pipelines=(lane,)
            )
        copies, length = 1, min(self.ranks, self.blocks - frozen)
        if on_freeze == "replicate":
            copies, length = first._replicas(frozen)
        while not _fits(self.schedule, self.microbatches // copies, length):
            length -= 1
        stages = partition(self.costs, frozen, length)
        # The last blocks are on the last ranks already.
        base = self.ranks - copies * length
        lanes = tuple(
            tuple(range(base + i * length, base + (i + 1) * length)) for i in range(copies)
        )
        homes = _homes(self.blocks, stages, lanes)
        kept = [(own[0],) for own in self.homes[:frozen]]
        active = [_old_first(new, old) for new, old in zip(homes, self.homes, strict=True)]
        return replace(
            first, frozen=frozen, front=frozen, stages=stages, pipelines=lanes,
            homes=(*kept, *active[frozen:]),
        )  # fmt: skip

    def _replicas(self, frozen: int) -> tuple[int, int]:
        """Return how many replicas there will be, and on how many ranks each is.

        As many as there can be without a rank that holds more than the fullest did when nothing was
        frozen; each gets as many micro-batches as the others.
        """
        most = max(stop - start for start, stop in self.stages)
        active = self.blocks - frozen
        length = -(-active // most)
        copies = next(
            copies
            for copies in range(self.ranks // length, 0, -1)
            if self.microbatches % copies == 0
            and (copies == 1 or _fits(self.schedule, self.microbatches // copies, length))
        )
        longest = min(self.ranks // copies, active)
        fits = _fits(self.schedule, self.microbatches // copies, longest)
        return copies, longest if fits else length

    def moves(self, new: PipelinePlan) -> list[Move]:
        """Return what has to be sent until `new` holds, in an order that all ranks keep."""
        return [
            Move(block, old[0], target)
            for block, (old, homes) in enumerate(zip(self.homes, new.homes, strict=True))
            for target in homes
            if target not in old
        ]

    def copies(self, new: PipelinePlan) -> list[tuple[int, int]]:
        """Return which blocks every rank needs now as part of the front, and who has them."""
        return [(block, new.homes[block][0]) for block in range(self.front, new.front)]

    def held_by(self, rank: int) -> list[int]:
        """Return the blocks whose weights are on this rank, front included."""
        return [b for b, own in enumerate(self.homes) if b < self.front or rank in own]

    def place_of(self, rank: int) -> tuple[int, int] | None:
        """Return the rank's pipeline, and its place in it; None if it has no stage."""
        for index, lane in enumerate(self.pipelines):
            if rank in lane:
                return index, lane.index(rank)
        return None

    def rows_of(self, num_rows: int) -> tuple[int, list[tuple[int, int]]]:
        """Return a micro-batch's rows, and which rows of the batch each pipeline trains on.

        The last micro-batches may have fewer rows; they are filled up, without weight in the loss.
        """
        size = -(-num_rows // self.microbatches)
        share = self.microbatches // len(self.pipelines) * size
        bounds = [min(i * share, num_rows) for i in range(len(self.pipelines) + 1)]
        return size, list(pairwise(bounds))


def partition(costs: Sequence[float], start: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut the blocks from `start` on into runs, the dearest of which is as cheap as possible.

    Every run has a block. Among equally good cuts, earlier runs are the shorter ones where costs
    differ, and sizes differ by one at most where all cost the same.

    Raises:
        ValueError: There are fewer blocks than runs.
    """
    own = list(costs[start:])
    if not 1 <= parts <= len(own):
        raise ValueError(f"cannot cut {len(own)} blocks into {parts} runs")
    if len(set(own)) == 1:
        ends = [start + len(own) * (i + 1) // parts for i in range(parts)]
        return tuple(zip([start, *ends[:-1]], ends, strict=True))
    sums = [0.0]
    for cost in own:
        sums.append(sums[-1] + cost)
    count = len(own)
    # best[i]: the dearest run when the first i blocks are cut into as many runs as rounds so far.
    best = [0.0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for _ in range(parts):
        choice, new = [0] * (count + 1), [float("inf")] * (count + 1)
        for stop in range(1, count + 1):
            for cut in range(stop):
                dearest = max(best[cut], sums[stop] - sums[cut])
                if dearest < new[stop]:
                    new[stop], choice[stop] = dearest, cut
        best = new
        cuts.append(choice)
    stop, runs = count, []
    for choice in reversed(cuts):
        runs.append((start + choice[stop], start + stop))
        stop = choice[stop]
    return tuple(reversed(runs))


def _homes(
    blocks: int, stages: Sequence[tuple[int, int]], lanes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    homes: list[tuple[int, ...]] = [()] * blocks
    for (start, stop), *own in zip(stages, *reversed(lanes), strict=True):
        homes[start:stop] = [tuple(own)] * (stop - start)
    return tuple(homes)


def _old_first(new: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
    """Let a rank that gave a block away before do so again, where it still has it."""
    return tuple(sorted(new, key=lambda rank: rank not in old[:1]))


def _fits(schedule: ScheduleName, microbatches: int, length: int) -> bool:
    return schedule == "GPipe" or microbatches >= length
