"""Links between the documents lead somewhere, and the index knows every document."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from egeria_cache.__main__ import NEEDED, OPTIONAL, main
from tests.docs.found import ROOT
from tests.docs.mistakes import DOCUMENT, document

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def anchors(path):
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        place, _, anchor = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        assert file.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{path.name}: {target}"


def test_the_index_knows_every_document():
    index = (ROOT / "docs" / "README.md").read_text()
    known = set(re.findall(r"\]\((\w+\.md)", index))
    assert known == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


# tests/README.md says which promise is held where: in files that are there, with none left out.

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


# The reference on the site has every public name.

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("package", ["egeria_cache", "egeria_core"])
def test_every_public_name_is_there(package):
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    told = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    whole = package in told
    for name in {*importlib.import_module(package).__all__} - {"__version__"}:
        assert whole or f"{package}.{name}" in told, name
    for one in told:
        module, _, name = one.rpartition(".")
        assert one.count(".") == 0 or hasattr(importlib.import_module(module), name), one


# docs/troubleshooting.md shows what the program says: each mistake is made here.


@pytest.fixture(scope="module")
def page():
    return document()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_is_what_is_said(page):
    assert DOCUMENT.read_text() == page, "run python -m tests.docs.mistakes"


# `python -m egeria_cache` says what a bug report needs.


def test_versions_and_what_is_at_hand(capsys):
    assert main() == 0
    text = capsys.readouterr().out
    for name in (*NEEDED, *OPTIONAL):
        assert f"  {name}" in text
    assert torch.__version__.partition("+")[0] in text
    assert "not installed" not in text.partition("optional:")[0]


def test_needed_are_the_dependencies_of_the_package():
    tomllib = pytest.importorskip("tomllib")

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {one.partition(">")[0] for one in project["dependencies"]} == set(NEEDED)
