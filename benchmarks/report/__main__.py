"""Render the committed results.

    python -m benchmarks.report [--check] [--output runs/report.html]

Writes the page, and README's block of results; --check writes nothing, and returns 1 where README
is not what the files say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .page import render
from .readme import block, replaced
from .sections import read_sections

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and README's block, or check the latter."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="compare README, write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "report.html")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args(argv)
    sections = read_sections(options.results)
    readme = replaced(options.readme, block(sections))
    same = readme == options.readme.read_text()
    if options.check:
        if not same:
            print(f"{options.readme} is not what the results say; run make report", file=sys.stderr)
        return int(not same)
    if not same:
        options.readme.write_text(readme)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(render(sections, options.results))
    print(f"{options.output}; {options.readme} {'was' if same else 'is now'} up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
