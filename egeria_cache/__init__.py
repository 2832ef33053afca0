"""Storage-backed activation cache and data loader for networks with a frozen front.

cache = ActivationCache(model, "runs/cache", boundary="layer3")
loader = EgeriaLoader(dataset, batch_size=128, shuffle=True, cache=cache)
for images, targets in loader:
    loss = criterion(model(images), targets)   # the frozen front is skipped on a hit
"""

from __future__ import annotations

from egeria_cache.augment import FeatureAugment
from egeria_cache.cache import ActivationCache, BoundaryMoved, FrozenFront
from egeria_cache.errors import BoundaryError, EgeriaError, ForeignError, StoreError
from egeria_cache.gate import CacheStats
from egeria_cache.integrations import attach, keep_through_accelerate
from egeria_cache.loader import EgeriaLoader, ShardAffineSampler
from egeria_cache.samples import sample_seed
from egeria_cache.skip import FrozenPrefix
from egeria_cache.store import ActivationStore
from egeria_cache.version import __version__

__all__ = [
    "ActivationCache", "ActivationStore", "BoundaryError", "BoundaryMoved", "CacheStats",
    "EgeriaError", "EgeriaLoader", "FeatureAugment", "ForeignError", "FrozenFront", "FrozenPrefix",
    "ShardAffineSampler", "StoreError", "__version__", "sample_seed",
]  # fmt: skip

ActivationCache._takes_over = staticmethod(attach)
EgeriaLoader._asked_by_accelerate = staticmethod(keep_through_accelerate)
