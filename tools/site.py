"""What MkDocs asks while it builds the site: files that lie outside docs/ come along."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PICTURES = "../benchmarks/results/"


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures of the results, and the page that `make report` makes of them."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.report.page import render
    from benchmarks.report.sections import read_sections

    results = ROOT / "benchmarks" / "results"
    for picture in results.glob("*.png"):
        name = f"pictures/{picture.name}"
        files.append(File.generated(config, name, content=picture.read_bytes()))
    page = render(read_sections(results), results)
    files.append(File.generated(config, "report.html", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have pictures found where the site has them."""
    return markdown.replace(PICTURES, "pictures/")
