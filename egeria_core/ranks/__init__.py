"""Ranks: one decision on all of them, and models that lie on several.

`ranks` shares verdicts and has a DistributedDataParallel follow a freeze; `sharded` lets layers
that `fully_shard` cut be seen whole. Owns nothing.
"""

from egeria_cache.skip import is_sharded
from egeria_core.ranks.ranks import Ranks, rebuild, unwrap, wire_of
from egeria_core.ranks.sharded import (
    global_sums,
    local_part,
    plain_structure,
    to_shards,
    unsharded_names,
    whole,
)

__all__ = [
    "Ranks",
    "global_sums",
    "is_sharded",
    "local_part",
    "plain_structure",
    "rebuild",
    "to_shards",
    "unsharded_names",
    "unwrap",
    "whole",
    "wire_of",
]
