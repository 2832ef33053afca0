"""In which order a rank runs the forwards and backwards of its stages. Pure.

Stage s of S lies on rank s mod R. Micro-batches are numbered through all mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = ["SCHEDULES", "ScheduleName", "Task", "named_schedule", "rank_order"]

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B"]
SCHEDULES: tuple[ScheduleName, ...] = ("GPipe", "1F1B", "Interleaved1F1B")


def named_schedule(name: str) -> ScheduleName:
    """Return the schedule's name as it is written here, whatever its case."""
    for known in SCHEDULES:
        if known.lower() == name.lower().removeprefix("schedule"):
            return known
    raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")


class Task(NamedTuple):
    """One forward or backward of one stage on one micro-batch."""

    stage: int
    is_forward: bool
    microbatch: int


def rank_order(
    schedule: ScheduleName,
    rank: int,
    ranks: int,
    stages: int,
    microbatches: int,
    minibatches: int = 1,
) -> list[Task]:
    """Return what a rank runs, first to last, where nothing is frozen.

    A mini-batch is finished before the next begins.

    Args:
        schedule: Its name.
        rank: Which rank.
        ranks: R; must divide `stages`, and equal it but for `Interleaved1F1B`.
        stages: S.
        microbatches: In each mini-batch.
        minibatches: One after the other.
    """
    order: list[Task] = []
    for start in range(0, microbatches * minibatches, microbatches):
        own = range(start, start + microbatches)
        if schedule == "GPipe":
            order += [Task(rank, True, j) for j in own] + [Task(rank, False, j) for j in own]
        elif schedule == "1F1B":
            order += _one_f_one_b(rank, own, min(microbatches, stages - rank))
        else:
            order += _interleaved(rank, ranks, stages // ranks, own)
    return order


def _one_f_one_b(stage: int, own: range, window: int) -> Iterator[Task]:
    """Yield `window` forwards, then a backward and a forward in turns, then what is left."""
    for i in range(len(own) + window):
        if i >= window:
            yield Task(stage, False, own[i - window])
        if i < len(own):
            yield Task(stage, True, own[i])


def _interleaved(rank: int, ranks: int, per_rank: int, own: range) -> Iterator[Task]:
    """Yield the order of Narayanan et al. 2021, in rounds as PyTorch cuts them."""
    in_round = len(own) // max(1, len(own) // ranks)
    total = len(own) * per_rank
    warm = min((per_rank - 1) * in_round + 2 * (ranks - 1 - rank), total)

    def task(number: int, *, is_forward: bool) -> Task:
        turn, place = divmod(number, in_round * per_rank)
        local = place // in_round
        local = local if is_forward else per_rank - 1 - local
        return Task(local * ranks + rank, is_forward, own[turn * in_round + place % in_round])

    for i in range(total + warm):
        if i < total:
            yield task(i, is_forward=True)
        if i >= warm:
            yield task(i - warm, is_forward=False)
