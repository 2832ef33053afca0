"""`cache-inspect DIR pack` and `unpack`: a generation as one file, for another machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from egeria_cache.config import parse_size
from egeria_cache.inspect.words import plain, print_json, size
from egeria_cache.store import ActivationStore, CacheReport, Parcelled, find_generation
from egeria_cache.store import pack as pack_generation
from egeria_cache.store import unpack as unpack_generation

__all__ = ["pack", "unpack"]

STREAM = "-"
"""Stands for standard input or output."""


def pack(options: argparse.Namespace, report: CacheReport) -> int:
    """Write one generation to a file; 1 if damaged records were left out.

    Raises:
        ValueError: The file is there already.
        StoreError: There is no such generation, or it cannot be read.
        OSError: The file cannot be written.
    """
    one = find_generation(report, options.generation)
    with _written(options.file) as out:
        done = pack_generation(report.directory / one.name, out)
    _tell(options, done, {"packed": done.num_records, "damaged": done.num_damaged})
    return 1 if done.num_damaged else 0


def unpack(options: argparse.Namespace) -> int:
    """Store a packed generation; 1 if the limit had no room for all of it.

    Raises:
        DamagedError: The file is not what was packed.
        StoreError: The directory cannot be used.
        OSError: The file cannot be read.
    """
    with (
        _read(options.file) as stream,
        ActivationStore(
            options.directory, parse_size(options.limit), force_network=options.force_network
        ) as store,
    ):
        done = unpack_generation(stream, store)
    _tell(
        options,
        done,
        {"stored": done.num_records, "known": done.num_known, "no_room": done.num_left},
    )
    return 1 if done.num_left else 0


def _tell(options: argparse.Namespace, done: Parcelled, counts: dict[str, int]) -> None:
    # Standard output may be the stream.
    out = sys.stderr if options.file == STREAM else sys.stdout
    if options.json and out is sys.stdout:
        fields: dict[str, Any] = {"generation": done.name, **counts, "bytes": done.num_bytes}
        print_json(fields)
        return
    words = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
    print(f"{plain(done.name)}: records: {words}; {size(done.num_bytes)}", file=out)


@contextlib.contextmanager
def _written(name: str) -> Iterator[BinaryIO]:
    """Yield what is written to; a file is there whole, or not at all."""
    if name == STREAM:
        yield sys.stdout.buffer
        return
    path = Path(name)
    if os.path.lexists(path):
        raise ValueError(f"{path} is there already; remove it, or give another name")
    partial = path.with_name(path.name + ".partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(partial, flags, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def _read(name: str) -> Iterator[BinaryIO]:
    if name == STREAM:
        yield sys.stdin.buffer
        return
    with open(name, "rb") as file:
        yield file
