"""Pipelines whose front freezes, on `torch.distributed.pipelining`.

`elastic.py` is what a user sees. Pure: `plan.py` is which block is where and what moves. On several
ranks: `engine.py` brings rows to where a pipeline begins and ends and runs its plan, `transfer.py`
moves blocks with their optimizer state, and `following.py` is a freeze controller that all
ranks share. Owns no thread, and no file but the cache of a frozen front.
"""

from egeria_core.pipeline.elastic import ElasticPipeline
from egeria_core.pipeline.following import PipelineController
from egeria_core.pipeline.plan import OnFreeze, PipelinePlan, partition

__all__ = ["ElasticPipeline", "OnFreeze", "PipelineController", "PipelinePlan", "partition"]
