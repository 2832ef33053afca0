"""A generation as one stream of bytes, to be copied to another machine: packed, and unpacked.

Both pass over the records once. Every record has a checksum that also covers its generation: what
arrives is what was stored, or is refused. Bytes: docs/format.md.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from egeria_cache.store.codecs.lossy import LossyError
from egeria_cache.store.disk.files import GoneError, inspected
from egeria_cache.store.disk.manifest import (
    FORMAT,
    MAX_JSON_BYTES,
    DamagedError,
    Manifest,
    generation_name,
)
from egeria_cache.store.generation import Generation
from egeria_cache.store.records.layout import Layout, RecordError
from egeria_cache.store.records.record import (
    HEAD,
    HEAD_BYTES,
    Encoded,
    key_of,
    open_record,
)
from egeria_cache.store.stats import Totals
from egeria_cache.store.store import ActivationStore

__all__ = ["Parcelled", "pack", "unpack"]

MAGIC, VERSION = b"EGPK", 4
BLOCK_BYTES = 16 * 2**20
"""Of records that are stored together."""
_PIECE_BYTES = 8 * 2**20
_BEGIN = struct.Struct("<4sIIQ")
"""Magic, version, bytes of the description and its checksum."""


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
        about["layout"] = view.layout.packed.hex() if view.layout is not None else ""
        text = json.dumps(about).encode()
        write(_BEGIN.pack(MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text)) + text)
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
    source = _Source(stream)
    fields, totals, layout = _description(source)
    done, records, num_bytes = Parcelled(generation_name(fields)), list[tuple[bytes, Any]](), 0
    generation = store.open_generation(fields)
    try:
        for record in _records(source, layout, done.name):
            records.append((key_of(record), record))
            num_bytes += len(record)
            if num_bytes >= BLOCK_BYTES:
                _take(generation, Encoded.of(layout, records), totals, done)
                records, num_bytes = [], 0
    finally:
        _take(generation, Encoded.of(layout, records), totals, done)
    done.num_bytes = source.num_bytes
    return done


def _take(generation: Generation, records: Encoded, totals: Totals, done: Parcelled) -> None:
    """Store records, with their part of the totals."""
    num_bytes = int(records.sizes.sum())
    raw_bytes = round(num_bytes * totals.raw_bytes / max(totals.stored_bytes, 1))
    num_new, num_stored = len(records), 0
    with contextlib.suppress(GoneError):  # the limit has no room even for an empty one
        num_new, num_stored = generation.take(records, raw_bytes, totals.codec, totals.error)
        totals.error = LossyError()  # it is counted once
    done.num_records += num_stored
    done.num_known += len(records) - num_new
    done.num_left += num_new - num_stored


class _Source:
    """A stream that is read once."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.num_bytes = stream, 0

    def read(self, size: int) -> bytes:
        """Read so many bytes; no more memory is taken than there are bytes."""
        pieces, left = [], size
        while left > 0:
            piece = self.stream.read(min(left, _PIECE_BYTES))
            if not piece:
                raise DamagedError("the stream was cut short")
            pieces.append(piece)
            left -= len(piece)
        self.num_bytes += size
        return b"".join(pieces)


def _description(source: _Source) -> tuple[dict[str, Any], Totals, Layout]:
    """Read what comes before the records."""
    magic, version, length, checksum = _BEGIN.unpack(source.read(_BEGIN.size))
    if magic != MAGIC:
        raise DamagedError("this is no packed generation")
    if version != VERSION or length > MAX_JSON_BYTES:
        raise DamagedError(f"version {version} of a packed generation; this reads {VERSION}")
    text = source.read(length)
    try:
        if xxhash.xxh3_64_intdigest(text) != checksum:
            raise ValueError
        about = json.loads(text)
        fields, found = dict(about["fields"]), about["format"]
        totals = Totals.parse(bytes.fromhex(about["totals"]))
        packed = bytes.fromhex(about["layout"])
        layout = Layout.parse(packed) if packed else Layout(False, ())
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        raise DamagedError("the description of the packed generation is damaged") from None
    if found != FORMAT:
        raise DamagedError(f"a generation of format {found}; this release reads {FORMAT}")
    return fields, totals, layout


def _records(source: _Source, layout: Layout, name: str) -> Iterator[memoryview]:
    """Yield the records, each verified, to the end of the stream."""
    identity, num_records = xxhash.xxh3_64_intdigest(name.encode()), 0
    while True:
        head = source.read(HEAD_BYTES)
        _, size, _ = HEAD.unpack(head)
        if not size:
            if head != HEAD.pack(num_records, 0, 0) or source.stream.read(1):
                raise DamagedError("the stream does not end where it should")
            return
        record = memoryview(head + source.read(size - HEAD_BYTES))
        try:
            open_record(key_of(record), record, layout, identity)
        except RecordError as problem:
            raise DamagedError(f"a record of the stream is damaged: {problem}") from None
        num_records += 1
        yield record
