"""One cache: ties the model, the store and the loaders together, and gives each its own side of it.

`cache.py` is what a user sees. Behind it is one object in three layers: `boundary.py` is the state,
where the model is frozen up to and who moves that; `engine_callbacks.py` what the skip engine tells
and asks; `loader_api.py` what a loader asks, and what one run notes for the next. `front.py` is a
frozen front that was taken out of its model. Owns the store, the reader threads and the engine, and
closes them.
"""

from egeria_cache.cache.boundary import BoundaryMoved
from egeria_cache.cache.cache import ActivationCache
from egeria_cache.cache.front import FrozenFront
from egeria_cache.cache.loader_api import LoaderApi, draws_noted

__all__ = ["ActivationCache", "BoundaryMoved", "FrozenFront", "LoaderApi", "draws_noted"]
