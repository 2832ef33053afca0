"""What lies on disk, from outside of a store: how much it is, and a bit of it flipped."""

from __future__ import annotations

from pathlib import Path

import lmdb

from egeria_cache.store.disk.files import inspected

__all__ = ["damage_a_record", "stored_bytes"]


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
