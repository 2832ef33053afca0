"""Render the committed results.

    python -m benchmarks.report [--check] [--output runs/report.html]

Writes the page, README's five figures and docs/results.md; --check writes nothing, and returns 1
where one of the two is not what the files say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .highlights import highlights
from .page import render
from .readme import block, replaced
from .sections import read_reports, read_sections

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the blocks in both documents, or check the latter."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "report.html")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results.md")
    options = parser.parse_args(argv)
    sections, reports = read_sections(options.results), read_reports(options.results)
    texts = {
        options.readme: replaced(options.readme, highlights(reports)),
        options.document: replaced(options.document, block(sections)),
    }
    stale = [path for path, text in texts.items() if path.read_text() != text]
    if options.check:
        for path in stale:
            print(f"{path} is not what the results say; run make report", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(texts[path])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(render(sections, options.results))
    changed = ", ".join(map(str, stale)) or "nothing else had changed"
    print(f"{options.output}; {changed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
