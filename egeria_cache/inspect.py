"""`cache-inspect`: what a cache directory holds, whether it is intact, and what may go.

Exit codes: 0 healthy, 1 damaged, 2 bad arguments. It may look at a cache that a live run is
writing; only `prune` removes anything, and only with `--yes`.

Each command takes the arguments and a survey of the directory, and returns the exit code, what it
tells to programs, and the same in lines for people.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from egeria_cache import store
from egeria_cache.cache import draws_noted
from egeria_cache.errors import EgeriaError, StoreError
from egeria_cache.store import Report
from egeria_cache.tables import end_with_reader, parse_size, size
from egeria_cache.version import __version__

__all__ = ["main"]

HEALTHY, DAMAGED, BAD_ARGUMENTS = 0, 1, 2
STREAM = "-"
"""Stands for standard input or output."""
_LISTED = {
    "generation": "<", "boundary": "<", "samples": ">", "on disk": ">", "codec": "<", "used": "<",
}  # fmt: skip
Told = tuple[int, Any, list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    if argv is None:
        end_with_reader()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments or ["--help"])
        report = {} if options.run is unpack else store.survey(options.directory)  # it makes one
        code, content, lines = options.run(options, report)
        is_stream = options.run is pack and options.file == STREAM
        _print(content if options.json else lines, sys.stderr if is_stream else sys.stdout)
    except SystemExit as stop:  # argparse has printed help (0) or the mistake (2)
        return int(stop.code or 0)
    except (EgeriaError, ValueError, OSError, RecursionError) as error:
        _print([f"cache-inspect: {error}"], sys.stderr)
        return DAMAGED if isinstance(error, store.DamagedError | RecursionError) else BAD_ARGUMENTS
    return int(code)


def _print(told: Any, out: Any) -> None:
    """Write lines without what a terminal would obey, for of a damaged file anything may come; or
    JSON, in which a number that it has no word for is null.
    """
    if isinstance(told, list):
        for line in told:
            print("".join(c if c.isprintable() else repr(c)[1:-1] for c in line), file=out)
    else:
        finite = json.loads(json.dumps(told), parse_constant=lambda _: None)
        print(json.dumps(finite, indent=2), file=out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cache-inspect",
        description="Show, check and clean Egeria's caches: directories that keep, per training "
        "sample, the output of a model's frozen front, so that training need not compute it again.",
        epilog="Exit codes: 0 healthy, 1 damaged, 2 bad arguments.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the cache's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--version", action="version", version=f"cache-inspect {__version__}")
    parser.set_defaults(run=ls)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        # SUPPRESS: without it the subcommand's default would overwrite a --json given before it.
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")
        sub.set_defaults(run=run)
        return sub

    command("ls", ls, "list the generations (the default)")
    showing = command("show", show, "one generation: contents, sizes, what it was made from")
    showing.add_argument("generation", metavar="GEN")
    check = command("verify", verify, "decode every record; exit 1 if one is damaged")
    check.add_argument("generation", metavar="GEN", nargs="?", default="")
    differing = command("diff", diff, "which fields of two generations differ")
    differing.add_argument("generation", metavar="GEN")
    differing.add_argument("other", metavar="GEN")
    pruning = command("prune", prune, "remove unused ones; only shows them without --yes")
    pruning.add_argument("--older-than", metavar="DAYS", type=float, help="last used before then")
    pruning.add_argument("--to-size", metavar="SIZE", help="oldest use first, to fit ('50GB')")
    pruning.add_argument("--unused", action="store_true", help="all that no live process holds")
    pruning.add_argument("--damaged", action="store_true", help="set aside, or known as damaged")
    pruning.add_argument("--yes", action="store_true", help="remove them")
    packing = command("pack", pack, "write one generation to one file, for another machine")
    packing.add_argument("generation", metavar="GEN")
    packing.add_argument("file", metavar="FILE", help="'-' for standard output")
    unpacking = command("unpack", unpack, "store a packed generation")
    unpacking.add_argument("file", metavar="FILE", help="'-' for standard input")
    unpacking.add_argument("--limit", metavar="SIZE", default="100GB", help="default 100GB")
    unpacking.add_argument("--force-network", action="store_true", help="DIR may be on a network")
    return parser


def _found(report: Report, text: str) -> Report:
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


def _table(columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of columns.

    Args:
        columns: Names, and to which side each is justified: "<" or ">".
        rows: A cell for each column.
    """
    cells = [tuple(columns), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(columns.values(), widths, strict=True)]
    lines = (zip(row, forms, strict=True) for row in cells)
    return ["  ".join(f"{one:{form}}" for one, form in line).rstrip() for line in lines]


def _age(since: float) -> str:
    """Return how long ago a time was, given in seconds since the epoch; "?" for what is no time."""
    seconds = time.time() - since
    return str(timedelta(seconds=int(seconds))) if 0 <= seconds < 1e10 else "?"


def ls(options: argparse.Namespace, report: Report) -> Told:
    """List the generations; 1 if one is damaged."""
    rows = [
        (
            one["name"], one["boundary"] or "-",
            f"{one['num_samples']:,}", size(one["bytes_on_disk"]),
            f"damaged: {one['damage']}" if one["damage"] else one["note"] or one["codec"] or "-",
            "now" if one["in_use"] else f"{_age(one['last_used'])} ago",
        )
        for one in report["generations"]
    ]  # fmt: skip
    lines, count = _table(_LISTED, rows) if rows else [], len(rows)
    lines.append(f"{count} generation{'s' * (count != 1)}, {size(report['bytes_on_disk'])}")
    return HEALTHY if report["healthy"] else DAMAGED, report, lines


def show(options: argparse.Namespace, report: Report) -> Told:
    """Show one generation; 1 if a record of it is damaged."""
    one = _found(report, options.generation)
    path = options.directory / one["name"]
    fields, inside = dict(store.Manifest.read(path).fields), store.verify(path)
    drawn = draws_noted(options.directory, fields)
    sizes = f"{size(one['bytes_on_disk'])} on disk, {size(one['raw_bytes'])} decoded"
    ratio = "" if one["ratio"] is None else f", ratio {one['ratio']:.2f}"
    lines = [
        f"{one['name']}  {one['num_samples']:,} records, {sizes}{ratio}",
        f"created {_age(one['created'])} ago, in use: {'yes' if one['in_use'] else 'no'}",
    ]
    for title, pairs in (
        ("made from", {name: json.dumps(value) for name, value in fields.items()}),
        ("holds", inside["fields"]),
        ("draws", {str(n): f"{count:,} records" for n, count in inside["variants"].items()}),
    ):
        lines += [title, *(f"  {name}: {text:.100}" for name, text in pairs.items())]
    for way in drawn:
        uses = "for ever" if way["reuse"] is None else f"for {way['reuse']} epochs each"
        lines.append(f"  used {uses}; {way['epochs']:,} epochs were passed")
    lines += [f"damaged: sample {each['sample']}: {each['reason']}" for each in inside["damage"]]
    content = {**one, "fields": fields, "contents": inside, "random_draws": drawn}
    return DAMAGED if inside["damage"] else HEALTHY, content, lines


def verify(options: argparse.Namespace, report: Report) -> Told:
    """Decode every record; 1 if one is damaged."""
    chosen = [_found(report, options.generation)] if options.generation else report["generations"]
    found = [store.verify(options.directory / one["name"]) for one in chosen]
    damage = [each for inside in found for each in inside["damage"]]
    records, count = sum(inside["records"] for inside in found), len(chosen)
    lines = [f"{each['generation']}: sample {each['sample']}: {each['reason']}" for each in damage]
    verdict = f"{len(damage)} damaged" if damage else "all intact"
    lines.append(f"{records:,} records in {count} generation{'s' * (count != 1)}: {verdict}")
    content = {"healthy": not damage, "records": records, "damage": damage}
    return DAMAGED if damage else HEALTHY, content, lines


def diff(options: argparse.Namespace, report: Report) -> Told:
    """Show the fields in which two generations differ; null where one is absent."""
    names = [_found(report, text)["name"] for text in (options.generation, options.other)]
    read = [store.Manifest.read(options.directory / name).fields for name in names]
    one, other = (dict(_flat(fields)) for fields in read)
    pairs = {name: (one.get(name), other.get(name)) for name in sorted({*one, *other})}
    in_one = one.keys() ^ other.keys()
    differing = {name: pair for name, pair in pairs.items() if name in in_one or pair[0] != pair[1]}
    rows = [(name, *map(json.dumps, pair)) for name, pair in differing.items()]
    lines = _table(dict.fromkeys(("field", *names), "<"), rows) if rows else ["the same fields"]
    content = {name: dict(zip(names, pair, strict=True)) for name, pair in differing.items()}
    return HEALTHY, content, lines


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give each value under its whole name: "tensors.layer1.shape"."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{name}.{inner}", one) for inner, one in _flat(value))
        else:
            yield name, value


def prune(options: argparse.Namespace, report: Report) -> Told:
    """Remove what is chosen of what no live process uses, or tell what that would be."""
    days = math.inf if options.older_than is None else options.older_than
    is_chosen = options.unused or options.damaged or options.to_size or days < math.inf
    if not (is_chosen and days >= 0):
        raise ValueError("prune needs --older-than DAYS (>= 0), --to-size, --unused or --damaged")
    before = time.time() - 86_400 * days
    most = parse_size(options.to_size) if options.to_size else math.inf

    def is_due(one: Report) -> bool:
        is_damaged = options.damaged and one["damage"]
        return bool(options.unused or is_damaged or one["last_used"] < before)

    sizes, left = dict[str, int](), report["bytes_on_disk"]
    for one in sorted(report["generations"], key=lambda one: (not is_due(one), one["last_used"])):
        if not one["in_use"] and (is_due(one) or left > most):
            sizes[one["name"]] = one["bytes_on_disk"]
            left -= one["bytes_on_disk"]
    outcome = dict.fromkeys(sizes, "would be removed")
    if options.yes:
        gone = store.remove_generations(options.directory, sizes)
        outcome = {one: "removed" if one in gone else "in use, or not ours: stays" for one in sizes}
    lines = [f"{name}  {size(sizes[name]):>9}  {text}" for name, text in outcome.items()]
    freed = sum(sizes[name] for name, text in outcome.items() if text.endswith("removed"))
    how = "freed" if options.yes else "would be freed; add --yes to do it"
    lines.append(f"{size(freed)} {how}")
    content = {name: {"outcome": text, "bytes": sizes[name]} for name, text in outcome.items()}
    return HEALTHY, content, lines


def pack(options: argparse.Namespace, report: Report) -> Told:
    """Write one generation to a file that is not there yet; 1 if damaged records were left out."""
    path = options.directory / _found(report, options.generation)["name"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with (
        contextlib.nullcontext(sys.stdout.buffer)
        if options.file == STREAM
        else open(os.open(options.file, flags, 0o600), "wb")
    ) as out:
        done = store.pack(path, out)
    return DAMAGED if done["damaged"] else HEALTHY, done, _parcelled(**done)


def unpack(options: argparse.Namespace, _: Report) -> Told:
    """Store a packed generation; 1 if the limit had no room for all of it."""
    limit, is_forced = parse_size(options.limit), options.force_network
    with (
        contextlib.nullcontext(sys.stdin.buffer)
        if options.file == STREAM
        else open(options.file, "rb") as stream,
        store.ActivationStore(options.directory, limit, force_network=is_forced) as into,
    ):
        done = store.unpack(stream, into)
    return DAMAGED if done["no_room"] else HEALTHY, done, _parcelled(**done)


def _parcelled(generation: str, bytes: int, **counts: int) -> list[str]:
    words = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
    return [f"{generation}: records: {words}; {size(bytes)}"]


if __name__ == "__main__":
    sys.exit(main())
