"""All results as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup, escape

from .parts import Section
from .pictures import pictures
from .sections import read_reports
from .words import command_of, where

__all__ = ["render"]

NUMBER = re.compile(r"^[-+]?[\d.,]+\s*(x|%|s|ms|us|[kMGT]?B)?\b")


def render(sections: list[Section], results: Path) -> str:
    """Return the page; it opens with `pictures`, and each section has the PNG files beside its
    JSON file folded away.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["rich"] = _rich
    environment.tests["figure"] = lambda text: bool(NUMBER.match(text)) or text == "-"
    environment.globals["missed"] = _missed
    template = environment.from_string((Path(__file__).parent / "page.html").read_text())
    return template.render(
        pictures=[
            {
                "name": one.name,
                "sentence": one.sentence,
                "light": _image(one.light),
                "dark": _image(one.dark),
            }
            for one in pictures(read_reports(results))
        ],
        sections=[
            {
                "section": section,
                "plots": _plots(section.name, [s.name for s in sections], results),
                "command": command_of(section.name, section.environment),
                "where": where(section.environment),
            }
            for section in sections
        ],
    )


def _missed(findings: list[str]) -> str:
    """Say how many targets were missed, where the findings are folded away."""
    count = sum("**missed**" in finding for finding in findings)
    return f", {count} missed target{'s' * (count > 1)}" if count else ""


def _image(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _rich(text: str) -> Markup:
    """Return text as HTML, with **marks** kept as such."""
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(text))))


def _plots(name: str, names: list[str], results: Path) -> list[tuple[str, str]]:
    """Return (file name, data URL) of the plots whose name begins with that of the file.

    A plot belongs to the longest name that fits: store_codecs.png is not store's if there is a
    store_codecs.json.
    """
    found = []
    for path in sorted(results.glob("*.png")):
        owners = [n for n in names if path.stem == n or path.stem.startswith(f"{n}_")]
        if owners and max(owners, key=len) == name:
            data = base64.b64encode(path.read_bytes()).decode()
            found.append((path.name, f"data:image/png;base64,{data}"))
    return found
