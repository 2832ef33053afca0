"""Tensors on disk, by sample: written once, found again by any run that would compute the same.

Owns the cache directory with all its files and locks, the byte limit, and the writer thread. It
never knows what a model, a loader or a boundary is: a generation is named by fields that others
gave it, and a record holds named tensors.

A generation is one LMDB environment. The way of a read: `store` > `generation` > `reader` > a view
of `disk/files` > one call of the compiled `kernel.c` (through `codecs`), or without it > `record`
> `codecs`; of a write: `generation` > `writer` > `record` > a commit of `disk/files`. `disk` has
the files: the directory, its limit and its locks, what a generation is (`place`),
LMDB itself, and what lies in it (`files`). For `cache-inspect`: `report`.
"""

from egeria_cache.store.codecs import kernel
from egeria_cache.store.disk.files import Located
from egeria_cache.store.disk.place import (
    ROOT_FORMAT,
    DamagedError,
    Manifest,
    read_json,
    remove_generations,
    write_json,
)
from egeria_cache.store.generation import Generation
from egeria_cache.store.reader import NotInMemoryError
from egeria_cache.store.report import Report, pack, survey, unpack, verify
from egeria_cache.store.store import ActivationStore, StoreStats

__all__ = [
    "ROOT_FORMAT", "ActivationStore", "DamagedError", "Generation", "Located", "Manifest",
    "NotInMemoryError", "Report", "StoreStats", "kernel", "pack", "read_json", "remove_generations",
    "survey", "unpack", "verify", "write_json",
]  # fmt: skip
