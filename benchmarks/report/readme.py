"""The results in README and docs/results.md: blocks between two markers."""

from __future__ import annotations

from pathlib import Path

from .parts import Section, Table
from .words import command_of, where

__all__ = ["BEGIN", "END", "block", "replaced"]

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
MOST_FINDINGS = 3
"""But what was missed is always shown."""


def block(sections: list[Section]) -> str:
    """Return what docs/results.md has between the markers, ends of lines included."""
    names = {section.name for section in sections}
    shown = [
        # The models at real size say more than the small ones, once they have been measured.
        section for section in sections
        if section.short and not (section.name == "skip" and "forward_skip" in names)
    ]  # fmt: skip
    texts = [_section(section) for section in shown]
    return "\n" + "\n".join(texts) + "\n"


def _section(section: Section) -> str:
    lines = [f"### {section.title}", "", section.about, ""]
    for table in section.tables:
        if table.short:
            lines += [f"{table.title}:", ""] if table.title else []
            lines += [*_markdown(table), ""]
    for number, finding in enumerate(section.findings):
        if number < MOST_FINDINGS or "**missed**" in finding:
            lines.append(f"- {finding}")
    if section.findings:
        lines.append("")
    command = command_of(section.name, section.environment)
    lines += [f"`{command}`: {where(section.environment)}.", ""]
    return "\n".join(lines)


def _markdown(table: Table) -> list[str]:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def replaced(readme: Path, text: str) -> str:
    """Return a document with the block put in.

    Raises:
        ValueError: A marker is missing, or there are several.
    """
    old = readme.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{readme} must have {BEGIN} and {END}, each once and in this order")
    head, _, rest = old.partition(BEGIN)
    return head + BEGIN + "\n" + text + END + rest.partition(END)[2]
