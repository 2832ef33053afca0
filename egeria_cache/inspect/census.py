"""What `cache-inspect` shows: sizes and contents of a cache directory. Reads only.

Looks at a cache that a live run is writing without disturbing it.

`verify` decodes every record of a generation.
"""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from egeria_cache.errors import StoreError
from egeria_cache.store import (
    FORMAT,
    ROOT_FORMAT,
    ROOT_NAME,
    SET_ASIDE,
    Codec,
    Coder,
    DamagedError,
    GoneError,
    Manifest,
    Record,
    RecordError,
    Totals,
    decode_key,
    directory_bytes,
    generation_directories,
    in_use_elsewhere,
    inspected,
    is_unfinished,
    last_use,
    read_json,
)


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """One generation at a glance."""

    name: str
    boundary: str | None
    """Last frozen module, if the generation's fields name one."""
    num_samples: int
    """Records: samples times variants."""
    bytes_on_disk: int
    raw_bytes: int
    """Decoded."""
    stored_bytes: int
    """Encoded."""
    lossy_error: float
    """Relative, root mean square; 0 if lossless."""
    codec: str | None
    created: float
    """Seconds since the epoch, as is `last_used`."""
    last_used: float
    in_use: bool
    """A live process holds it."""
    damage: str | None
    """What proves it damaged; None if nothing does."""
    note: str | None
    """Why else it was not looked into."""

    @property
    def ratio(self) -> float | None:
        """Decoded bytes over encoded ones."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """A cache directory at a glance."""

    directory: Path
    limit_bytes: int | None
    """Of the run that last opened it."""
    bytes_on_disk: int
    generations: tuple[GenerationReport, ...]

    @property
    def healthy(self) -> bool:
        """No generation is known to be damaged."""
        return all(one.damage is None for one in self.generations)


@dataclass(frozen=True, slots=True)
class Contents:
    """What the records of one generation hold."""

    fields: Mapping[str, str]
    """Per name: dtype and shape, "varies" where the records differ."""
    codecs: Mapping[str, int]
    """Records per codec of their largest field."""
    variants: Mapping[int, int]
    """Records per variant."""


def survey(directory: Path) -> CacheReport:
    """Read sizes and counts of all generations, without decoding a record.

    Raises:
        StoreError: The directory is no cache, or of a newer format.
    """
    if not directory.is_dir():
        raise StoreError(f"{directory} is not a directory")
    if not os.path.lexists(directory / ROOT_NAME):
        raise StoreError(f"{directory} is not an Egeria cache: it has no {ROOT_NAME}")
    root = read_json(directory / ROOT_NAME, ROOT_FORMAT)
    limit = root.get("limit_bytes")
    limit = limit if isinstance(limit, int) and 0 < limit < 2**63 else None
    return CacheReport(
        directory,
        limit,
        directory_bytes(directory),
        tuple(_glance(path) for path in generation_directories(directory, damaged=True)),
    )


def find_generation(report: CacheReport, text: str) -> GenerationReport:
    """Return the one generation whose name begins so, with or without "gen-".

    Raises:
        StoreError: None, or several.
    """
    found = [one for one in report.generations if one.name.startswith((text, f"gen-{text}"))]
    if len(found) != 1:
        known = ", ".join(one.name for one in found or report.generations) or "none"
        problem = "is ambiguous" if found else "is not there"
        raise StoreError(f"generation {text!r} {problem}; candidates: {known}")
    return found[0]


def contents(path: Path) -> Contents:
    """Read the heads of all records of a generation.

    Raises:
        StoreError: It cannot be opened.
    """
    shapes: dict[str, str] = {}
    codecs: collections.Counter[str] = collections.Counter()
    variants: collections.Counter[int] = collections.Counter()
    if is_unfinished(path):
        return Contents(shapes, {}, {})
    for key, record in _records(path):
        try:
            _, variant = decode_key(key)
        except ValueError:
            variant = 0
        if isinstance(record, RecordError):
            codecs["damaged"] += 1
            continue
        variants[variant] += 1
        codecs[_codec_name(record)] += 1
        for position in range(len(record.payload)):
            field, _ = record.field(position)
            text = str(field).removeprefix(f"{field.name}: ")
            shapes[field.name] = text if shapes.get(field.name, text) == text else "varies"
    return Contents(shapes, dict(codecs), dict(sorted(variants.items())))


def _glance(path: Path) -> GenerationReport:
    damage = "set aside: it could not be opened" if path.name.startswith(SET_ASIDE) else None
    manifest, note, num_samples, totals = None, None, 0, Totals()
    try:
        manifest = Manifest.read(path)
        manifest.check_current()
        if not is_unfinished(path):
            with inspected(path) as view:
                num_samples, totals = view.num_records, view.totals()
    except DamagedError as error:
        damage = damage or (None if is_unfinished(path) else str(error))
    except (StoreError, OSError) as error:  # of now, or not ours
        note = str(error)
    boundary = manifest.fields.get("boundary") if manifest is not None else None
    return GenerationReport(
        path.name,
        boundary if isinstance(boundary, str) else None,
        num_samples,
        directory_bytes(path),
        totals.raw_bytes,
        totals.stored_bytes,
        totals.error.relative_rms,
        None if totals.codec is None else totals.codec.label,
        math.nan if manifest is None else manifest.created,
        last_use(path),
        in_use_elsewhere(path),
        damage,
        note,
    )


def _records(path: Path) -> Iterator[tuple[bytes, Record | RecordError]]:
    try:
        with inspected(path) as view:
            yield from view.records()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _codec_name(record: Record) -> str:
    if not record.payload:
        return "empty"
    code = max(zip(map(len, record.payload), record.codecs, strict=True))[1]
    return Codec(code).label if code in Codec._value2member_map_ else f"unknown codec {code}"


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that cannot be read."""

    generation: str
    sample: str
    """The sample's ID, or the key where the ID cannot be told."""
    reason: str


@dataclass(slots=True)
class Verified:
    """One generation, checked."""

    num_records: int = 0
    damage: list[Damage] = field(default_factory=list)


def verify(path: Path) -> Verified:
    """Check and decode every record of a generation.

    Raises:
        StoreError: It cannot be told: a file is not ours, or cannot be opened now.
        OSError: The disk cannot be read.
    """
    found = Verified()
    try:
        if not is_unfinished(path) and Manifest.read(path).format >= FORMAT:
            _verify(path, found)
    except GoneError:
        pass
    except (DamagedError, OSError) as error:
        if os.path.lexists(path):  # else it was removed just now
            found.damage.append(Damage(path.name, "?", str(error)))
    return found


def _verify(path: Path, found: Verified) -> None:
    coder = Coder()
    with inspected(path) as view:
        # What another process writes to, it has looked at, and is not at rest.
        if not in_use_elsewhere(path) and (problem := view.tree_problem()):
            found.damage.append(Damage(path.name, "?", problem))
            return
        for key, record in view.records():
            found.num_records += 1
            try:
                _decode(record, coder)
            except ValueError as error:  # a RecordError is one
                found.damage.append(Damage(path.name, _sample(key), str(error)))


def _decode(record: Record | RecordError, coder: Coder) -> None:
    if isinstance(record, RecordError):
        raise record
    for position in range(len(record.payload)):
        record.value(position, coder)


def _sample(key: bytes) -> str:
    try:
        sample_id, variant = decode_key(key)
    except ValueError:
        return key.hex()
    shown = key.hex() if sample_id is None else repr(sample_id)
    return shown if variant == 0 else f"{shown} (variant {variant})"
