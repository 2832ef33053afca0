"""For `cache-inspect`: what a cache directory holds, and a generation as one stream of bytes.

Reading disturbs nobody who writes there. A stream goes to another machine: every record has a
checksum that also covers its generation, and what arrives is what was stored, or is refused. Bytes:
docs/format.md.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from egeria_cache.errors import StoreError
from egeria_cache.store.codecs import LossyError
from egeria_cache.store.disk import manifest, place
from egeria_cache.store.disk.environment import tree_problem
from egeria_cache.store.disk.files import Totals, inspected, is_unfinished
from egeria_cache.store.disk.manifest import FORMAT, DamagedError, GoneError, Manifest
from egeria_cache.store.generation import Generation
from egeria_cache.store.record import HEAD, HEAD_BYTES, Encoded, Record, Records, key_of
from egeria_cache.store.schema import Layout, RecordError, decode_key
from egeria_cache.store.store import ActivationStore

Report = dict[str, Any]
"""As `--json` prints it, of a directory or of a generation in it: docs/inspect.md."""


def survey(directory: Path) -> Report:
    """Read sizes and counts of all generations, without decoding a record.

    Raises:
        StoreError: The directory is no cache, or of a newer format.
    """
    root = directory / place.ROOT_NAME
    if not os.path.lexists(root):
        raise StoreError(f"{directory} is not an Egeria cache: it has no {root.name}")
    limit = manifest.read_json(root, manifest.ROOT_FORMAT).get("limit_bytes")
    found = [_glance(path) for path in place.generation_directories(directory, damaged=True)]
    return {
        "directory": str(directory),
        "limit_bytes": limit if isinstance(limit, int) and 0 < limit < 2**63 else None,
        "bytes_on_disk": place.directory_bytes(directory),
        "healthy": all(one["damage"] is None for one in found),
        "generations": found,
    }


def _glance(path: Path) -> Report:
    damage = "set aside: it could not be opened" if path.name.startswith(place.SET_ASIDE) else None
    known, note, totals = None, None, Totals()
    try:
        known = Manifest.read(path)
        if not is_unfinished(path):
            with inspected(path) as view:
                totals = view.totals()
    except DamagedError as error:
        damage = damage or (None if is_unfinished(path) else str(error))
    except (StoreError, OSError) as error:  # of now, or not ours
        note = str(error)
    boundary = known.fields.get("boundary") if known is not None else None
    raw_bytes, stored_bytes = totals.raw_bytes, totals.stored_bytes
    return {
        "name": path.name,
        "boundary": boundary if isinstance(boundary, str) else None,
        "num_samples": totals.num_samples,
        "bytes_on_disk": place.directory_bytes(path),
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
        "ratio": raw_bytes / stored_bytes if stored_bytes else None,
        "lossy_error": totals.error.relative_rms,
        "codec": None if totals.codec is None else totals.codec.label,
        "created": math.nan if known is None else known.created,
        "last_used": place.last_use(path),
        "in_use": place.in_use_elsewhere(path),
        "damage": damage,
        "note": note,
    }


def contents(path: Path) -> Report:
    """Read the heads of all records of a generation: what their fields are, how many records there
    are of each random draw, and how many of which nothing can be read.

    Raises:
        StoreError: It cannot be opened.
        OSError: It cannot be read.
    """
    shapes: dict[str, str] = {}
    variants: collections.Counter[int] = collections.Counter()
    num_damaged = 0
    if not is_unfinished(path):
        with inspected(path) as view:
            for key, record in view.records():
                if isinstance(record, RecordError):
                    num_damaged += 1
                    continue
                variants[_sample(key)[1]] += 1
                for position in range(len(record.payload)):
                    field, _ = record.field(position)
                    name, kind = record.layout.fields[position].name, field.kind
                    shapes[name] = kind if shapes.get(name, kind) == kind else "varies"
    drawn = dict(sorted(variants.items()))
    return {"fields": shapes, "variants": drawn, "num_damaged": num_damaged}


def verify(path: Path) -> tuple[int, list[Report]]:
    """Check and decode every record of a generation; return how many there are, and the damage.

    Raises:
        StoreError: It cannot be told: a file is not ours, or cannot be opened now.
        OSError: The disk cannot be read.
    """
    num_records, damage = 0, list[Report]()

    def damaged(sample: str, reason: object) -> None:
        damage.append({"generation": path.name, "sample": sample, "reason": str(reason)})

    try:
        if is_unfinished(path):
            return 0, damage
        # What another process writes to, it has looked at, and is not at rest.
        if not place.in_use_elsewhere(path) and (problem := tree_problem(path)):
            damaged("?", problem)
            return 0, damage
        with inspected(path) as view:
            for key, record in view.records():
                num_records += 1
                try:
                    _decode(record)
                except ValueError as error:  # a RecordError is one
                    sample, variant = _sample(key)
                    damaged(f"{sample} (variant {variant})" if variant else sample, error)
    except GoneError:
        pass
    except (DamagedError, OSError) as error:
        if isinstance(error, PermissionError):  # nothing is wrong with it
            raise
        if os.path.lexists(path):  # else it was removed just now
            damaged("?", error)
    return num_records, damage


def _decode(record: Record | RecordError) -> None:
    if isinstance(record, RecordError):
        raise record
    for position in range(len(record.payload)):
        record.value(position)


def _sample(key: bytes) -> tuple[str, int]:
    """Return what a sample is called, and which variant of it this is."""
    try:
        sample_id, variant = decode_key(key)
    except ValueError:
        return key.hex(), 0
    return key.hex() if sample_id is None else repr(sample_id), variant


# -- a generation as one stream ------------------------------------------------------------

BLOCK_BYTES = 16 * 2**20
"""Of records that are stored together."""


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
        write(manifest.dumped(about, indent=None).encode() + b"\n")
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
    fields, totals, layout = _description(stream.readline(manifest.MAX_JSON_BYTES))
    done, records, num_taken = Parcelled(manifest.generation_name(fields)), list[Encoded](), 0
    generation = store.open_generation(fields)
    try:
        for record in _records(stream, layout, done.name):
            records.append(Encoded(layout, key_of(record), (record,), len(record)))
            done.num_bytes += len(record)
            if done.num_bytes >= num_taken + BLOCK_BYTES:
                _take(generation, records, totals, done)
                records, num_taken = [], done.num_bytes
    finally:
        _take(generation, records, totals, done)
    return done


def _take(generation: Generation, records: Records, totals: Totals, done: Parcelled) -> None:
    """Store records, with their part of the totals."""
    num_bytes = sum(one.size for one in records)
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
    about = manifest.parsed(line, FORMAT, "the description of the packed generation")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, struct.error):
        totals, text = Totals.parse(bytes.fromhex(about["totals"])), about["layout"]
        layout = Layout(()) if text is None else Layout.parse(text.encode())
        again = manifest.dumped(about, indent=None).encode() + b"\n"
        if about["format"] == FORMAT and again == line:
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
        record = memoryview(head + _read(stream, max(size - HEAD_BYTES, 0)))
        try:
            Record.open(key_of(record), record, layout, identity)
        except RecordError as problem:
            raise DamagedError(f"a record of the stream is damaged: {problem}") from None
        num_records += 1
        yield record


def _read(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise DamagedError("the stream was cut short")
    return found
