"""What README.md and docs/*.md show: blocks of code, and commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "diff", "bash", "text"}
PROGRAMS = ("make", "pip", "python", "cache-inspect", "torchrun", "torchx", "sbatch")
FENCED = r"^```(?P<language>\w*)\n(?P<text>.*?)^```$"


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    file: str
    heading: str
    number: int
    """Counted under the heading, among blocks that are code alike, or alike are not."""
    language: str
    text: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What surroundings are given for."""
        return self.file, self.heading, self.number

    @property
    def is_code(self) -> bool:
        """Whether it is Python, as it stands or as a change."""
        return self.language in ("python", "diff")


def blocks() -> list[Block]:
    """Return all blocks of all documents."""
    found: list[Block] = []
    for path in DOCUMENTS:
        name, heading = str(path.relative_to(ROOT)), ""
        pattern = rf"^## (?P<heading>[^\n]*)$|{FENCED}"
        for one in re.finditer(pattern, path.read_text(), re.MULTILINE | re.DOTALL):
            if one["heading"]:
                heading = one["heading"]
                continue
            block = Block(name, heading, 0, one["language"], one["text"])
            number = sum(
                (other.file, other.heading, other.is_code) == (name, heading, block.is_code)
                for other in found
            )
            found.append(Block(name, heading, number, block.language, block.text))
    return found


def sides(block: Block) -> tuple[str, str]:
    """Return a block before and after the change that it shows."""
    if block.language == "python":
        return "", block.text
    lines = block.text.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    return "\n".join(before), "\n".join(line[1:] for line in lines if not line.startswith("-"))


def commands() -> dict[str, str]:
    """Return each command that the documents show, with the file that shows it first."""
    found: dict[str, str] = {}
    for block in blocks():
        if block.language == "bash":
            for line in block.text.splitlines():
                found.setdefault(_bare(line), block.file)
    for path in DOCUMENTS:
        prose = re.sub(FENCED, "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for paragraph in prose.split("\n\n"):
            for span in re.findall(r"`([^`]+)`", paragraph):
                if _is_command(_bare(span)):
                    found.setdefault(_bare(span), str(path.relative_to(ROOT)))
    return {command: file for command, file in found.items() if command}


def _bare(line: str) -> str:
    """Return a line without its comment, its prompt, and the blanks that only line things up."""
    line = re.sub(r"\s+#.*$", "", line.strip())
    return re.sub(r"\s+", " ", line.removeprefix("$ "))


def _is_command(span: str) -> bool:
    words = [word for word in span.split() if not re.match(r"[A-Z_]+=", word)]
    return len(words) > 1 and words[0] in PROGRAMS
