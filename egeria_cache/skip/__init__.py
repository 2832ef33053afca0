"""The frozen front inside the user's own `model(x)`: proved once, then skipped.

Owns the stand-in for the model's `forward`, and holds the frozen modules in inference mode. It has
no thread, no file, and no notion of a store: what it captures goes to its `SkipHost`, and what it
serves comes from a batch's `Entry`.

`engine.py` is the whole way of a batch through the model. Finding a cut: `rehearsal` > `proof` >
`probe`, `evidence`. Serving it: `passes` > `recipe` > `placeholder`. Noticing that it no longer
holds: `guards`. Its name for ever: `address`. Inference mode: `frozen`, `front`, `dropout`.
"""

from egeria_cache.skip.attach import inner_model
from egeria_cache.skip.compare import same_rows
from egeria_cache.skip.cut import Cut, Step
from egeria_cache.skip.engine import MAX_CHAINS, Filled, SkipEngine, SkipHost
from egeria_cache.skip.frozen import FrozenPrefix
from egeria_cache.skip.names import module_named
from egeria_cache.skip.places import Candidate, candidates
from egeria_cache.skip.state import RandomState
from egeria_cache.skip.surroundings import what_code_keeps

__all__ = [
    "MAX_CHAINS",
    "Candidate",
    "Cut",
    "Filled",
    "FrozenPrefix",
    "RandomState",
    "SkipEngine",
    "SkipHost",
    "Step",
    "candidates",
    "inner_model",
    "module_named",
    "same_rows",
    "what_code_keeps",
]
