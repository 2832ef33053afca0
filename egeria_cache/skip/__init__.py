"""The frozen front inside the user's own `model(x)`: proved once, then skipped.

Owns the stand-in for the model's `forward`, and holds the frozen modules in inference mode. It has
no thread, no file, and no notion of a store: what it captures goes to its `SkipHost`, and what it
serves comes from a batch's `Entry`.

`engine.py` is the whole way of a batch through the model. Below it, each importing only those that
follow: `prove` finds a cut and proves it (`dry_run` > `proof` > `probe`, `traced_batch`); `serve`
keeps and replays what was proved (`replay` > `plan` > `call`), and names it for ever
(`address`); `state` says whether the prefix is still what it was (`guards`); `model` takes over the
user's modules, and holds the frozen ones in inference mode (`frozen`).
"""

from egeria_cache.pystate import RandomState
from egeria_cache.skip.engine import MAX_CHAINS, SkipEngine
from egeria_cache.skip.model.calls import Recorder, intercept
from egeria_cache.skip.model.entered import inner_model, module_named, ordinary_arguments
from egeria_cache.skip.model.frozen import FrozenPrefix, differs_in_training
from egeria_cache.skip.model.fsdp import groups_of, is_sharded, states_in, to_shards
from egeria_cache.skip.prove.dry_run import blocks, holds_stage
from egeria_cache.skip.serve.cut import Cut, Step
from egeria_cache.skip.serve.trace import leaves_behind

__all__ = [
    "MAX_CHAINS", "Cut", "FrozenPrefix", "RandomState", "Recorder", "SkipEngine", "Step",
    "blocks", "differs_in_training", "groups_of", "holds_stage", "inner_model", "intercept",
    "is_sharded", "leaves_behind", "module_named", "ordinary_arguments", "states_in",
    "to_shards",
]  # fmt: skip
