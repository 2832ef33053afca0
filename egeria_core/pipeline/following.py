"""A freeze controller for a pipeline: measured where the first active layer is, decided everywhere.

Each block is a layer. The rank that trains the frontmost active one measures it, on its first
micro-batch; what it read is broadcast, and every rank feeds it to the same policy. Policies that
judge all layers get each layer's readings from the rank that trains it. What a move saves is told
by the plan that follows it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from egeria_cache import EgeriaError
from egeria_core.controller import FreezeController
from egeria_core.history import Verdict
from egeria_core.pipeline.elastic import ElasticPipeline
from egeria_core.policies import Policy
from egeria_core.ranks import Ranks
from egeria_core.watch import LayerMap


class PipelineController(FreezeController):
    """Decides which front blocks of an `ElasticPipeline` have converged, and has it follow.

    Args:
        pipeline: Made on every rank, like this.
        policy: As for `FreezeController`.
        options: As for `FreezeController`, except for `layers`, which are the blocks. Listeners are
            called when the pipeline has followed.

    Call `step(loss)` on every rank after each `optimizer.step()`, with what `pipeline.step` gave.
    Learning rates must be the same on all ranks.
    """

    def __init__(
        self, pipeline: ElasticPipeline, policy: str | Policy | None = None, **options: Any
    ) -> None:
        self.pipeline = pipeline
        names = [name for name, _ in pipeline.model.named_children()]
        optimizer = pipeline.optimizers[0]
        super().__init__(pipeline.model, optimizer, None, policy, layers=names, **options)
        # What freezing the first k layers saves is told by the plans that follow it.
        times = [pipeline.planned(frozen).time() for frozen in range(len(self.layers))]
        self._saves = [1 - time / times[0] for time in times]

    def _make_map(self) -> LayerMap:
        layers = super()._make_map()
        layers.settle()
        return layers

    def _make_ranks(self) -> Ranks:
        return _PipelineRanks(self)

    @property
    def _is_mine(self) -> bool:  # type: ignore[override]
        return self.per_layer or self.pipeline.owner(self.num_frozen) == self.pipeline.rank

    def _follow(self) -> None:
        self.pipeline.freeze_to(self.num_frozen)


class _PipelineRanks(Ranks):
    """All ranks of a pipeline; who measures moves with the front."""

    def __init__(self, controller: PipelineController) -> None:
        super().__init__(None, controller.model)
        self._controller = controller
        self._group, self._device = controller.pipeline.group, controller.pipeline.wire
        self.is_first, self.measures = controller.pipeline.rank == 0, True

    def share(self, verdicts: list[Verdict], frozen: int) -> list[Verdict]:
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (frozen, verdicts), group=self._group)
        if any(other != frozen for other, _ in everyone):
            raise EgeriaError("the ranks of a pipeline have frozen different numbers of layers")
        if not self._controller.per_layer:
            return list(everyone[self._controller.pipeline.owner(frozen)][1])
        read = [{verdict.step: verdict.values for verdict in own} for _, own in everyone]
        return [
            Verdict(step, frozen, None, self._joined([own.get(step) for own in read]))
            for step in sorted(set().union(*read))
        ]

    def _joined(self, readings: list[Any]) -> tuple[float | None, ...]:
        """Return each layer's values from the rank that trains it; the others' from any rank."""
        count = len(self._controller.layers)
        longest = max(len(reading or ()) for reading in readings)
        head = longest % count
        joined: list[float | None] = list(next(r for r in readings if r)[:head])
        for place in range(longest - head):
            own = readings[self._controller.pipeline.owner(place % count)]
            joined.append(own[head + place] if own else None)
        return tuple(joined)
