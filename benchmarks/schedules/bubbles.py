"""How long a pipeline takes, and how much of that its ranks stand idle. Pure.

Units are those of one stage's forward on one micro-batch. docs/pipelines.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from egeria_core.pipeline import PipelinePlan

from .orders import ScheduleName, Task, named_schedule, rank_order

__all__ = ["LAYOUTS", "Bubbles", "Layout", "Slot", "count_bubbles", "count_plan"]

Layout = Literal["kept", "rebuilt", "cached", "repartition", "replicate"]
"""What becomes of the pipeline when its front is frozen.

- `kept`: nothing: the frozen stages hand gradients on, all but the first;
- `rebuilt`: frozen stages run forwards alone, ahead of the others (SmartPipe's slides);
- `cached`: the front comes from a cache, the active stages stay on their ranks;
- `repartition`: the front comes from a cache, the active part is spread over all ranks;
- `replicate`: the front comes from a cache, freed ranks become replicas of the active part
  (PipeTransformer's idea, on paper alone).
"""
LAYOUTS: tuple[Layout, ...] = ("kept", "rebuilt", "cached", "repartition", "replicate")


@dataclass(frozen=True, slots=True)
class Slot:
    """What one rank does, from when to when."""

    rank: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Bubbles:
    """What a schedule costs. All times in units of a stage's forward."""

    time: float
    """From the first forward to the end of the last backward."""
    bubbles: float
    """Idle units of all ranks, as SmartPipe counts them: a rank that has only frozen stages stops
    counting after its last forward, and one that has nothing to do does not count."""
    idle: float
    """Idle units of all ranks from beginning to end, whatever they have to do."""
    ranks: int
    slots: tuple[Slot, ...]
    """Everything that runs, for drawing."""
    frozen: int
    """Stages that run forwards alone."""


def count_bubbles(
    schedule: str,
    stages: int,
    microbatches: int,
    frozen: int = 0,
    *,
    minibatches: int = 1,
    flush: bool = True,
    layout: Layout = "rebuilt",
    ranks: int | None = None,
    backward: float = 1,
) -> Bubbles:
    """Run a schedule on paper.

    One rule gives SmartPipe's sixteen figures. Freezing skips the backward of frozen stages and
    changes nothing else; a rank starts its next task as soon as it is free and what the task needs
    is there, so frozen stages run ahead. Active stages flush between mini-batches. Without a flush
    (1F1B only) stage s keeps at most min(microbatches, stages - s) micro-batches in flight,
    backwards go first, and at most `microbatches` outputs of the frozen part wait for the first
    active stage.

    Args:
        schedule: "GPipe", "1F1B" or "Interleaved1F1B".
        stages: S, of equal cost.
        microbatches: In each mini-batch.
        frozen: How many stages at the front are frozen, 0 to S - 1.
        minibatches: How many are trained one after the other.
        flush: Whether one ends before the next begins. PyTorch always does.
        layout: What becomes of the pipeline; see `Layout`. Front layers that come from a cache
            cost nothing, and the active part is taken to be divisible at will.
        ranks: By default S; for "Interleaved1F1B" a divisor of S.
        backward: Cost of a backward, in forwards.

    Raises:
        ValueError: An argument is out of its range, or the schedule cannot be had.
    """
    name, ranks = named_schedule(schedule), stages if ranks is None else ranks
    if min(stages, microbatches, minibatches, ranks) < 1 or backward <= 0:
        raise ValueError("stages, microbatches, minibatches, ranks and backward must be positive")
    if not 0 <= frozen < stages:
        raise ValueError(f"frozen must be in [0, {stages}), got {frozen}: the last stage trains")
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    if stages % ranks or (stages != ranks and name != "Interleaved1F1B"):
        raise ValueError(
            f"{stages} stages on {ranks} ranks: only Interleaved1F1B has several on a rank, "
            "as many on each"
        )
    if not flush and name != "1F1B":
        raise ValueError(f"{name} flushes between mini-batches; only 1F1B can go without")
    run = _Run(name, minibatches, flush)
    back = Fraction(backward)
    if frozen == 0 or layout in ("kept", "rebuilt"):
        # The first stage alone has nobody to hand gradients to.
        still = min(1, frozen) if layout == "kept" else frozen
        costs = [(Fraction(1), back if s >= still else Fraction(0)) for s in range(stages)]
        return _beside([run.lane(costs, ranks, microbatches, ahead=still)], ranks)
    active, per_rank, empty, copies = stages - frozen, stages // ranks, 0, 1
    if layout == "repartition":
        length, parts = ranks, stages
    elif layout == "replicate":
        length = -(-active // per_rank)
        parts, copies = length * max(1, active // length), min(ranks // length, microbatches)
    elif name == "Interleaved1F1B":
        # Every rank keeps as many stages as the others: whole rounds go, the rest hands on.
        length, empty = ranks, frozen % ranks
        parts = empty + active
    else:
        length = parts = active
    share = Fraction(active, parts - empty)
    nothing = (Fraction(0), Fraction(0))
    costs = [(share, share * back) if s >= empty else nothing for s in range(parts)]
    shares = [(microbatches + i) // copies for i in range(copies)]
    return _beside([run.lane(costs, length, own) for own in shares], ranks)


def count_plan(plan: PipelinePlan, *, backward: float = 1) -> Bubbles:
    """Run one batch on paper as a plan has it; the front is cached or costs nothing.

    Args:
        plan: What is where; its blocks cost what it says.
        backward: Cost of a backward, in forwards.

    Returns:
        In units of a stage's forward where nothing is frozen and all stages cost the same.
    """
    unit = Fraction(sum(plan.costs)) / plan.ranks or Fraction(1)
    costs = []
    for start, stop in plan.stages:
        forward = sum(map(Fraction, plan.costs[start:stop]), Fraction(0))
        trained = sum(map(Fraction, plan.costs[max(start, plan.frozen) : stop]), Fraction(0))
        costs.append((forward / unit, trained * Fraction(backward) / unit))
    ahead = sum(stop <= plan.frozen for _, stop in plan.stages)
    run = _Run(named_schedule(plan.schedule), 1, True)
    lane = run.lane(costs, plan.ranks, plan.microbatches, ahead=ahead)
    return _beside([lane], plan.ranks)


_Cost = tuple[Fraction, Fraction]
"""Of a stage's forward and backward; a stage that costs no backward has none."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What all lanes of one count have in common."""

    schedule: ScheduleName
    minibatches: int
    flush: bool

    def lane(
        self, costs: Sequence[_Cost], ranks: int, microbatches: int, *, ahead: int = 0
    ) -> Bubbles:
        """Run one pipeline, of which the first `ahead` stages run forwards alone."""
        if self.schedule == "Interleaved1F1B" and microbatches % max(1, microbatches // ranks):
            raise ValueError(
                f"Interleaved1F1B on {ranks} ranks runs {microbatches // ranks} rounds, and "
                f"{microbatches} micro-batches are no multiple of that"
            )
        waits: dict[Task, Task] = {}
        if self.flush:
            queues = [[self._order(rank, ranks, microbatches, costs)] for rank in range(ranks)]
        else:
            queues = self._without_flush(microbatches, len(costs), ahead, waits)
        return _measure(_play(queues, costs, waits), ranks, ahead)

    def _order(
        self, rank: int, ranks: int, microbatches: int, costs: Sequence[_Cost]
    ) -> list[Task]:
        order = rank_order(self.schedule, rank, ranks, len(costs), microbatches, self.minibatches)
        return [task for task in order if task.is_forward or costs[task.stage][1]]

    def _without_flush(
        self, microbatches: int, stages: int, frozen: int, waits: dict[Task, Task]
    ) -> list[list[list[Task]]]:
        """Return each stage's backwards and forwards, the former going first; fill in `waits`."""
        total = range(microbatches * self.minibatches)
        queues = []
        for stage in range(stages):
            forwards = [Task(stage, True, j) for j in total]
            queues.append([[Task(stage, False, j) for j in total], forwards])
            if stage < frozen:
                queues[stage] = [forwards]
                continue
            window = min(microbatches, stages - stage)
            waits.update({Task(stage, True, j): Task(stage, False, j - window)
                          for j in total[window:]})  # fmt: skip
        if frozen:
            # Room for what the frozen part gives: the next one waits for one to be used up.
            waits.update({Task(frozen - 1, True, j): Task(frozen, True, j - microbatches)
                          for j in total[microbatches:]})  # fmt: skip
        return queues


def _play(
    queues: Sequence[Sequence[list[Task]]],
    costs: Sequence[_Cost],
    waits: Mapping[Task, Task],
) -> list[tuple[int, Task, Fraction, Fraction]]:
    """Let every free rank start the head of the first of its queues that has all it needs."""
    left = [[list(reversed(queue)) for queue in own] for own in queues]
    done: set[Task] = set()
    running: dict[int, tuple[Task, Fraction, Fraction]] = {}
    slots, now = [], Fraction(0)
    while True:
        for rank, own in enumerate(left):
            for queue in own if rank not in running else ():
                if queue and done.issuperset(_needs(queue[-1], costs, waits)):
                    task = queue.pop()
                    running[rank] = task, now, now + costs[task.stage][not task.is_forward]
                    break
        if not running:
            break
        now = min(end for *_, end in running.values())
        for rank, (task, start, end) in list(running.items()):
            if end == now:
                done.add(task)
                slots.append((rank, task, start, end))
                del running[rank]
    assert not any(queue for own in left for queue in own)
    return slots


def _needs(task: Task, costs: Sequence[_Cost], waits: Mapping[Task, Task]) -> list[Task]:
    needs = [waits[task]] if task in waits else []
    if task.is_forward:
        return [*needs, task._replace(stage=task.stage - 1)] if task.stage else needs
    needs.append(task._replace(is_forward=True))
    if task.stage < len(costs) - 1:
        needs.append(task._replace(stage=task.stage + 1))
    return needs


def _measure(
    slots: Sequence[tuple[int, Task, Fraction, Fraction]], ranks: int, frozen: int
) -> Bubbles:
    time = max(end for *_, end in slots)
    busy = sum((end - start for *_, start, end in slots), Fraction(0))
    counted = Fraction(0)
    for rank in range(ranks):
        own = [slot for slot in slots if slot[0] == rank]
        if own:
            is_ahead = all(task.stage < frozen for _, task, *_ in own)
            counted += max(end for *_, end in own) if is_ahead else time
    drawn = tuple(Slot(rank, task, float(start), float(end)) for rank, task, start, end in slots)
    idle = ranks * time - busy
    return Bubbles(float(time), float(counted - busy), float(idle), ranks, drawn, frozen)


def _beside(lanes: Sequence[Bubbles], ranks: int) -> Bubbles:
    """Put pipelines beside each other on the last ranks; the others have nothing to do."""
    time = max(lane.time for lane in lanes)
    used = sum(lane.ranks for lane in lanes)
    slots: list[Slot] = []
    first, offset = ranks - used, 0
    for lane in lanes:
        slots += [
            Slot(
                slot.rank + first,
                slot.task._replace(microbatch=slot.task.microbatch + offset),
                slot.start,
                slot.end,
            )
            for slot in lane.slots
        ]
        first += lane.ranks
        offset += 1 + max(slot.task.microbatch for slot in lane.slots)
    waiting = sum(lane.ranks * (time - lane.time) for lane in lanes)
    bubbles = sum(lane.bubbles for lane in lanes) + waiting
    idle = sum(lane.idle for lane in lanes) + waiting + (ranks - used) * time
    return Bubbles(time, bubbles, idle, ranks, tuple(slots), lanes[0].frozen)
