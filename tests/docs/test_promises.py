"""tests/README.md says which promise is held where: in files that are there, with none left out."""

from __future__ import annotations

import re

from tests.docs.found import ROOT

README = (ROOT / "tests" / "README.md").read_text()
CORRECTNESS = (ROOT / "docs" / "correctness.md").read_text()


def rows(text, heading):
    """Return the rows of the tables under a heading, as lists of cells."""
    part = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    lines = [line for line in part[1].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells[1:] if not set(row[0]) <= {"-"}]


def test_the_files_that_it_names_are_there():
    named = re.findall(r"`([\w/]+\.py)`", README)
    assert len(named) > 100
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


def test_every_row_of_the_document_has_its_own():
    for heading in ("What the prefix is, and how it is watched", "Modes"):
        told = [row[0] for row in rows(CORRECTNESS, heading)]
        held = [row[0] for row in rows(README, heading)]
        assert len(told) == len(held) > 10
        assert all(full.startswith(short) for full, short in zip(told, held, strict=True))


def test_every_room_and_every_hostile_file_is_told_of():
    rooms = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")}
    assert [room.name for room in rooms if f"`{room.name}/" not in README] == []
    hostile = {f"hostile/{path.name}" for path in (ROOT / "tests/hostile").glob("test_*.py")}
    assert [name for name in hostile if name not in README] == []


def test_what_is_run_by_default_is_not_all_marked_long():
    for heading in re.findall(r"^### (.*)$", README, re.M):
        for what, files, mode in rows(README, heading):
            texts = [
                (ROOT / "tests" / name).read_text() for name in re.findall(r"`([\w/]+\.py)`", files)
            ]
            tests = [
                block
                for text in texts
                for block in re.split(r"\n\n\n+", text)
                if re.search(r"^ *def test_|^Test\w+ = |^@hostile", block, re.M)
            ]
            if mode == "default":
                assert any("@pytest.mark.long" not in block for block in tests), what
