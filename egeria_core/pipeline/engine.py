"""Runs one plan on `torch.distributed.pipelining`: stages, schedules, a batch's way through them.

Made anew for every plan. Stages that were not built after a freeze would go on sending gradients to
frozen ones, and fail when those train again. Each rank brings rows of its own; the batch is all of
them, those of rank 0 first, and they are brought to where the pipeline begins and ends.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from egeria_cache import EgeriaError
from egeria_core.pipeline.plan import PipelinePlan


def count_rows(
    inputs: Any, targets: Any, frozen: int, group: dist.ProcessGroup, wire: torch.device
) -> tuple[list[int], int]:
    """Ask every rank how many rows it brings.

    Returns:
        Rows of each rank, and a number for the structure, shapes and types of a row: the same on
        all ranks.

    Raises:
        EgeriaError: They cannot be put into one batch, or the ranks have frozen differently.
    """
    kind, number = _kind((inputs, targets))
    mine = torch.tensor([number, kind, frozen], dtype=torch.int64, device=wire)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    ranks: list[list[int]] = torch.stack(table).tolist()
    for what, column in (("rows of another shape, type or structure", 1), ("frozen blocks", 2)):
        values = [row[column] for row in ranks]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise EgeriaError(
                f"rank {other} differs from rank 0 in its {what}; all ranks must bring rows that "
                "fit into one batch (pad them to one length), at the same step"
            )
    rows = [row[0] for row in ranks]
    if -1 in rows:
        raise EgeriaError(
            f"rank {rows.index(-1)} brings inputs and targets of different numbers of rows, or "
            "something other than tensors"
        )
    if not sum(rows):
        raise EgeriaError("no rank brings any rows")
    return rows, ranks[0][1]


def route(
    tree: Any,
    counts: Sequence[int],
    to: int,
    group: dist.ProcessGroup,
    wire: torch.device,
    device: torch.device,
) -> Any:
    """Send all rows to one rank; return them there, and none elsewhere.

    Args:
        tree: Tensors, shape (rows of this rank, ...).
        counts: Rows of each rank.
        to: The rank that takes them.
        group: All ranks of the pipeline.
        wire: Where the group's messages lie.
        device: Where the result is wanted.
    """
    rank = dist.get_rank(group)
    sent = [counts[rank] if other == to else 0 for other in range(len(counts))]
    received = list(counts) if rank == to else [0] * len(counts)
    leaves, spec = tree_flatten(tree)
    found = []
    for leaf in leaves:
        # As bytes: not every backend knows every type.
        width = math.prod(leaf.shape[1:])
        rows = leaf.detach().to(wire).reshape(len(leaf), width).contiguous().view(torch.uint8)
        taken = torch.empty(sum(received), rows.shape[1], dtype=torch.uint8, device=wire)
        dist.all_to_all_single(taken, rows, received, sent, group=group)
        found.append(taken.view(leaf.dtype).reshape(len(taken), *leaf.shape[1:]).to(device))
    return tree_unflatten(found, spec)


def _kind(tree: Any) -> tuple[int, int]:
    """Return a number for the kind of a row, and how many rows there are; -1 if that is unclear."""
    leaves, spec = tree_flatten(tree)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return 0, -1
    told = [str(spec), *(f"{tuple(leaf.shape[1:])} {leaf.dtype}" for leaf in leaves)]
    numbers = {leaf.shape[0] for leaf in leaves}
    return zlib.crc32("; ".join(told).encode()), numbers.pop() if len(numbers) == 1 else -1


MAX_SCHEDULES = 4
"""Kinds of batches that are kept ready: whole ones, an epoch's last one, some more."""
LossFunction = Callable[[Any, Any], Tensor]
"""From an output and its targets to the mean loss of their rows, a scalar."""


def check_torch() -> None:
    """Refuse a PyTorch whose stages learn their shapes in another way.

    Raises:
        EgeriaError: It is older than 2.13, or too new.
    """
    if not hasattr(PipelineStage, "_compute_outputs"):
        raise EgeriaError(
            f"torch {torch.__version__} has other pipelines than torch 2.13, for which this is made"
        )


class Engine:
    """This rank's stage under one plan.

    Args:
        plan: What is where.
        blocks: All blocks, this rank's whole.
        loss_function: Called on the rank of the last stage with each micro-batch.
        device: Where its blocks are.
        group: The ranks of the plan.
        root: Its `training` flag is off while the engine studies shapes, so that nobody takes that
            for a training forward.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        blocks: Sequence[nn.Module],
        loss_function: LossFunction,
        device: torch.device,
        group: dist.ProcessGroup,
        root: nn.Module,
    ) -> None:
        self._plan, self._loss_function, self._device = plan, loss_function, device
        self._measure = loss_function
        self._schedules: dict[Any, Any] = {}
        self._targets: Any = None
        self._weight = 0.0
        self._rank, self._group = dist.get_rank(group), group
        start, stop = plan.stages[self._rank]
        self._stage = StageModule(blocks[start:stop], root)

    def step(
        self,
        kind: Hashable,
        num_rows: int,
        inputs: Sequence[Tensor],
        targets: Any,
        measure: LossFunction | None = None,
    ) -> Tensor:
        """Run forward and backward of this rank's part; gradients are those of the mean loss.

        Args:
            kind: Shapes of the batch's rows, the same on all ranks; another kind is studied anew.
            num_rows: Rows of the batch. The last micro-batches may have fewer than the others;
                they are filled up, without weight in the loss.
            inputs: On the rank of the first stage: shape (num_rows, ...) each.
            targets: On the rank of the last stage: the same number of rows.
            measure: Run forwards alone, and this in place of the loss.

        Returns:
            The part of the mean loss that was computed on this rank; 0 where there is none.
        """
        size = -(-num_rows // self._plan.microbatches)
        padded = size * self._plan.microbatches
        arguments = [_fill_up(rows, padded) for rows in inputs] if self._rank == 0 else []
        trains = measure is None
        key = (trains, size, kind)
        schedule = self._schedules.pop(key, None)
        if schedule is None:
            ranks, group = self._plan.ranks, self._group
            stage = _Stage(self._stage, self._rank, ranks, self._device, group=group)
            # Forwards alone have one order.
            is_1f1b = trains and self._plan.schedule == "1F1B"
            make = Schedule1F1B if is_1f1b else ScheduleGPipe
            schedule = make(stage, self._plan.microbatches, loss_fn=self._loss, scale_grads=False)
        self._schedules[key] = schedule
        if len(self._schedules) > MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        keywords: dict[str, Any] = {}
        losses: list[Tensor] = []
        if self._rank == self._plan.ranks - 1:
            numbers = torch.arange(padded)
            numbers[num_rows:] = -1
            self._targets, self._weight = targets, 1 / num_rows
            self._measure = measure or self._loss_function
            keywords = {"target": numbers, "losses": losses}
        if trains:
            schedule.step(*arguments, **keywords, return_outputs=False)
        else:
            with torch.no_grad():
                schedule.eval(*arguments, **keywords)
        self._targets = None
        return sum((part.detach() for part in losses), torch.zeros((), device=self._device))

    def _loss(self, output: Any, numbers: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss; rows that fill it up have none."""
        start, count = int(numbers[0]), int((numbers >= 0).sum())
        if count == 0:
            leaves = [output] if isinstance(output, Tensor) else output
            return torch.stack([leaf.sum() for leaf in leaves]).sum() * 0
        output = tree_map_only(Tensor, lambda leaf: leaf[:count], output)
        targets = tree_map_only(Tensor, lambda leaf: leaf[start : start + count], self._targets)
        return self._measure(output, targets) * (count * self._weight)


class _Stage(PipelineStage):
    """A stage that learns its shapes without a trace."""

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        assert isinstance(module, StageModule)
        return module.study(*args)


class StageModule(nn.Module):
    """Blocks that run one after another on one rank."""

    def __init__(self, blocks: Sequence[nn.Module], root: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.__dict__["root"] = root

    def forward(self, *args: Any) -> Any:
        """Run the blocks; without any, hand on what came."""
        output = args[0] if len(args) == 1 else args
        for block in self.blocks:
            output = block(*output) if isinstance(output, tuple) else block(output)
        # A message has no strides of its own.
        return tree_map_only(Tensor, Tensor.contiguous, output)

    def study(self, *args: Any) -> Any:
        """Run once on memory that nobody has filled, as a new schedule does to learn the shapes.

        That leaves no trace in buffers (a BatchNorm's statistics), and `root` is not in training.
        """
        root = self.__dict__["root"]
        was_training = root.training
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        try:
            root.training = False
            return functional_call(self, buffers, args)
        finally:
            root.training = was_training


def _fill_up(rows: Tensor, padded: int) -> Tensor:
    """Repeat the first row until there are so many."""
    missing = padded - rows.shape[0]
    if missing == 0:
        return rows
    first = rows[:1] if rows.shape[0] else rows.new_zeros((1, *rows.shape[1:]))
    return torch.cat([rows, first.expand(missing, *rows.shape[1:])])
