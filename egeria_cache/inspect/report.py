"""What the commands of `cache-inspect DIR` read of a directory, and what they remove or copy.

Each takes the arguments and a survey of the directory, and returns the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from egeria_cache.cache import draws_noted
from egeria_cache.config import parse_size
from egeria_cache.inspect.census import (
    CacheReport,
    GenerationReport,
    contents,
    find_generation,
    verify,
)
from egeria_cache.inspect.words import age, plain, print_json, table
from egeria_cache.store import (
    ActivationStore,
    Manifest,
    Parcelled,
    remove_generations,
)
from egeria_cache.store import pack as pack_generation
from egeria_cache.store import unpack as unpack_generation
from egeria_cache.tables import size

HEALTHY, DAMAGED, BAD_ARGUMENTS = 0, 1, 2
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LISTED = {
    "generation": "<", "boundary": "<", "samples": ">", "on disk": ">", "codec": "<", "used": "<",
}  # fmt: skip


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
    state = DAMAGED if "damaged" in inside.codecs else HEALTHY
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
        ("codecs", {name: f"{count:,} records" for name, count in inside.codecs.items()}),
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
    damage = [each for one in found for each in one.damage]
    records = sum(one.num_records for one in found)
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
