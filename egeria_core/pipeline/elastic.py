"""`ElasticPipeline`: a model on several ranks whose pipeline follows its frozen front."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from egeria_cache import EgeriaError, FrozenFront
from egeria_cache.arguments import check_choice
from egeria_cache.device import device_of
from egeria_core.pipeline.engine import Engine, LossFunction, check_torch
from egeria_core.pipeline.plan import OnFreeze, PipelinePlan
from egeria_core.pipeline.transfer import Carrier, place
from egeria_core.ranks import wire_of

log = logging.getLogger("egeria")


def check_untied(model: nn.Sequential) -> None:
    """Refuse blocks that could not lie on different ranks.

    Raises:
        ValueError: Two of them are one, or share a parameter or a buffer.
    """
    owners: dict[int, str] = {}
    for name, block in model._modules.items():
        for part in (block, *block.parameters(), *block.buffers()):
            other = owners.setdefault(id(part), name)
            if other != name:
                raise ValueError(
                    f"block {name!r} is block {other!r} too, or shares a tensor with it; blocks of "
                    "a pipeline lie on different ranks: copy or untie them"
                )


class ElasticPipeline:
    """Trains blocks on several ranks with a schedule of `torch.distributed.pipelining`.

    Make it on every rank, with the same blocks and optimizers over all their parameters. Each rank
    keeps the blocks of its own stages; of the others an outline is left (tensors on `meta`). Every
    rank brings rows of its own to `step`, as in data-parallel training; the batch is all of them,
    those of rank 0 first. Gradients are those of the mean loss over the batch, whatever the number
    of rows.

    When blocks freeze (`freeze_to`, which `PipelineController` calls), stages and schedule are made
    anew: nothing is sent back into frozen blocks. With `on_freeze="repartition"`, and wherever
    there is a `cache`, frozen blocks leave the pipeline. They become a `FrozenFront`: a copy on
    every rank, run on the rank's own rows, or read from its cache.

    Args:
        blocks: The model in forward order; each is called with what the one before returns, a tuple
            as several arguments. Names of an `nn.Sequential` are kept.
        optimizers: One, or several, made over the parameters of all blocks.
        loss_function: From a micro-batch's output and targets to the mean loss of its rows.
        microbatches: Into how many a batch is cut.
        schedule: "GPipe" or "1F1B".
        on_freeze: "repartition", the active blocks are spread over all ranks, with weights and
            optimizer state; "stay", no block moves.
        cache: Directory for the front's activations; ranks of one host may share it. None: the
            front is computed each time; with "stay" it then remains in the pipeline.
        costs: Relative cost of each block, to balance the stages; equal by default.
        device: Where this rank computes; that of the blocks by default.
        group: The ranks; all by default.
        cache_options: Of `FrozenFront`.

    Raises:
        ValueError: The schedule cannot be had, there are too few blocks or micro-batches, or two
            blocks share a parameter.
        EgeriaError: This version of PyTorch has other pipelines.

    Not thread-safe. All methods but properties are called on all ranks at the same step.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module] | nn.Sequential,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss_function: LossFunction,
        *,
        microbatches: int,
        schedule: str = "1F1B",
        on_freeze: OnFreeze = "repartition",
        cache: str | Path | None = None,
        costs: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        **cache_options: Any,
    ) -> None:
        check_torch()
        check_choice("on_freeze", on_freeze, OnFreeze)
        self.model = blocks if isinstance(blocks, nn.Sequential) else nn.Sequential(*blocks)
        """The blocks by name; on this rank those of other ranks are outlines."""
        self._blocks = list(self.model.children())
        check_untied(self.model)
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        self.optimizers = tuple(optimizers)
        self.on_freeze: OnFreeze = on_freeze
        self.group = cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)
        self.rank = dist.get_rank(self.group)
        """This rank in the group."""
        self.device = device_of(self.model) if device is None else torch.device(device)
        self.wire = wire_of(self.group, self.device)
        """Where the group's messages lie."""
        world = dist.get_world_size(self.group)
        self.plan = PipelinePlan.start(
            [1.0] * len(self._blocks) if costs is None else costs, world, schedule=schedule,
            microbatches=microbatches,
        )  # fmt: skip
        """What is where now."""
        if len(self.plan.costs) != len(self._blocks):
            raise ValueError(f"{len(self._blocks)} blocks and {len(self.plan.costs)} costs")
        self.front = FrozenFront(self._blocks, cache, device=self.device, **cache_options)
        """The frozen blocks, whole on this rank wherever they left the pipeline."""
        self.cache = self.front.cache
        """For this rank's `EgeriaLoader`."""
        self.bytes_moved = 0
        """Weights, buffers and optimizer state that this rank sent with blocks that moved."""
        self._loss_function = loss_function
        self._carrier = Carrier(self.group, self.device, self.wire, self.optimizers)
        self._engine: Engine | None = None
        self._expected = 0
        self._release()
        for index in self.plan.held_by(self.rank):
            self._blocks[index].to(self.device)

    def planned(self, frozen: int) -> PipelinePlan:
        """Return the plan that would follow if so many blocks were frozen."""
        has_front = self.cache is not None or self.on_freeze != "stay"
        return self.plan.frozen_to(frozen, self.on_freeze, has_front=has_front)

    def owner(self, block: int) -> int:
        """Return the rank that trains a block."""
        return self.plan.homes[block]

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Run forward and backward of one batch; then it is the optimizers' turn.

        Args:
            inputs: This rank's rows: a tensor, shape (B, ...), or a tuple of them.
            targets: A tensor or a tree of tensors with as many rows.

        Returns:
            The mean loss over the rows of all ranks, on every rank.

        Raises:
            EgeriaError: The ranks' rows do not fit into one batch.
        """
        return self._run(inputs, targets, None)

    def evaluate(self, inputs: Any, targets: Any, measure: LossFunction | None = None) -> Tensor:
        """Run the forward of one batch, without gradients.

        Args:
            inputs: As for `step`.
            targets: As for `step`.
            measure: From a micro-batch's output and targets to a mean over its rows, a scalar; the
                loss by default.

        Returns:
            The mean over the rows of all ranks, on every rank.
        """
        return self._run(inputs, targets, measure or self._loss_function)

    def _run(self, inputs: Any, targets: Any, measure: LossFunction | None) -> Tensor:
        if self._expected != self.plan.frozen:
            raise EgeriaError(
                f"the state that was loaded has {self._expected} frozen blocks: load the "
                f"controller's state as well, or freeze them and call freeze_to({self._expected})"
            )
        if self._engine is None:
            self._engine = Engine(
                self.plan, self._blocks, self._loss_function, self._carrier, self.model
            )
        rows: Any = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        if self.plan.front:
            rows = self.front(*tree_map_only(Tensor, lambda leaf: leaf.to(self.device), rows))
        rows, targets = self.front.plain(rows), self.front.plain(targets)
        return self._engine.step(rows if isinstance(rows, tuple) else (rows,), targets, measure)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all ranks' gradients so that their 2-norm together is at most `max_norm`.

        Returns:
            The norm before, on every rank.
        """
        own = [p for p in self.model.parameters() if p.grad is not None]
        square = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]).square()
        square = square.to(self.wire)
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt().to(self.device)
        nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm

    def freeze_to(self, frozen: int) -> None:
        """Have the pipeline follow: the first `frozen` blocks were frozen, or are trained again.

        Between `optimizer.step()` and the next forward. `requires_grad` is the caller's.

        Raises:
            ValueError: Parameters of the first blocks are trainable, or nothing would be left.
        """
        self._expected = frozen
        if frozen == self.plan.frozen:
            return
        for name, parameter in nn.ModuleList(self._blocks[:frozen]).named_parameters():
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} of the first {frozen} blocks is trainable; freeze it first"
                )
        old, new = self.plan, self.planned(frozen)
        # Stages hold their parameters' gradient nodes, which a parameter that moves must not have.
        self._engine = None
        gc.collect()
        if new.front < old.front:
            self.front.freeze(new.front)
        for block, source, target in old.moves(new):
            if self.rank == source:
                self.bytes_moved += self._carrier.send(self._blocks[block], target)
            elif self.rank == target:
                self._carrier.receive(self._blocks[block], source)
        for block in range(old.front, new.front):  # every rank needs those now
            self._carrier.share(self._blocks[block], new.homes[block])
        self.plan = new
        self._release()
        self.front.freeze(new.front)

    def _release(self) -> None:
        """Drop what is not held here, or no longer."""
        held = set(self.plan.held_by(self.rank))
        for index, block in enumerate(self._blocks):
            if self.rank != self.plan.homes[index]:
                self._carrier.forget(block)
            if index not in held:
                place(block, torch.device("meta"))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: weights and optimizer state of its blocks, and the plan."""
        own = [i for i, home in enumerate(self.plan.homes) if home == self.rank]
        return {
            "rank": self.rank, "ranks": self.plan.ranks,
            "frozen": self.plan.frozen, "homes": list(self.plan.homes),
            "blocks": {i: self._blocks[i].state_dict() for i in own},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict()` of this rank. Then load the controller's.

        Raises:
            EgeriaError: It is another rank's, or was saved with another number of ranks: on all
                ranks, if on any.
        """
        states: list[Any] = [None] * self.plan.ranks
        dist.all_gather_object(states, (state["rank"], state["ranks"]), group=self.group)
        for rank, (saved_by, ranks) in enumerate(states):
            if (saved_by, ranks) != (rank, self.plan.ranks):
                given = f"rank {rank} of {self.plan.ranks} was given the state of rank {saved_by}"
                raise EgeriaError(f"{given} of {ranks}")
        self._engine = None
        gc.collect()
        self.front.freeze(0)
        self.plan = replace(self.plan.frozen_to(0, self.on_freeze), homes=tuple(state["homes"]))
        self._release()
        for index, weights in state["blocks"].items():
            place(self._blocks[index], self.device)
            self._blocks[index].load_state_dict(weights)
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self._expected = state["frozen"]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return weights and buffers of the whole model, on the CPU, on every rank."""
        state: dict[str, Tensor] = {}
        for index, (name, block) in enumerate(self.model.named_children()):
            owner = self.owner(index)
            own = block.state_dict() if self.rank == owner else None
            shared: list[Any] = [None if own is None else {k: v.cpu() for k, v in own.items()}]
            dist.broadcast_object_list(shared, group=self.group, device=self.wire, group_src=owner)
            state.update({f"{name}.{key}": value for key, value in shared[0].items()})
        return state

    def close(self) -> None:
        """Close the cache; idempotent."""
        self._engine = None
        self.front.close()
