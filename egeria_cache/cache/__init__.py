"""One cache: ties the model, the store and the loaders together, and gives each its own side of it.

`cache.py` is what a user sees. `loader_api.py` is what a loader asks, and what one run notes for
the next; `engine_callbacks.py` what the skip engine tells and asks; `boundary.py` where the model
is frozen up to and who moves that, and the state that all share. `front.py` is a frozen front that
was taken out of its model. Owns the store, the reader threads and the engine, and closes them.
"""

from egeria_cache.cache.boundary import BoundaryMoved
from egeria_cache.cache.cache import ActivationCache
from egeria_cache.cache.front import FrozenFront
from egeria_cache.cache.loader_api import LoaderApi, draws_noted

__all__ = ["ActivationCache", "BoundaryMoved", "FrozenFront", "LoaderApi", "draws_noted"]
