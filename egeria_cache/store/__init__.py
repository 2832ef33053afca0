"""Tensors on disk, by sample: written once, found again by any run that would compute the same.

Owns the cache directory with all its files and locks, the byte limit, and the writer thread. It
never knows what a model, a loader or a boundary is: a generation is named by fields that others
gave it, and a record holds named tensors.

A generation is one LMDB environment. The way of a read: `store` > `generation` > `reader` > a view
of `disk/files` > one call of the compiled `kernel.c` (through `native`), or without it > `records`
> `codecs`; of a write: `generation` > `writer` > `records` > a commit of `disk/files`. `disk` has
the files: whose they are (`own`, `place`, `claims`), what they may take (`budget`), LMDB itself
(`environment`), and what lies in it (`files`). What `cache-inspect` reads and copies: `census`,
`parcel`.
"""

from egeria_cache.store.census import (
    CacheReport,
    Contents,
    GenerationReport,
    Spread,
    contents,
    find_generation,
    survey,
    verify,
)
from egeria_cache.store.disk.budget import BudgetBusyError, remove_generations
from egeria_cache.store.disk.manifest import DamagedError, Manifest, differing_fields
from egeria_cache.store.disk.notes import (
    LiveFile,
    read_live,
    read_note,
    read_notes,
    write_note,
)
from egeria_cache.store.generation import Generation, Located
from egeria_cache.store.native import has_kernel
from egeria_cache.store.parcel import Parcelled, pack, unpack
from egeria_cache.store.reader import NotInMemoryError
from egeria_cache.store.store import ActivationStore

__all__ = [
    "ActivationStore",
    "BudgetBusyError",
    "CacheReport",
    "Contents",
    "DamagedError",
    "Generation",
    "GenerationReport",
    "LiveFile",
    "Located",
    "Manifest",
    "NotInMemoryError",
    "Parcelled",
    "Spread",
    "contents",
    "differing_fields",
    "find_generation",
    "has_kernel",
    "pack",
    "read_live",
    "read_note",
    "read_notes",
    "remove_generations",
    "survey",
    "unpack",
    "verify",
    "write_note",
]
