"""`cache-inspect`: what a cache directory holds, whether it is intact, and what may go.

Exit codes: 0 healthy, 1 damaged, 2 bad arguments. Reading commands never change the directory and
may look at a cache that a live run is writing.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from egeria_cache.errors import EgeriaError
from egeria_cache.inspect import report
from egeria_cache.inspect.report import BAD_ARGUMENTS, DAMAGED, HEALTHY, survey
from egeria_cache.inspect.words import plain
from egeria_cache.store import DamagedError
from egeria_cache.version import __version__

COMMANDS = ("ls", "show", "verify", "diff", "prune", "pack", "unpack")

GONE = {
    "clear": "prune --unused removes what no process uses",
    "fill": "the first epoch of the training stores all that it computes",
    "plan": "cache.report() tells in the training what a cache brings",
    "watch": "cache.stats() and cache.report() tell it in the training script",
}
"""Commands that were, and what does it now."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a path may hold bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if not arguments:
            _parser().print_help()
            return HEALTHY
        _check_order(arguments)
        options = _parser().parse_args(arguments)
        makes_directory = options.run is report.unpack
        survey_ = () if makes_directory else (survey(options.directory),)
        code: int = options.run(options, *survey_)
        return code
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return HEALTHY
    except SystemExit as stop:  # argparse has printed help (0) or the mistake (2)
        return int(stop.code or 0)
    except (DamagedError, RecursionError) as error:
        print(f"cache-inspect: {plain(error)}", file=sys.stderr)
        return DAMAGED
    except (EgeriaError, ValueError, OSError) as error:
        print(f"cache-inspect: {plain(error)}", file=sys.stderr)
        return BAD_ARGUMENTS


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
    parser.set_defaults(run=report.ls)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        # SUPPRESS: without it the subcommand's default would overwrite a --json given before it.
        sub.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
        )
        sub.set_defaults(run=run)
        return sub

    command("ls", report.ls, "list the generations (the default)")
    show = command("show", report.show, "one generation: contents, sizes, what it was made from")
    show.add_argument("generation", metavar="GEN")
    check = command("verify", report.verify_all, "decode every record; exit 1 if one is damaged")
    check.add_argument("generation", metavar="GEN", nargs="?")
    diff = command("diff", report.diff, "which fields of two generations differ")
    diff.add_argument("generation", metavar="GEN")
    diff.add_argument("other", metavar="GEN")
    prune = command("prune", report.prune, "remove unused ones; only shows them without --yes")
    prune.add_argument("--older-than", metavar="DAYS", type=_days, help="last used before then")
    prune.add_argument("--to-size", metavar="SIZE", help="oldest use first, until it fits ('50GB')")
    prune.add_argument("--unused", action="store_true", help="all that no live process holds")
    prune.add_argument(
        "--damaged", action="store_true", help="those set aside, or known to be damaged"
    )
    prune.add_argument("--yes", action="store_true", help="remove them")
    packing = command("pack", report.pack, "write one generation to one file, for another machine")
    packing.add_argument("generation", metavar="GEN")
    packing.add_argument("file", metavar="FILE", help="'-' for standard output")
    unpacking = command("unpack", report.unpack, "store a packed generation")
    unpacking.add_argument("file", metavar="FILE", help="'-' for standard input")
    unpacking.add_argument("--limit", metavar="SIZE", default="100GB", help="default 100GB")
    unpacking.add_argument(
        "--force-network", action="store_true", help="DIR may lie on a network filesystem"
    )
    return parser


def _check_order(arguments: Sequence[str]) -> None:
    """Say where a word is out of place.

    Raises:
        ValueError: The directory does not come first, or there is a command no more.
    """
    words = [one for one in arguments if not one.startswith("-")]
    if (gone := next((one for one in words[:2] if one in GONE), "")) and not Path(gone).is_dir():
        raise ValueError(f"{gone} is gone: {GONE[gone]}")
    if words and words[0] in COMMANDS and not Path(words[0]).is_dir():
        rest = " ".join(words[2:3])
        raise ValueError(
            f"the directory comes first: cache-inspect {words[1] if words[1:] else 'DIR'} "
            f"{words[0]} {rest}".rstrip()
        )


def _days(text: str) -> float:
    """Read a finite number, at least nought."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number
