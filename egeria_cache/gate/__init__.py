"""Does skipping pay? Measured costs, whole steps side by side, and the figures that users see.

Owns numbers alone: no thread, no file, no clock. It never touches a model or a store; it is told
what things took, and answers where to cut and whether to go on.
"""

from egeria_cache.gate.accounts import Accounts
from egeria_cache.gate.gate import CostMeter, Costs, choose
from egeria_cache.gate.pilot import Pilot, Turn
from egeria_cache.gate.stats import CacheStats

__all__ = ["Accounts", "CacheStats", "CostMeter", "Costs", "Pilot", "Turn", "choose"]
