"""`EgeriaLoader`: DataLoader that looks ahead, resumes in mid-epoch, and yields tagged batches.

Owns the look-ahead of a pass and its inner DataLoader with its workers. It never opens a store and
never sees the model: what may be served it asks of the cache.
"""

from egeria_cache.loader.loader import EgeriaLoader, original_of
from egeria_cache.loader.samplers import ShardAffineSampler
from egeria_cache.loader.takeover import take_over

__all__ = ["EgeriaLoader", "ShardAffineSampler", "original_of", "take_over"]
