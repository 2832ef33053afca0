"""What a cache directory holds, for `cache-inspect`: read without disturbing who writes there."""

from __future__ import annotations

import collections
import math
import os
from pathlib import Path
from typing import Any

from egeria_cache.errors import StoreError
from egeria_cache.store.disk import place
from egeria_cache.store.disk.environment import tree_problem
from egeria_cache.store.disk.files import Totals, inspected, is_unfinished
from egeria_cache.store.disk.manifest import (
    ROOT_FORMAT,
    DamagedError,
    GoneError,
    Manifest,
    read_json,
)
from egeria_cache.store.records.keys import decode_key
from egeria_cache.store.records.layout import RecordError
from egeria_cache.store.records.record import Record

Report = dict[str, Any]
"""As `--json` prints it, of a directory or of a generation in it: docs/inspect.md."""


def survey(directory: Path) -> Report:
    """Read sizes and counts of all generations, without decoding a record.

    Raises:
        StoreError: The directory is no cache, or of a newer format.
    """
    if not directory.is_dir():
        raise StoreError(f"{directory} is not a directory")
    root = directory / place.ROOT_NAME
    if not os.path.lexists(root):
        raise StoreError(f"{directory} is not an Egeria cache: it has no {root.name}")
    limit = read_json(root, ROOT_FORMAT).get("limit_bytes")
    found = [_glance(path) for path in place.generation_directories(directory, damaged=True)]
    return {
        "directory": str(directory),
        "limit_bytes": limit if isinstance(limit, int) and 0 < limit < 2**63 else None,
        "bytes_on_disk": place.directory_bytes(directory),
        "healthy": all(one["damage"] is None for one in found),
        "generations": found,
    }


def _glance(path: Path) -> Report:
    is_aside = path.name.startswith(place.SET_ASIDE)
    damage = "set aside: it could not be opened" if is_aside else None
    manifest, note, num_samples, totals = None, None, 0, Totals()
    try:
        manifest = Manifest.read(path)
        if not is_unfinished(path):
            with inspected(path) as view:
                num_samples, totals = view.num_records, view.totals()
    except DamagedError as error:
        damage = damage or (None if is_unfinished(path) else str(error))
    except (StoreError, OSError) as error:  # of now, or not ours
        note = str(error)
    boundary = manifest.fields.get("boundary") if manifest is not None else None
    raw_bytes, stored_bytes = totals.raw_bytes, totals.stored_bytes
    return {
        "name": path.name,
        "boundary": boundary if isinstance(boundary, str) else None,
        "num_samples": num_samples,
        "bytes_on_disk": place.directory_bytes(path),
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
        "ratio": raw_bytes / stored_bytes if stored_bytes else None,
        "lossy_error": totals.error.relative_rms,
        "codec": None if totals.codec is None else totals.codec.label,
        "created": math.nan if manifest is None else manifest.created,
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
