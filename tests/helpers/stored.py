"""A store as tests use it; what lies on disk, from outside of it, and a bit of that flipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
from torch import Tensor

from egeria_cache import store
from egeria_cache.store.disk.files import inspected

__all__ = ["ActivationStore", "damage_a_record", "stored_bytes"]


class Alone:
    """A generation into which a tensor goes without a name, and comes out so."""

    def __init__(self, generation: store.Generation) -> None:
        self.real = generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def put_batch(self, ids: Any, rows: Any, **options: Any) -> bool:
        rows = {"value": rows} if isinstance(rows, Tensor) else rows
        return bool(self.real.put_batch(ids, rows, **options))

    def get_batch(self, ids: Any, **options: Any) -> tuple[Any, Any]:
        return bare(self.real.get_batch(ids, **options))

    def get_located(self, located: Any, **options: Any) -> tuple[Any, Any]:
        return bare(self.real.get_located(located, **options))


def bare(read: tuple[Any, Any]) -> tuple[Any, Any]:
    found, hit = read
    return found["value"] if {*found} == {"value"} else found, hit


class ActivationStore(store.ActivationStore):
    """One with a generation of its own, which it stands for."""

    def open_generation(self, fields: Any, **options: Any) -> Any:
        found = super().open_generation(fields, **options)
        return self.__dict__.setdefault("known", {}).setdefault(found, Alone(found))

    def _own(self) -> Any:
        if "alone" not in self.__dict__:
            self.alone = self.open_generation({"use": "alone"})
        return self.alone

    def __getattr__(self, name: str) -> Any:
        if name in ("put_batch", "get_batch", "contains"):
            return getattr(self._own(), name)
        raise AttributeError(name)


def damage_a_record(generation: Path, at: int = 60) -> None:
    """Flip a bit of the first record, at this byte of it."""
    with inspected(generation) as view:
        key, _ = next(view.records())
        ((place, _, number),) = view.located([key]).tolist()
    if place:
        with (generation / "data.mdb").open("r+b") as file:
            file.seek(place + at)
            (byte,) = file.read(1)
            file.seek(place + at)
            file.write(bytes([byte ^ 4]))
        return
    with lmdb.open(str(generation), max_dbs=3) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(write=True, db=blocks) as transaction:
            content = bytearray(transaction.get(number.to_bytes(8, "big")))
            content[at] ^= 4
            transaction.put(number.to_bytes(8, "big"), bytes(content))


def stored_bytes(directory: Path) -> int:
    """Of all records in a cache."""
    total = 0
    for path in directory.rglob("gen-*"):
        with inspected(path) as view:
            total += view.totals().stored_bytes
    return total
