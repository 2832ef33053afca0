"""What `cache-inspect` shows: sizes and contents of a cache directory. Reads only.

Looks at a cache that a live run is writing without disturbing it.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from egeria_cache.errors import StoreError
from egeria_cache.store import (
    ROOT_FORMAT,
    ROOT_NAME,
    SET_ASIDE,
    Codec,
    Coder,
    DamagedError,
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

Largest = tuple[tuple[int, ...], int]
"""A tensor's shape and bytes of an element."""

__all__ = [
    "CacheReport",
    "Contents",
    "GenerationReport",
    "Spread",
    "contents",
    "find_generation",
    "survey",
]


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
class Spread:
    """How many numbers are distributed."""

    least: int
    median: float
    p90: float
    most: int
    total: int

    @classmethod
    def of(cls, numbers: npt.ArrayLike) -> Spread:
        """Describe some numbers, at least one."""
        found = np.asarray(numbers, np.int64)
        median, p90 = np.percentile(found, (50, 90)).tolist()
        return cls(int(found.min()), median, p90, int(found.max()), int(found.sum()))


@dataclass(frozen=True, slots=True)
class Contents:
    """What the records of one generation hold."""

    fields: Mapping[str, str]
    """Per name: dtype and shape, "varies" where the records differ."""
    codecs: Mapping[str, int]
    """Records per codec of their largest field."""
    variants: Mapping[int, int]
    """Records per variant."""
    histogram: tuple[tuple[int, int, int], ...]
    """(from, to, records) by size of the record in bytes; powers of two."""
    tensor_bytes: Spread | None = None
    """Per record, decoded; None if there are no records."""
    largest_bytes: int = 0
    """Of all records' tensors, if each were as large as the largest of its name in any record."""
    numbers: tuple[Spread, ...] = ()
    """Per element of the field that was asked for, where all records have it."""


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


def contents(path: Path, *, numbers_of: str | None = None) -> Contents:
    """Read the heads of all records of a generation.

    Args:
        path: The generation's directory.
        numbers_of: A field of integers, one row of them per record, that is read as well.

    Raises:
        StoreError: It cannot be opened.
    """
    shapes: dict[str, str] = {}
    codecs: collections.Counter[str] = collections.Counter()
    variants: collections.Counter[int] = collections.Counter()
    sizes: collections.Counter[int] = collections.Counter()
    largest: dict[str, Largest] = {}
    tensor_bytes: list[int] = []
    numbers: list[list[int]] = []
    coder = Coder()
    if is_unfinished(path):
        return Contents(shapes, {}, {}, ())
    for key, record in _records(path):
        try:
            _, variant = decode_key(key)
        except ValueError:
            variant = 0
        if isinstance(record, RecordError):
            codecs["damaged"] += 1
            continue
        variants[variant] += 1
        sizes[max(len(record.whole) - 1, 0).bit_length()] += 1
        codecs[_codec_name(record)] += 1
        tensor_bytes.append(0)
        for position in range(len(record.payload)):
            field, _ = record.field(position)
            text = str(field).removeprefix(f"{field.name}: ")
            shapes[field.name] = text if shapes.get(field.name, text) == text else "varies"
            if field.dtype is not None:
                tensor_bytes[-1] += field.num_bytes
                size = field.dtype.itemsize
                largest[field.name] = _larger((field.shape, size), largest.get(field.name))
        numbers += _numbers(record, numbers_of, coder)
    bins = range(min(sizes), max(sizes) + 1) if sizes else ()
    histogram = tuple((2 ** (one - 1) if one else 0, 2**one, sizes[one]) for one in bins)
    columns = zip(*numbers, strict=True) if len({len(row) for row in numbers}) == 1 else ()
    return Contents(
        shapes,
        dict(codecs),
        dict(sorted(variants.items())),
        histogram,
        Spread.of(tensor_bytes) if tensor_bytes else None,
        len(tensor_bytes) * sum(math.prod(shape) * size for shape, size in largest.values()),
        tuple(map(Spread.of, columns)) if len(numbers) == len(tensor_bytes) else (),
    )


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


def _larger(one: Largest, known: Largest | None) -> Largest:
    """Return what a field's tensor takes if it is as large as both in every dimension."""
    if known is None or len(known[0]) != len(one[0]):
        return one
    return tuple(map(max, known[0], one[0])), max(one[1], known[1])


def _numbers(record: Record, name: str | None, coder: Coder) -> Iterator[list[int]]:
    """Yield the row of integers that a record has under this name, if it has one."""
    for position in range(len(record.payload)):
        field, _ = record.field(position)
        is_row = len(field.shape) == 1 and field.dtype in (torch.int32, torch.int64)
        if field.name == name and is_row:
            with contextlib.suppress(RecordError):
                yield record.value(position, coder).tolist()  # type: ignore[union-attr]


def _codec_name(record: Record) -> str:
    if not record.payload:
        return "empty"
    code = max(zip(map(len, record.payload), record.codecs, strict=True))[1]
    return Codec(code).label if code in Codec._value2member_map_ else f"unknown codec {code}"
