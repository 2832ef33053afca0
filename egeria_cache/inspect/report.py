"""What the commands of `cache-inspect DIR` read of a directory, show, remove or copy.

Each takes the arguments and a survey of the directory, and returns the exit code. Reading disturbs
no live run that is writing to the directory.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from egeria_cache.cache import draws_noted
from egeria_cache.config import parse_size
from egeria_cache.errors import StoreError
from egeria_cache.inspect.words import age, plain, print_json, table
from egeria_cache.store import (
    FORMAT,
    ROOT_FORMAT,
    ROOT_NAME,
    SET_ASIDE,
    ActivationStore,
    Coder,
    DamagedError,
    GoneError,
    Manifest,
    Parcelled,
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
    remove_generations,
    tree_problem,
)
from egeria_cache.store import pack as pack_generation
from egeria_cache.store import unpack as unpack_generation
from egeria_cache.tables import size

HEALTHY, DAMAGED, BAD_ARGUMENTS = 0, 1, 2
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
STREAM = "-"
"""Stands for standard input or output."""
_LISTED = {
    "generation": "<", "boundary": "<", "samples": ">", "on disk": ">", "codec": "<", "used": "<",
}  # fmt: skip


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
    variants: Mapping[int, int]
    """Records per variant."""
    num_damaged: int
    """Records whose heads cannot be read."""


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
    variants: collections.Counter[int] = collections.Counter()
    num_damaged = 0
    for key, record in () if is_unfinished(path) else _records(path):
        if isinstance(record, RecordError):
            num_damaged += 1
            continue
        variants[_sample(key)[1]] += 1
        for position in range(len(record.payload)):
            field, _ = record.field(position)
            text = str(field).removeprefix(f"{field.name}: ")
            shapes[field.name] = text if shapes.get(field.name, text) == text else "varies"
    return Contents(shapes, dict(sorted(variants.items())), num_damaged)


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


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that cannot be read."""

    generation: str
    sample: str
    """The sample's ID, or the key where the ID cannot be told."""
    reason: str


class Verified(NamedTuple):
    """One generation, checked."""

    num_records: int
    damage: list[Damage]


def verify(path: Path) -> Verified:
    """Check and decode every record of a generation.

    Raises:
        StoreError: It cannot be told: a file is not ours, or cannot be opened now.
        OSError: The disk cannot be read.
    """
    num_records, damage = 0, list[Damage]()
    try:
        if is_unfinished(path) or Manifest.read(path).format < FORMAT:
            return Verified(0, damage)
        # What another process writes to, it has looked at, and is not at rest.
        if not in_use_elsewhere(path) and (problem := tree_problem(path, believes_mark=False)):
            return Verified(0, [Damage(path.name, "?", problem)])
        with inspected(path) as view:
            coder = Coder()
            for key, record in view.records():
                num_records += 1
                try:
                    _decode(record, coder)
                except ValueError as error:  # a RecordError is one
                    sample, variant = _sample(key)
                    shown = f"{sample} (variant {variant})" if variant else sample
                    damage.append(Damage(path.name, shown, str(error)))
    except GoneError:
        pass
    except (DamagedError, OSError) as error:
        if os.path.lexists(path):  # else it was removed just now
            damage.append(Damage(path.name, "?", str(error)))
    return Verified(num_records, damage)


def _decode(record: Record | RecordError, coder: Coder) -> None:
    if isinstance(record, RecordError):
        raise record
    for position in range(len(record.payload)):
        record.value(position, coder)


def _sample(key: bytes) -> tuple[str, int]:
    """Return what a sample is called, and which variant of it this is."""
    try:
        sample_id, variant = decode_key(key)
    except ValueError:
        return key.hex(), 0
    return key.hex() if sample_id is None else repr(sample_id), variant


def ls(options: argparse.Namespace, report: CacheReport) -> int:
    """List the generations; 1 if one is damaged."""
    if options.json:
        print_json(
            {
                "directory": str(report.directory),
                "limit_bytes": report.limit_bytes,
                "bytes_on_disk": report.bytes_on_disk,
                "healthy": report.healthy,
                "generations": [_generation_json(one) for one in report.generations],
            }
        )
        return HEALTHY if report.healthy else DAMAGED
    rows = [
        (
            plain(one.name),
            plain(one.boundary or "-"),
            f"{one.num_samples:,}",
            size(one.bytes_on_disk),
            plain(f"damaged: {one.damage}" if one.damage else one.note or one.codec or "-"),
            "now" if one.in_use else age(one.last_used) + " ago",
        )
        for one in report.generations
    ]
    if rows:
        print(table(_LISTED, rows, drop=("codec", "used")))
    limit = report.limit_bytes
    of_limit = f" of {size(limit)} ({report.bytes_on_disk / limit:.0%})" if limit else ""
    count = len(rows)
    print(f"{count} generation{'s' * (count != 1)}, {size(report.bytes_on_disk)}{of_limit}")
    if report.directory.stat().st_mode & OTHERS_MAY_WRITE:
        print(
            "others may write to this directory, so that training refuses it: chmod go-w "
            f"{plain(report.directory)}"
        )
    return HEALTHY if report.healthy else DAMAGED


def show(options: argparse.Namespace, report: CacheReport) -> int:
    """Show one generation; 1 if a record of it is damaged."""
    one = find_generation(report, options.generation)
    path = report.directory / one.name
    manifest, inside = Manifest.read(path), contents(path)
    state = DAMAGED if inside.num_damaged else HEALTHY
    drawn = draws_noted(report.directory, manifest.fields)
    if options.json:
        told = {"fields": dict(manifest.fields), "contents": dataclasses.asdict(inside)}
        print_json({**_generation_json(one), **told, "random_draws": drawn})
        return state
    sizes = f"{size(one.bytes_on_disk)} on disk, {size(one.raw_bytes)} decoded"
    ratio = "" if one.ratio is None else f", ratio {one.ratio:.2f}"
    print(f"{plain(one.name)}  {one.num_samples:,} records, {sizes}{ratio}")
    print(f"created {age(one.created)} ago, in use: {'yes' if one.in_use else 'no'}")
    if one.lossy_error:
        print(f"lossy: relative error {one.lossy_error:.2e} (root mean square)")
    for title, pairs in (
        ("made from", {name: json.dumps(value) for name, value in manifest.fields.items()}),
        ("holds", inside.fields),
        ("draws", {str(one): f"{count:,} records" for one, count in inside.variants.items()}),
    ):
        print(title)
        for name, text in pairs.items():
            print(f"  {plain(name)}: {plain(text):.100}")
    for way in drawn:
        uses = "for ever" if way["reuse"] is None else f"for {way['reuse']} epochs each"
        print(plain(f"  used {uses}; {way['epochs']:,} epochs were passed"))
    return state


def verify_all(options: argparse.Namespace, report: CacheReport) -> int:
    """Decode every record; 1 if one is damaged."""
    chosen = report.generations
    if options.generation is not None:
        chosen = (find_generation(report, options.generation),)
    found = [verify(report.directory / one.name) for one in chosen]
    damage = [each for _, inside in found for each in inside]
    records = sum(count for count, _ in found)
    if options.json:
        told = [dataclasses.asdict(each) for each in damage]
        print_json({"healthy": not damage, "records": records, "damage": told})
    else:
        for each in damage:
            print(plain(f"{each.generation}: sample {each.sample}: {each.reason}"))
        verdict = f"{len(damage)} damaged" if damage else "all intact"
        where = f"{len(chosen)} generation{'s' * (len(chosen) != 1)}"
        print(f"{records:,} records in {where}: {verdict}")
    return DAMAGED if damage else HEALTHY


def diff(options: argparse.Namespace, report: CacheReport) -> int:
    """Show the fields in which two generations differ."""
    names = [find_generation(report, text).name for text in (options.generation, options.other)]
    one, other = (Manifest.read(report.directory / name).fields for name in names)
    differing = differing_fields(one, other)
    if options.json:
        print_json(
            {field: dict(zip(names, pair, strict=True)) for field, pair in differing.items()}
        )
        return HEALTHY
    if not differing:
        print("the same fields")
        return HEALTHY
    rows = [
        (plain(field), *(plain(json.dumps(value)) for value in pair))
        for field, pair in differing.items()
    ]
    print(table(dict.fromkeys(("field", *map(plain, names)), "<"), rows))
    return HEALTHY


def differing_fields(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return, per field that differs, (our value, their value); None where it is absent.

    Of fields that hold fields, only those inside that differ: "tensors.layer1.shape".
    """
    differing: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*ours, *theirs}):
        one, other = ours.get(name), theirs.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inside = differing_fields(one, other)
            differing.update({f"{name}.{inner}": pair for inner, pair in inside.items()})
        elif (name in ours) != (name in theirs) or one != other:
            differing[name] = one, other
    return differing


def prune(options: argparse.Namespace, report: CacheReport) -> int:
    """Remove what is chosen of what no live process uses, or tell what that would be."""
    chosen = (options.unused, options.damaged, options.older_than, options.to_size)
    if not any(one not in (None, False) for one in chosen):
        raise ValueError("prune needs --older-than, --to-size, --unused or --damaged")
    unused = sorted(
        (one for one in report.generations if not one.in_use), key=lambda one: one.last_used
    )
    doomed = [one for one in unused if options.unused or (options.damaged and one.damage)]
    if options.older_than is not None:
        before = time.time() - 86_400 * options.older_than
        doomed += [one for one in unused if one.last_used < before and one not in doomed]
    if options.to_size is not None:
        most = parse_size(options.to_size)
        left = report.bytes_on_disk - sum(one.bytes_on_disk for one in doomed)
        for one in unused:
            if left > most and one not in doomed:
                doomed.append(one)
                left -= one.bytes_on_disk
    return _remove(options, report, doomed)


def _remove(
    options: argparse.Namespace, report: CacheReport, doomed: list[GenerationReport]
) -> int:
    """Remove the generations, or only list them; one that a live process uses always stays."""
    names = [one.name for one in doomed]
    gone = remove_generations(report.directory, names) if options.yes else ()
    outcome = {name: "removed" if name in gone else "not ours, stays" for name in names}
    if not options.yes:
        outcome = dict.fromkeys(names, "would be removed")
    outcome |= {one.name: "in use, stays" for one in doomed if one.in_use and one.name not in gone}
    sizes = {one.name: one.bytes_on_disk for one in doomed}
    if options.json:
        print_json(
            {name: {"outcome": text, "bytes": sizes[name]} for name, text in outcome.items()}
        )
        return HEALTHY
    for name, text in outcome.items():
        print(f"{plain(name)}  {size(sizes[name]):>9}  {text}")
    freed = sum(sizes[name] for name, text in outcome.items() if text.endswith("removed"))
    print(f"{size(freed)} {'freed' if options.yes else 'would be freed; add --yes to do it'}")
    return HEALTHY


def _generation_json(one: GenerationReport) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "ratio": one.ratio}


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
