"""Does skipping pay? Is a proof worth while, whole steps side by side, and figures for users.

Owns numbers alone: no thread, no file. It never touches a model or a store; it is told
what things took, and answers where to cut and whether to go on.
"""

from egeria_cache.gate.policy import AuditPlan, Counters, Kind, ServingPolicy, choose
from egeria_cache.gate.stats import CacheStats

__all__ = ["AuditPlan", "CacheStats", "Counters", "Kind", "ServingPolicy", "choose"]
