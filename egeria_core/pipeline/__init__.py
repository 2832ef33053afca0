"""Pipelines whose front freezes: on paper, and on `torch.distributed.pipelining`.

On paper, pure: `orders.py` is what each rank runs, `bubbles.py` how long that takes, `drawing.py`
how it looks; `plan.py` is which block is where and what moves, `routes.py` which rows go where. On
several ranks: `elastic.py` is what a user sees; `engine.py` runs a plan, `transfer.py` moves blocks
with their optimizer state, `rows.py` brings rows to where a pipeline begins and ends, and
`following.py` is a freeze controller that all ranks share; `groups.py` makes groups of ranks. Owns
no thread, and no file but the cache of a frozen front.
"""

from egeria_core.pipeline.bubbles import LAYOUTS, Bubbles, Layout, Slot, count_bubbles, count_plan
from egeria_core.pipeline.elastic import ElasticPipeline
from egeria_core.pipeline.following import PipelineController
from egeria_core.pipeline.orders import SCHEDULES, ScheduleName, Task, check_schedule, rank_order
from egeria_core.pipeline.plan import Move, OnFreeze, PipelinePlan, partition
from egeria_core.pipeline.routes import split_sizes

__all__ = [
    "LAYOUTS",
    "SCHEDULES",
    "Bubbles",
    "ElasticPipeline",
    "Layout",
    "Move",
    "OnFreeze",
    "PipelineController",
    "PipelinePlan",
    "ScheduleName",
    "Slot",
    "Task",
    "check_schedule",
    "count_bubbles",
    "count_plan",
    "partition",
    "rank_order",
    "split_sizes",
]
