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
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from egeria_cache.errors import StoreError
from egeria_cache.store.codecs import NeedsKernelError
from egeria_cache.store.disk import place
from egeria_cache.store.disk.files import Totals, inspected, is_unfinished
from egeria_cache.store.disk.place import FORMAT, DamagedError, GoneError, Manifest
from egeria_cache.store.generation import Generation
from egeria_cache.store.record import HEAD, Encoded, Layout, Record, RecordError, decode_key, key_of
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
    place.read_json(root, place.ROOT_FORMAT)
    found = [_glance(path) for path in place.generation_directories(directory, damaged=True)]
    return {
        "directory": str(directory),
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
    return {
        "name": path.name,
        "boundary": boundary if isinstance(boundary, str) else None,
        "num_samples": totals.num_samples, "bytes_on_disk": place.directory_bytes(path),
        "raw_bytes": totals.raw_bytes, "stored_bytes": totals.stored_bytes,
        "ratio": totals.raw_bytes / totals.stored_bytes if totals.stored_bytes else None,
        "codec": None if totals.codec is None else totals.codec.label,
        "created": math.nan if known is None else known.created, "last_used": place.last_use(path),
        "in_use": place.in_use_elsewhere(path), "damage": damage, "note": note,
    }  # fmt: skip


def verify(path: Path) -> Report:
    """Check and decode every record of a generation.

    Returns:
        How many `records` there are, and the `damage` with its samples and reasons; of those that
        are intact, what their `fields` are, and how many there are of each random draw: `variants`.

    Raises:
        StoreError: It cannot be told: a file is not ours, or cannot be opened now.
        OSError: The disk cannot be read.
    """
    fields, damage, num_records = dict[str, str](), list[Report](), 0
    variants = collections.Counter[int]()

    def damaged(sample: str, reason: object) -> None:
        damage.append({"generation": path.name, "sample": sample, "reason": str(reason)})

    try:
        for key, record in _records_in(path):
            num_records += 1
            sample, variant = _sample(key)
            try:
                found = _kinds(record)
            except ValueError as error:  # a RecordError is one
                damaged(f"{sample} (variant {variant})" if variant else sample, error)
                continue
            variants[variant] += 1
            for name, kind in found.items():
                fields[name] = kind if fields.get(name, kind) == kind else "varies"
    except GoneError:
        pass
    except (DamagedError, OSError) as error:
        if isinstance(error, PermissionError):  # nothing is wrong with it
            raise
        if os.path.lexists(path):  # else it was removed just now
            damaged("?", error)
    drawn = dict(sorted(variants.items()))
    return {"records": num_records, "damage": damage, "fields": fields, "variants": drawn}


def _records_in(path: Path) -> Iterator[tuple[bytes, Record | RecordError]]:
    if not is_unfinished(path):
        with inspected(path) as view:
            yield from view.records()


def _kinds(record: Record | RecordError) -> dict[str, str]:
    """Return what each field of a record holds, all of which can be decoded."""
    if isinstance(record, RecordError):
        raise record
    found = {}
    for position, field in enumerate(record.layout.fields):
        with contextlib.suppress(NeedsKernelError):  # it is intact
            record.value(position)
        found[field.name] = record.field(position)[0].kind
    return found


def _sample(key: bytes) -> tuple[str, int]:
    """Return what a sample is called, and which variant of it this is."""
    with contextlib.suppress(ValueError):
        sample_id, variant = decode_key(key)
        return key.hex() if sample_id is None else repr(sample_id), variant
    return key.hex(), 0


# -- a generation as one stream ------------------------------------------------------------

BLOCK_BYTES = 16 * 2**20
"""Of records that are stored together."""


def pack(path: Path, out: BinaryIO) -> Report:
    """Write a generation to a stream; a live run may go on storing.

    Returns:
        How many records were `packed`, and left out because they are `damaged`; its name and size.

    Args:
        path: The generation's directory.
        out: Is written to once, from its beginning to its end.

    Raises:
        DamagedError: It cannot be read.
        StoreError: It is of an earlier format.
        OSError: The stream cannot be written.
    """
    done: Report = {"generation": path.name, "packed": 0, "damaged": 0, "bytes": 0}

    def write(data: Any) -> None:
        out.write(data)
        done["bytes"] += len(data)

    with inspected(path) as view:
        about = {"format": FORMAT, "fields": dict(Manifest.read(path).fields)}
        about["totals"] = view.totals().pack().hex()
        about["layout"] = view.layout.packed.decode() if view.layout is not None else None
        write(place.dumped(about).encode() + b"\n")
        for _, found in view.records():
            if isinstance(found, RecordError):
                done["damaged"] += 1
            else:
                write(found.whole)
                done["packed"] += 1
    write(HEAD.pack(done["packed"], 0, 0))
    out.flush()
    return done


def unpack(stream: BinaryIO, store: ActivationStore) -> Report:
    """Store what `pack` has written; what is there already stays.

    Returns:
        How many records were `stored`, `known` before, and found `no_room`; its name and size.

    Raises:
        DamagedError: The stream is not what was packed, or was cut short. What came before that
            is stored, and is intact.
        StoreError: It is of another format, or the directory cannot be used.
        OSError: The stream cannot be read, or the disk not be written.
    """
    fields, totals, layout = _description(stream.readline(place.MAX_JSON_BYTES))
    name, records, num_taken = place.generation_name(fields), list[Encoded](), 0
    done: Report = {"generation": name, "stored": 0, "known": 0, "no_room": 0, "bytes": 0}
    generation = store.open_generation(fields)
    try:
        for record in _records(stream, layout, name):
            records.append(Encoded(layout, key_of(record), (record,), len(record)))
            done["bytes"] += len(record)
            if done["bytes"] >= num_taken + BLOCK_BYTES:
                _take(generation, records, totals, done)
                records, num_taken = [], done["bytes"]
    finally:
        _take(generation, records, totals, done)
    return done


def _take(generation: Generation, records: list[Encoded], totals: Totals, done: Report) -> None:
    """Store records, with their part of the totals."""
    num_bytes = sum(one.size for one in records)
    raw_bytes = round(num_bytes * totals.raw_bytes / max(totals.stored_bytes, 1))
    num_new, num_stored = len(records), 0
    with contextlib.suppress(GoneError):  # the limit has no room even for an empty one
        num_new, num_stored = generation.take(records, replace(totals, raw_bytes=raw_bytes))
    done["stored"] += num_stored
    done["known"] += len(records) - num_new
    done["no_room"] += num_new - num_stored


def _description(line: bytes) -> tuple[dict[str, Any], Totals, Layout]:
    """Read what comes before the records."""
    about = place.parsed(line, FORMAT, "the description of the packed generation")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, struct.error):
        totals, text = Totals.parse(bytes.fromhex(about["totals"])), about["layout"]
        layout = Layout(()) if text is None else Layout.parse(text.encode())
        again = place.dumped(about).encode() + b"\n"
        if about["format"] == FORMAT and again == line:
            return dict(about["fields"]), totals, layout
    raise DamagedError("this is no packed generation that this release reads")


def _records(stream: BinaryIO, layout: Layout, name: str) -> Iterator[memoryview]:
    """Yield the records, each verified, to the end of the stream."""
    identity, num_records = xxhash.xxh3_64_intdigest(name.encode()), 0
    while True:
        head = _read(stream, HEAD.size)
        _, size, _ = HEAD.unpack(head)
        if not size:
            if head != HEAD.pack(num_records, 0, 0) or stream.read(1):
                raise DamagedError("the stream does not end where it should")
            return
        record = memoryview(head + _read(stream, max(size - HEAD.size, 0)))
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
