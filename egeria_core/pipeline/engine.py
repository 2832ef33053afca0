"""Runs one plan on `torch.distributed.pipelining`: stages, schedules, a batch's way through them.

Made anew for every plan. Stages that were not built after a freeze would go on sending gradients to
frozen ones, and fail when those train again. Each rank brings rows of its own; the batch is all of
them, those of rank 0 first, and they are brought to where the pipeline begins and ends.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from egeria_cache import EgeriaError
from egeria_core.pipeline.plan import PipelinePlan
from egeria_core.pipeline.transfer import Carrier

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
        carrier: Knows the ranks of the plan, and where blocks and messages lie.
        root: Its `training` flag is off while the engine studies shapes, so that nobody takes that
            for a training forward.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        blocks: Sequence[nn.Module],
        loss_function: LossFunction,
        carrier: Carrier,
        root: nn.Module,
    ) -> None:
        self._plan, self._loss_function, self._measure = plan, loss_function, loss_function
        self._group, self._device, self._wire = carrier.group, carrier.device, carrier.wire
        self._schedule_for = lru_cache(MAX_SCHEDULES)(self._made_for)
        self._targets: Any = None
        self._weight = 0.0
        self._rank = dist.get_rank(carrier.group)
        start, stop = plan.stages[self._rank]
        self._stage = StageModule(blocks[start:stop], root)

    def step(
        self, inputs: Sequence[Tensor], targets: Any, measure: LossFunction | None = None
    ) -> Tensor:
        """Run forward and backward of one batch; gradients are those of the mean loss.

        Args:
            inputs: This rank's rows: shape (B, ...) each.
            targets: A tensor or a tree of tensors with as many rows.
            measure: Run forwards alone, and this in place of the loss.

        Returns:
            The mean over the rows of all ranks, on every rank.

        Raises:
            EgeriaError: The ranks' rows do not fit into one batch.
        """
        counts, kind = self._count(inputs, targets)
        num_rows, trains, last = sum(counts), measure is None, self._plan.ranks - 1
        inputs, targets = self._route(inputs, counts, 0), self._route(targets, counts, last)
        # The last micro-batches may have fewer rows than the others: they are filled up with the
        # first one, which has no weight in the loss there.
        size = -(-num_rows // self._plan.microbatches)
        numbers = torch.arange(size * self._plan.microbatches)
        numbers[num_rows:] = -1
        if self._rank != 0:
            inputs = []
        elif len(numbers) > num_rows:
            inputs = [rows[numbers.clamp(min=0)] for rows in inputs]
        keywords: dict[str, Any] = {}
        losses: list[Tensor] = []
        if self._rank == last:
            self._targets, self._weight = targets, 1 / num_rows
            self._measure = measure or self._loss_function
            keywords = {"target": numbers, "losses": losses}
        schedule = self._schedule_for(trains, size, kind)
        if trains:
            schedule.step(*inputs, **keywords, return_outputs=False)
        else:
            with torch.no_grad():
                schedule.eval(*inputs, **keywords)
        self._targets = None
        mean = sum((part.detach() for part in losses), torch.zeros((), device=self._device))
        mean = mean.to(self._wire)
        dist.all_reduce(mean, group=self._group)
        return mean.to(self._device)

    def _count(self, inputs: Any, targets: Any) -> tuple[list[int], int]:
        """Ask every rank how many rows it brings.

        Returns:
            Rows of each rank, and a number for the structure, shapes and types of a row, the same
            on all ranks: another kind is studied anew.

        Raises:
            EgeriaError: They cannot be put into one batch, or the ranks have frozen differently.
        """
        kind, number = _kind((inputs, targets))
        mine = torch.tensor([number, kind, self._plan.frozen], device=self._wire)
        table = [torch.empty_like(mine) for _ in range(self._plan.ranks)]
        dist.all_gather(table, mine, group=self._group)
        rows, kinds, frozen = torch.stack(table, 1).tolist()
        alike = {"rows of another shape, type or structure": kinds, "frozen blocks": frozen}
        for what, values in alike.items():
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                raise EgeriaError(
                    f"rank {other} differs from rank 0 in its {what}; all ranks must bring rows "
                    "that fit into one batch (pad them to one length), at the same step"
                )
        if -1 in rows:
            raise EgeriaError(
                f"rank {rows.index(-1)} brings inputs and targets of different numbers of rows, or "
                "something other than tensors"
            )
        if not sum(rows):
            raise EgeriaError("no rank brings any rows")
        return rows, kind

    def _route(self, tree: Any, counts: Sequence[int], to: int) -> Any:
        """Send all ranks' rows of a tree of tensors to one; return them there, none elsewhere."""
        sent = [counts[self._rank] if other == to else 0 for other in range(len(counts))]
        received = list(counts) if self._rank == to else [0] * len(counts)

        def bring(leaf: Tensor) -> Tensor:
            # As bytes: not every backend knows every type.
            rows = leaf.detach().to(self._wire).reshape(len(leaf), math.prod(leaf.shape[1:]))
            rows = rows.contiguous().view(torch.uint8)
            taken = rows.new_empty(sum(received), rows.shape[1])
            dist.all_to_all_single(taken, rows, received, sent, group=self._group)
            taken = taken.view(leaf.dtype).reshape(len(taken), *leaf.shape[1:])
            return taken.to(self._device)

        return tree_map(bring, tree)

    def _made_for(self, trains: bool, size: int, kind: int) -> Any:
        """Return what runs micro-batches of so many rows of a kind; a few are kept ready."""
        ranks, group = self._plan.ranks, self._group
        stage = _Stage(self._stage, self._rank, ranks, self._device, group=group)
        # Forwards alone have one order.
        make = Schedule1F1B if trains and self._plan.schedule == "1F1B" else ScheduleGPipe
        return make(stage, self._plan.microbatches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Any, numbers: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss; rows that fill it up have none."""
        start, count = int(numbers[0]), int((numbers >= 0).sum())
        if count == 0:
            return torch.stack([leaf.sum() for leaf in tree_leaves(output)]).sum() * 0
        output = tree_map_only(Tensor, lambda leaf: leaf[:count], output)
        targets = tree_map_only(Tensor, lambda leaf: leaf[start : start + count], self._targets)
        return self._measure(output, targets) * (count * self._weight)


def _kind(tree: Any) -> tuple[int, int]:
    """Return a number for the kind of a row, and how many rows there are; -1 if that is unclear."""
    leaves, spec = tree_flatten(tree)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return 0, -1
    told = [str(spec), *(f"{tuple(leaf.shape[1:])} {leaf.dtype}" for leaf in leaves)]
    numbers = {leaf.shape[0] for leaf in leaves}
    return zlib.crc32("; ".join(told).encode()), numbers.pop() if len(numbers) == 1 else -1


class _Stage(PipelineStage):
    """A stage that learns its shapes without a trace."""

    def _compute_outputs(self, *args: Any, module: Any, **kwargs: Any) -> Any:
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
