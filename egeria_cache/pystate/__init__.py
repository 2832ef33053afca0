"""What Python values are: what they consist of, what they hold, copies of them, and the code in it.

Owns the one list of what is foreign, opaque, or an atom (`objects.py`). It runs no code of the
user's, and knows nothing of models that are cached or of stores: whoever asks (the content address,
the guards, the dry run, the data set's fingerprint) says what to look at.

`content` digests, `snapshot` keeps what was (`places`) and puts it back or `ahead`, `look` prints
what a snapshot comes by, `copier` copies, `code` follows functions by the names that they read
(`bytecode`), `randomness` is what all draw from.
"""

from egeria_cache.pystate.bytecode import names_in
from egeria_cache.pystate.code import Code, found_in, functions_of, has_settings, is_value, reached
from egeria_cache.pystate.content import PLAIN, Content, describe, digest, leaf_print, tensor_digest
from egeria_cache.pystate.copier import Copier, is_shared
from egeria_cache.pystate.look import Portrait, is_below
from egeria_cache.pystate.objects import (
    CODE,
    DATA,
    MODELS,
    OF_EVERY_OBJECT,
    Reach,
    StandIn,
    attributes_held,
    bases_of,
    entries,
    in_class,
    is_beyond,
    is_compiled,
    is_in_shared_memory,
    is_installed_code,
    is_library,
    is_put_back,
    is_standard,
    outside_state,
    own_attributes,
    own_dict,
    own_slots,
    unreadable,
)
from egeria_cache.pystate.places import LEADS, Names, OfClass, Place, led_to
from egeria_cache.pystate.randomness import GENERATORS, RandomState
from egeria_cache.pystate.snapshot import Moved, Snapshot

__all__ = [
    "CODE", "DATA", "GENERATORS", "LEADS", "MODELS", "OF_EVERY_OBJECT", "PLAIN", "Code", "Content",
    "Copier", "Moved", "Names", "OfClass", "Place", "Portrait", "RandomState", "Reach", "Snapshot",
    "StandIn", "attributes_held", "bases_of", "describe", "digest", "entries", "found_in",
    "functions_of", "has_settings", "in_class", "is_below", "is_beyond", "is_compiled",
    "is_in_shared_memory", "is_installed_code", "is_library", "is_put_back", "is_shared",
    "is_standard", "is_value", "leaf_print", "led_to", "names_in", "outside_state",
    "own_attributes", "own_dict", "own_slots", "reached", "tensor_digest", "unreadable",
]  # fmt: skip
