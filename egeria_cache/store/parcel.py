"""A generation as one stream of bytes, to be copied to another machine: packed, and unpacked.

Both pass over the records once. Every record has a checksum that also covers its generation: what
arrives is what was stored, or is refused. Bytes: docs/format.md.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from egeria_cache.store.codecs import LossyError
from egeria_cache.store.disk.files import Totals, inspected
from egeria_cache.store.disk.manifest import (
    FORMAT,
    MAX_JSON_BYTES,
    DamagedError,
    GoneError,
    Manifest,
    dumped,
    generation_name,
    parsed,
)
from egeria_cache.store.generation import Generation
from egeria_cache.store.records.layout import Layout, RecordError
from egeria_cache.store.records.record import HEAD, HEAD_BYTES, Encoded, key_of, open_record
from egeria_cache.store.store import ActivationStore

BLOCK_BYTES = 16 * 2**20
"""Of records that are stored together."""
_PIECE_BYTES = 8 * 2**20


@dataclass(slots=True)
class Parcelled:
    """What was packed or unpacked."""

    name: str
    """Of the generation."""
    num_records: int = 0
    num_bytes: int = 0
    """Of the stream."""
    num_damaged: int = 0
    """Records that were left out."""
    num_known: int = 0
    """Records that were there before."""
    num_left: int = 0
    """Records for which the limit had no room."""


def pack(path: Path, out: BinaryIO) -> Parcelled:
    """Write a generation to a stream; a live run may go on storing.

    Args:
        path: The generation's directory.
        out: Is written to once, from its beginning to its end.

    Raises:
        DamagedError: It cannot be read.
        StoreError: It is of an earlier format.
        OSError: The stream cannot be written.
    """
    done = Parcelled(path.name)

    def write(data: Any) -> None:
        out.write(data)
        done.num_bytes += len(data)

    with inspected(path) as view:
        about = {"format": FORMAT, "fields": dict(Manifest.read(path).fields)}
        about["totals"] = view.totals().pack().hex()
        about["layout"] = view.layout.packed.decode() if view.layout is not None else None
        write(dumped(about, indent=None).encode() + b"\n")
        for _, found in view.records():
            if isinstance(found, RecordError):
                done.num_damaged += 1
            else:
                write(found.whole)
                done.num_records += 1
    write(HEAD.pack(done.num_records, 0, 0))
    out.flush()
    return done


def unpack(stream: BinaryIO, store: ActivationStore) -> Parcelled:
    """Store what `pack` has written; what is there already stays.

    Raises:
        DamagedError: The stream is not what was packed, or was cut short. What came before that
            is stored, and is intact.
        StoreError: It is of another format, or the directory cannot be used.
        OSError: The stream cannot be read, or the disk not be written.
    """
    fields, totals, layout = _description(stream.readline(MAX_JSON_BYTES))
    done, records, num_taken = Parcelled(generation_name(fields)), list[memoryview](), 0
    generation = store.open_generation(fields)
    try:
        for record in _records(stream, layout, done.name):
            records.append(record)
            done.num_bytes += len(record)
            if done.num_bytes >= num_taken + BLOCK_BYTES:
                _take(generation, Encoded.of(layout, records), totals, done)
                records, num_taken = [], done.num_bytes
    finally:
        _take(generation, Encoded.of(layout, records), totals, done)
    return done


def _take(generation: Generation, records: Encoded, totals: Totals, done: Parcelled) -> None:
    """Store records, with their part of the totals."""
    num_bytes = sum(records.sizes)
    raw_bytes = round(num_bytes * totals.raw_bytes / max(totals.stored_bytes, 1))
    num_new, num_stored = len(records), 0
    with contextlib.suppress(GoneError):  # the limit has no room even for an empty one
        num_new, num_stored = generation.take(records, replace(totals, raw_bytes=raw_bytes))
        totals.error = LossyError()  # it is counted once
    done.num_records += num_stored
    done.num_known += len(records) - num_new
    done.num_left += num_new - num_stored


def _description(line: bytes) -> tuple[dict[str, Any], Totals, Layout]:
    """Read what comes before the records."""
    about = parsed(line, FORMAT, "the description of the packed generation")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, struct.error):
        totals, text = Totals.parse(bytes.fromhex(about["totals"])), about["layout"]
        layout = Layout(()) if text is None else Layout.parse(text.encode())
        if about["format"] == FORMAT and dumped(about, indent=None).encode() + b"\n" == line:
            return dict(about["fields"]), totals, layout
    raise DamagedError("this is no packed generation that this release reads")


def _records(stream: BinaryIO, layout: Layout, name: str) -> Iterator[memoryview]:
    """Yield the records, each verified, to the end of the stream."""
    identity, num_records = xxhash.xxh3_64_intdigest(name.encode()), 0
    while True:
        head = _read(stream, HEAD_BYTES)
        _, size, _ = HEAD.unpack(head)
        if not size:
            if head != HEAD.pack(num_records, 0, 0) or stream.read(1):
                raise DamagedError("the stream does not end where it should")
            return
        record = memoryview(head + _read(stream, size - HEAD_BYTES))
        try:
            open_record(key_of(record), record, layout, identity)
        except RecordError as problem:
            raise DamagedError(f"a record of the stream is damaged: {problem}") from None
        num_records += 1
        yield record


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read so many bytes; no more memory is taken than there are bytes."""
    pieces = []
    while size > 0:
        pieces.append(stream.read(min(size, _PIECE_BYTES)))
        if not pieces[-1]:
            raise DamagedError("the stream was cut short")
        size -= len(pieces[-1])
    return b"".join(pieces)
