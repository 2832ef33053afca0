"""The document's table of ordinary programs is what the corpus says."""

from __future__ import annotations

from pathlib import Path

from tests.ordinary.corpus import table


def test_the_table_of_programs_is_that_of_the_corpus():
    text = Path(__file__).parents[2].joinpath("docs", "ordinary.md").read_text()
    found = "".join(line for line in text.splitlines(keepends=True) if line.startswith("|"))
    assert found == table()
