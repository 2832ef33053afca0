"""What the commands of `cache-inspect DIR` read of a directory, show, remove or copy.

Each takes the arguments and a survey of the directory, and returns the exit code. Reading disturbs
no live run that is writing to the directory.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from egeria_cache.cache import draws_noted
from egeria_cache.errors import StoreError
from egeria_cache.inspect.words import age, plain, print_json, table
from egeria_cache.store import (
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
from egeria_cache.tables import parse_size, size

HEALTHY, DAMAGED, BAD_ARGUMENTS = 0, 1, 2
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
STREAM = "-"
"""Stands for standard input or output."""
_LISTED = {
    "generation": "<", "boundary": "<", "samples": ">", "on disk": ">", "codec": "<", "used": "<",
}  # fmt: skip


Report = dict[str, Any]
"""As `--json` prints it, of a directory or of a generation in it: docs/inspect.md."""


def survey(directory: Path) -> Report:
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
    found = [_glance(path) for path in generation_directories(directory, damaged=True)]
    return {
        "directory": str(directory),
        "limit_bytes": limit,
        "bytes_on_disk": directory_bytes(directory),
        "healthy": all(one["damage"] is None for one in found),
        "generations": found,
    }


def find_generation(report: Report, text: str) -> Report:
    """Return the one generation whose name begins so, with or without "gen-".

    Raises:
        StoreError: None, or several.
    """
    known: list[Report] = report["generations"]
    found = [one for one in known if one["name"].startswith((text, f"gen-{text}"))]
    if len(found) != 1:
        names = ", ".join(one["name"] for one in found or known) or "none"
        problem = "is ambiguous" if found else "is not there"
        raise StoreError(f"generation {text!r} {problem}; candidates: {names}")
    return found[0]


def contents(path: Path) -> Report:
    """Read the heads of all records of a generation: what their fields are, how many records there
    are of each random draw, and how many of which nothing can be read.

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
    drawn = dict(sorted(variants.items()))
    return {"fields": shapes, "variants": drawn, "num_damaged": num_damaged}


def _glance(path: Path) -> Report:
    damage = "set aside: it could not be opened" if path.name.startswith(SET_ASIDE) else None
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
        "bytes_on_disk": directory_bytes(path),
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
        "ratio": raw_bytes / stored_bytes if stored_bytes else None,
        "lossy_error": totals.error.relative_rms,
        "codec": None if totals.codec is None else totals.codec.label,
        "created": math.nan if manifest is None else manifest.created,
        "last_used": last_use(path),
        "in_use": in_use_elsewhere(path),
        "damage": damage,
        "note": note,
    }


def _records(path: Path) -> Iterator[tuple[bytes, Record | RecordError]]:
    try:
        with inspected(path) as view:
            yield from view.records()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


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
        if not in_use_elsewhere(path) and (problem := tree_problem(path)):
            damaged("?", problem)
            return 0, damage
        with inspected(path) as view:
            coder = Coder()
            for key, record in view.records():
                num_records += 1
                try:
                    _decode(record, coder)
                except ValueError as error:  # a RecordError is one
                    sample, variant = _sample(key)
                    damaged(f"{sample} (variant {variant})" if variant else sample, error)
    except GoneError:
        pass
    except (DamagedError, OSError) as error:
        if os.path.lexists(path):  # else it was removed just now
            damaged("?", error)
    return num_records, damage


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


def ls(options: argparse.Namespace, report: Report) -> int:
    """List the generations; 1 if one is damaged."""
    state = HEALTHY if report["healthy"] else DAMAGED
    if options.json:
        print_json(report)
        return state
    rows = [
        (
            plain(one["name"]),
            plain(one["boundary"] or "-"),
            f"{one['num_samples']:,}",
            size(one["bytes_on_disk"]),
            plain(
                f"damaged: {one['damage']}" if one["damage"] else one["note"] or one["codec"] or "-"
            ),
            "now" if one["in_use"] else age(one["last_used"]) + " ago",
        )
        for one in report["generations"]
    ]
    if rows:
        print(table(_LISTED, rows))
    limit, used, count = report["limit_bytes"], report["bytes_on_disk"], len(rows)
    of_limit = f" of {size(limit)} ({used / limit:.0%})" if limit else ""
    print(f"{count} generation{'s' * (count != 1)}, {size(used)}{of_limit}")
    if options.directory.stat().st_mode & OTHERS_MAY_WRITE:
        print(
            "others may write to this directory, so that training refuses it: chmod go-w "
            f"{plain(options.directory)}"
        )
    return state


def show(options: argparse.Namespace, report: Report) -> int:
    """Show one generation; 1 if a record of it is damaged."""
    one = find_generation(report, options.generation)
    path = options.directory / one["name"]
    manifest, inside = Manifest.read(path), contents(path)
    state = DAMAGED if inside["num_damaged"] else HEALTHY
    drawn = draws_noted(options.directory, manifest.fields)
    if options.json:
        told = {"fields": dict(manifest.fields), "contents": inside}
        print_json({**one, **told, "random_draws": drawn})
        return state
    sizes = f"{size(one['bytes_on_disk'])} on disk, {size(one['raw_bytes'])} decoded"
    ratio = "" if one["ratio"] is None else f", ratio {one['ratio']:.2f}"
    print(f"{plain(one['name'])}  {one['num_samples']:,} records, {sizes}{ratio}")
    print(f"created {age(one['created'])} ago, in use: {'yes' if one['in_use'] else 'no'}")
    if one["lossy_error"]:
        print(f"lossy: relative error {one['lossy_error']:.2e} (root mean square)")
    for title, pairs in (
        ("made from", {name: json.dumps(value) for name, value in manifest.fields.items()}),
        ("holds", inside["fields"]),
        ("draws", {str(n): f"{count:,} records" for n, count in inside["variants"].items()}),
    ):
        print(title)
        for name, text in pairs.items():
            print(f"  {plain(name)}: {plain(text):.100}")
    for way in drawn:
        uses = "for ever" if way["reuse"] is None else f"for {way['reuse']} epochs each"
        print(plain(f"  used {uses}; {way['epochs']:,} epochs were passed"))
    return state


def verify_all(options: argparse.Namespace, report: Report) -> int:
    """Decode every record; 1 if one is damaged."""
    chosen = report["generations"]
    if options.generation is not None:
        chosen = [find_generation(report, options.generation)]
    found = [verify(options.directory / one["name"]) for one in chosen]
    damage = [each for _, inside in found for each in inside]
    records = sum(count for count, _ in found)
    if options.json:
        print_json({"healthy": not damage, "records": records, "damage": damage})
    else:
        for each in damage:
            print(plain(f"{each['generation']}: sample {each['sample']}: {each['reason']}"))
        verdict = f"{len(damage)} damaged" if damage else "all intact"
        where = f"{len(chosen)} generation{'s' * (len(chosen) != 1)}"
        print(f"{records:,} records in {where}: {verdict}")
    return DAMAGED if damage else HEALTHY


def diff(options: argparse.Namespace, report: Report) -> int:
    """Show the fields in which two generations differ."""
    names = [find_generation(report, text)["name"] for text in (options.generation, options.other)]
    one, other = (Manifest.read(options.directory / name).fields for name in names)
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


def prune(options: argparse.Namespace, report: Report) -> int:
    """Remove what is chosen of what no live process uses, or tell what that would be."""
    chosen = (options.unused, options.damaged, options.older_than, options.to_size)
    if not any(one not in (None, False) for one in chosen):
        raise ValueError("prune needs --older-than, --to-size, --unused or --damaged")
    unused = sorted(
        (one for one in report["generations"] if not one["in_use"]), key=itemgetter("last_used")
    )
    doomed = [one for one in unused if options.unused or (options.damaged and one["damage"])]
    if options.older_than is not None:
        before = time.time() - 86_400 * options.older_than
        doomed += [one for one in unused if one["last_used"] < before and one not in doomed]
    if options.to_size is not None:
        most = parse_size(options.to_size)
        left = report["bytes_on_disk"] - sum(one["bytes_on_disk"] for one in doomed)
        for one in unused:
            if left > most and one not in doomed:
                doomed.append(one)
                left -= one["bytes_on_disk"]
    return _remove(options, doomed)


def _remove(options: argparse.Namespace, doomed: list[Report]) -> int:
    """Remove the generations, or only list them; one that a live process uses always stays."""
    sizes = {one["name"]: one["bytes_on_disk"] for one in doomed}
    gone = remove_generations(options.directory, sizes) if options.yes else ()
    outcome = {name: "removed" if name in gone else "not ours, stays" for name in sizes}
    if not options.yes:
        outcome = dict.fromkeys(sizes, "would be removed")
    in_use = (one["name"] for one in doomed if one["in_use"] and one["name"] not in gone)
    outcome |= dict.fromkeys(in_use, "in use, stays")
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


def pack(options: argparse.Namespace, report: Report) -> int:
    """Write one generation to a file; 1 if damaged records were left out.

    Raises:
        ValueError: The file is there already.
        StoreError: There is no such generation, or it cannot be read.
        OSError: The file cannot be written.
    """
    one = find_generation(report, options.generation)
    with _written(options.file) as out:
        done = pack_generation(options.directory / one["name"], out)
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
