"""`cache-inspect`: what a cache directory holds, whether it is intact, and what may go.

Exit codes: 0 healthy, 1 damaged, 2 bad arguments. Reading commands never change the directory and
may look at a cache that a live run is writing.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from egeria_cache.arguments import did_you_mean
from egeria_cache.cache import schedules
from egeria_cache.config import parse_size
from egeria_cache.errors import EgeriaError
from egeria_cache.inspect.fill_command import fill
from egeria_cache.inspect.lengths import length_words, sample_words
from egeria_cache.inspect.parcel_command import pack, unpack
from egeria_cache.inspect.plan_command import plan
from egeria_cache.inspect.watch_command import watch
from egeria_cache.inspect.words import age, console, fitting, plain, print_json, size
from egeria_cache.prefetch import LENGTHS
from egeria_cache.store import (
    BudgetBusyError,
    CacheReport,
    DamagedError,
    GenerationReport,
    Manifest,
    contents,
    differing_fields,
    find_generation,
    remove_generations,
    survey,
    verify,
)
from egeria_cache.version import __version__

__all__ = ["main"]

HEALTHY, DAMAGED, BAD_ARGUMENTS = 0, 1, 2
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
COMMANDS = ("ls", "show", "verify", "diff", "watch", "prune", "pack", "unpack", "clear")
_LISTED: dict[str, JustifyMethod] = {
    "generation": "left", "boundary": "left", "samples": "right", "on disk": "right",
    "ratio": "right", "codec": "left", "age": "left", "used": "left",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a path may hold bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if arguments[:1] == ["plan"]:  # there is no cache yet; one of that name is ./plan
            return plan(arguments[1:])
        if arguments[:1] == ["fill"]:
            return fill(arguments[1:])
        if not arguments:
            return _explain()
        _check_order(arguments)
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace, CacheReport], int] = options.run
        makes_cache: bool = options.run is unpack
        return unpack(options) if makes_cache else command(options, survey(options.directory))
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return HEALTHY
    except SystemExit as stop:  # argparse has printed help (0) or the mistake (2)
        return int(stop.code or 0)
    except (DamagedError, RecursionError) as error:
        print(f"cache-inspect: {plain(error)}", file=sys.stderr)
        return DAMAGED
    except (EgeriaError, ValueError, OSError, BudgetBusyError) as error:
        print(f"cache-inspect: {plain(error)}", file=sys.stderr)
        return BAD_ARGUMENTS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cache-inspect",
        description="Show, check and clean a cache directory.",
        epilog="Before any training, instead of DIR: plan MODEL_FACTORY --data DATASET_FACTORY "
        "measures what a cache would bring (see plan --help); fill MODEL_FACTORY --data "
        "DATASET_FACTORY --directory DIR stores everything (see fill --help). "
        "Exit codes: 0 healthy, 1 damaged, 2 bad arguments.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the cache's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--version", action="version", version=f"cache-inspect {__version__}")
    parser.set_defaults(run=_list)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        # SUPPRESS: without it the subcommand's default would overwrite a --json given before it.
        sub.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
        )
        sub.set_defaults(run=run)
        return sub

    look = command("watch", _watch, "what running caches are doing, live; Ctrl-C ends it")
    look.add_argument(
        "--every", metavar="SECONDS", type=_at_least(0.05, "seconds"), default=1.0, help="default 1"
    )
    look.add_argument(
        "--times", metavar="N", type=_at_least(1, "looks", int), help="look so often, and end"
    )
    command("ls", _list, "list the generations (the default)")
    show = command("show", _show, "one generation: contents, codecs, sizes, what it was made from")
    show.add_argument("generation", metavar="GEN")
    check = command("verify", _verify, "decode every record; exit 1 if one is damaged")
    check.add_argument("generation", metavar="GEN", nargs="?")
    diff = command("diff", _diff, "which fields of two generations differ")
    diff.add_argument("generation", metavar="GEN")
    diff.add_argument("other", metavar="GEN")
    prune = command("prune", _prune, "remove unused generations; only shows them without --yes")
    prune.add_argument(
        "--older-than", metavar="DAYS", type=_at_least(0, "days"), help="last used before then"
    )
    prune.add_argument("--to-size", metavar="SIZE", help="oldest use first, until it fits ('50GB')")
    prune.add_argument("--unused", action="store_true", help="all that no live process holds")
    prune.add_argument(
        "--damaged",
        action="store_true",
        help="those that were set aside, or are known to be damaged",
    )
    prune.add_argument("--yes", action="store_true", help="remove them")
    packing = command("pack", pack, "write one generation to one file, for another machine")
    packing.add_argument("generation", metavar="GEN")
    packing.add_argument("file", metavar="FILE", help="'-' for standard output")
    unpacking = command("unpack", unpack, "store a packed generation, made here or elsewhere")
    unpacking.add_argument("file", metavar="FILE", help="'-' for standard input")
    unpacking.add_argument("--limit", metavar="SIZE", default="100GB", help="default 100GB")
    unpacking.add_argument(
        "--force-network", action="store_true", help="DIR may lie on a network filesystem"
    )
    clear = command("clear", _clear, "remove all generations; only shows them without --yes")
    clear.add_argument("--yes", action="store_true", help="remove them")
    return parser


def _check_order(arguments: Sequence[str]) -> None:
    """Say where a word is out of place, or misspelt.

    Raises:
        ValueError: The directory does not come first, or there is no such command.
    """
    words = [one for one in arguments if not one.startswith("-")]
    if words and words[0] in COMMANDS and not Path(words[0]).is_dir():
        rest = " ".join(words[2:3])
        raise ValueError(
            f"the directory comes first: cache-inspect {words[1] if words[1:] else 'DIR'} "
            f"{words[0]} {rest}".rstrip()
        )
    if words[1:] and words[1] not in COMMANDS:
        raise ValueError(
            f"there is no command {words[1]!r}{did_you_mean(words[1], COMMANDS)}; "
            f"known: {', '.join(COMMANDS)}"
        )


def _explain() -> int:
    """Say what this is, to who typed its name alone."""
    out = console()
    out.print(
        "cache-inspect looks at Egeria's caches: directories that keep, per training sample, the "
        "output of\na model's frozen front, so that training need not compute it again.\n",
        soft_wrap=True,
    )
    for command, text in _COMMANDS:
        out.print(f"  cache-inspect {command}", markup=False, soft_wrap=True)
        out.print(f"      {text}", style="dim", soft_wrap=True)
    out.print("\ncache-inspect --help, and COMMAND --help, say more.")
    return HEALTHY


_COMMANDS = (
    ("plan MODEL --data DATA", "before training: where a cut would pay, and how much"),
    ("fill MODEL --data DATA --directory DIR", "store every sample ahead of training"),
    ("DIR", "what a cache holds, and its limit"),
    ("DIR watch", "what running trainings take from it, live"),
    ("DIR verify", "decode everything; exit status 1 on damage"),
    ("DIR show GEN", "one generation: contents, sizes, what it was made from"),
    ("DIR diff GEN GEN", "why one generation was not used for the other"),
    ("DIR pack GEN FILE, DIR unpack FILE", "copy a generation to another machine"),
    ("DIR prune, DIR clear", "remove what is not used; tell only, without --yes"),
)


# -- commands --------------------------------------------------------------------------------


def _list(options: argparse.Namespace, report: CacheReport) -> int:
    if options.json:
        print_json(_as_json(report))
    else:
        out = console()
        rows = [
            (
                Text(plain(one.name)),
                Text(plain(one.boundary or "-")),
                f"{one.num_samples:,}",
                size(one.bytes_on_disk),
                "-" if one.ratio is None else f"{one.ratio:.2f}",
                _state(one),
                age(one.created),
                "now" if one.in_use else age(one.last_used) + " ago",
            )
            for one in report.generations
        ]
        if rows:
            out.print(fitting(out, _LISTED, rows, drop=("age", "ratio", "codec", "used")))
        limit = report.limit_bytes
        of_limit = f" of {size(limit)} ({report.bytes_on_disk / limit:.0%})" if limit else ""
        count = len(rows)
        out.print(f"{count} generation{'s' * (count != 1)}, {size(report.bytes_on_disk)}{of_limit}")
        if report.directory.stat().st_mode & OTHERS_MAY_WRITE:
            out.print(
                "others may write to this directory, so that training refuses it: "
                f"chmod go-w {escape(plain(report.directory))}", soft_wrap=True,
            )  # fmt: skip
    return HEALTHY if report.healthy else DAMAGED


def _show(options: argparse.Namespace, report: CacheReport) -> int:
    one = find_generation(report, options.generation)
    path = report.directory / one.name
    manifest, inside = Manifest.read(path), contents(path, numbers_of=LENGTHS)
    drawn = [
        {"reuse": draws.reuse, "kept": draws.kept, "epochs": clock.tick}
        for draws, clock in schedules(report.directory, manifest.fields)
    ]
    if options.json:
        print_json(
            {
                **_generation_json(one),
                "fields": dict(manifest.fields),
                "contents": dataclasses.asdict(inside),
                "random_draws": drawn,
            }
        )
        return DAMAGED if "damaged" in inside.codecs else HEALTHY
    out = console()
    sizes = f"{size(one.bytes_on_disk)} on disk, {size(one.raw_bytes)} decoded"
    ratio = "" if one.ratio is None else f", ratio {one.ratio:.2f}"
    out.print(f"[bold]{escape(plain(one.name))}[/]  {one.num_samples:,} records, {sizes}{ratio}")
    out.print(f"created {age(one.created)} ago, in use: {'yes' if one.in_use else 'no'}")
    if one.lossy_error:
        out.print(f"lossy: relative error {one.lossy_error:.2e} (root mean square)")
    for title, pairs in (
        ("made from", {name: json.dumps(value) for name, value in manifest.fields.items()}),
        ("holds", inside.fields),
        ("codecs", {name: f"{count:,} records" for name, count in inside.codecs.items()}),
        ("draws", {str(one): f"{count:,} records" for one, count in inside.variants.items()}),
    ):
        out.print(f"[bold]{title}[/]")
        for name, text in pairs.items():
            out.print(f"  {plain(name)}: {plain(text):.100}", markup=False)
    for one_way in drawn:
        uses = "for ever" if one_way["reuse"] is None else f"for {one_way['reuse']} epochs each"
        out.print(f"  used {uses}; {one_way['epochs']:,} epochs were passed")
    for title, lines in (
        ("a sample, decoded", sample_words(inside)),
        ("lengths", length_words(inside)),
    ):
        if lines:
            out.print(f"[bold]{title}[/]")
        for line in lines:
            out.print(f"  {line}", markup=False, soft_wrap=True)
    out.print("[bold]sizes of records[/]")
    most = max((count for *_, count in inside.histogram), default=1)
    for low, high, count in inside.histogram:
        bar = "█" * math.ceil(min(40, max(8, out.width - 38)) * count / most)
        out.print(f"  {size(low):>9} - {size(high):>9}  {count:>10,}  {bar}")
    return DAMAGED if "damaged" in inside.codecs else HEALTHY


def _verify(options: argparse.Namespace, report: CacheReport) -> int:
    chosen = report.generations
    if options.generation is not None:
        chosen = (find_generation(report, options.generation),)
    damage, records = [], 0
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=options.json or not sys.stderr.isatty(),
    )
    with progress:
        for one in chosen:
            task = progress.add_task(one.name, total=one.num_samples)

            checked = 0

            def advance(done: int, total: int, task: Any = task) -> None:
                nonlocal checked
                checked = done  # of a live run, perhaps more than were there at first
                progress.update(task, completed=done, total=total)

            damage += list(verify(report.directory / one.name, advance))
            records += checked
    if options.json:
        found = [dataclasses.asdict(each) for each in damage]
        print_json({"healthy": not damage, "records": records, "damage": found})
    else:
        for each in damage:
            print(plain(f"{each.generation}: sample {each.sample}: {each.reason}"))
        verdict = f"{len(damage)} damaged" if damage else "all intact"
        where = f"{len(chosen)} generation{'s' * (len(chosen) != 1)}"
        print(f"{records:,} records in {where}: {verdict}")
    return DAMAGED if damage else HEALTHY


def _diff(options: argparse.Namespace, report: CacheReport) -> int:
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
    # As Text: in markup, "[true]" would be a style.
    rows = [
        (Text(plain(field)), *(Text(json.dumps(value)) for value in pair))
        for field, pair in differing.items()
    ]
    out = console()
    columns: dict[str, JustifyMethod] = dict.fromkeys(("field", *map(plain, names)), "left")
    out.print(fitting(out, columns, rows, drop=()))
    return HEALTHY


def _prune(options: argparse.Namespace, report: CacheReport) -> int:
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


def _watch(options: argparse.Namespace, report: CacheReport) -> int:
    return watch(report.directory, every_s=options.every, times=options.times, as_json=options.json)


def _clear(options: argparse.Namespace, report: CacheReport) -> int:
    return _remove(options, report, list(report.generations))


def _remove(
    options: argparse.Namespace, report: CacheReport, doomed: list[GenerationReport]
) -> int:
    """Remove the generations, or only list them; one that a live process uses always stays."""
    names = [one.name for one in doomed]
    outcome = remove_generations(report.directory, names, only_look=not options.yes)
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


def _at_least(least: float, what: str, kind: Callable[[str], float] = float) -> Any:
    """Return what reads a finite number from an argument."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {what} from {least:g} on")
        return number

    return read


# -- words -----------------------------------------------------------------------------------


def _as_json(report: CacheReport) -> dict[str, Any]:
    return {
        "directory": str(report.directory),
        "limit_bytes": report.limit_bytes,
        "bytes_on_disk": report.bytes_on_disk,
        "healthy": report.healthy,
        "generations": [_generation_json(one) for one in report.generations],
    }


def _generation_json(one: GenerationReport) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "ratio": one.ratio}


def _state(one: GenerationReport) -> Text:
    if one.damage:
        return Text(plain(f"damaged: {one.damage}"), "red")
    return Text(plain(one.note or one.codec or "-"))
