"""README says what the results' files say, and the page shows all of them."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.report.__main__ import main
from benchmarks.report.highlights import highlights
from benchmarks.report.page import render
from benchmarks.report.sections import KNOWN, read_reports, read_sections

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_documents_are_what_the_results_say(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_readme_has_five_figures_each_with_its_command():
    rows = highlights(read_reports(RESULTS)).strip().splitlines()[2:]
    assert len(rows) == 5
    assert all(re.fullmatch(r"\| .+ \| .*\d.* \| `python -m benchmarks\..+` \|", r) for r in rows)


def test_every_known_file_is_shown_by_its_own_section():
    for section in read_sections(RESULTS):
        if section.name not in KNOWN:
            continue
        assert section.tables, section.name
        assert not any("another form" in finding for finding in section.findings), section.name
        for table in section.tables:
            assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what refers to elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.references = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "link", "br", "source"):
            self.open.append(tag)
        self.references += [value for key, value in attrs if key in ("src", "srcset", "href")]
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_refers_to_nothing_else():
    sections = read_sections(RESULTS)
    text = render(sections, RESULTS)
    page = Page()
    page.feed(text)
    assert page.open == []
    anchors = {f"#{section.name}" for section in sections}
    assert anchors <= set(page.references)
    kinds = "#", "data:image/png;base64,", "data:image/svg+xml;base64,"
    assert all(r.startswith(kinds) for r in page.references)
    images = [r for r in page.references if r.startswith(kinds[1])]
    assert len(images) == len(list(RESULTS.glob("*.png")))
    drawn = [r for r in page.references if r.startswith(kinds[2])]
    assert len(drawn) == len(set(drawn)) == 6  # three pictures, light and dark
    for one in drawn:
        svg = base64.b64decode(one.partition(",")[2]).decode()
        assert not re.search(r"<script|href=\"http(?!://www.w3)", svg)
    assert "url(" not in text
    assert "@import" not in text
