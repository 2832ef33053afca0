"""Tensors on disk, by sample: written once, found again by any run that would compute the same.

Owns the cache directory with all its files and locks, the byte limit, and the writer thread. It
never knows what a model, a loader or a boundary is: a generation is named by fields that others
gave it, and a record holds named tensors.

A generation is one LMDB environment. The way of a read: `store` > `generation` > `reader` > a view
of `disk/files` > one call of the compiled `kernel.c` (through `native`), or without it > `records`
> `codecs`; of a write: `generation` > `writer` > `records` > a commit of `disk/files`. `disk` has
the files: the directory, its limit and its locks (`place`), what a generation is (`manifest`),
LMDB itself (`environment`), and what lies in it (`files`). What `cache-inspect` copies: `parcel`.
"""

from egeria_cache.store.codecs import Codec, Coder
from egeria_cache.store.disk.environment import tree_problem
from egeria_cache.store.disk.files import Totals, inspected, is_unfinished
from egeria_cache.store.disk.manifest import (
    FORMAT,
    ROOT_FORMAT,
    DamagedError,
    GoneError,
    Manifest,
    read_json,
    write_json,
)
from egeria_cache.store.disk.place import (
    ROOT_NAME,
    SET_ASIDE,
    directory_bytes,
    generation_directories,
    in_use_elsewhere,
    last_use,
    remove_generations,
)
from egeria_cache.store.generation import Generation, Located
from egeria_cache.store.native import kernel
from egeria_cache.store.parcel import Parcelled, pack, unpack
from egeria_cache.store.reader import NotInMemoryError
from egeria_cache.store.records.keys import decode_key
from egeria_cache.store.records.layout import RecordError
from egeria_cache.store.records.record import Record
from egeria_cache.store.store import ActivationStore

__all__ = [
    "FORMAT", "ROOT_FORMAT", "ROOT_NAME", "SET_ASIDE", "ActivationStore", "Codec", "Coder",
    "DamagedError", "Generation", "GoneError", "Located", "Manifest", "NotInMemoryError",
    "Parcelled", "Record", "RecordError", "Totals", "decode_key", "directory_bytes",
    "generation_directories", "in_use_elsewhere", "inspected", "is_unfinished", "kernel",
    "last_use", "pack", "read_json", "remove_generations", "tree_problem", "unpack", "write_json",
]  # fmt: skip
