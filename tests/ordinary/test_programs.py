"""Each program of the corpus has the losses of its plain run, its hits, and no false word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.scripts import run_file
from tests.ordinary.corpus import CORPUS, Program, run, table


def marked(program: Program):
    marks = [] if program.default else [pytest.mark.long]
    return pytest.param(program, marks=marks, id=program.name)


@pytest.mark.modes
@pytest.mark.cases(sum(program.default for program in CORPUS))
@pytest.mark.parametrize("program", [marked(program) for program in CORPUS])
def test_an_ordinary_program_trains_as_before_and_is_served(program, tmp_path):
    if program.missing:
        pytest.skip(f"needs {program.missing}")
    result = run(program, tmp_path)
    for ran in (*result.plain, *result.cached):
        assert ran.error is None, repr(ran.error)
    if not program.draws:
        assert result.difference <= program.rtol
    assert len(result.plain[0].losses) > 1
    assert result.hits >= program.expected, result.figures
    of_modes = [text for text in result.told if "runs in inference mode" in text]
    assert len(of_modes) == (len(result.cached) if program.modes else 0), of_modes
    told = [
        text
        for text in result.told
        if text not in of_modes and not (program.told and re.search(program.told, text))
    ]
    assert (told, result.warned) == ([], [])


def test_the_documents_table_of_programs_is_that_of_the_corpus():
    text = Path(__file__).parents[2].joinpath("docs", "ordinary.md").read_text()
    found = "".join(line for line in text.splitlines(keepends=True) if line.startswith("|"))
    assert found == table()


def test_a_program_that_fails_says_so(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("print('before')\nraise ValueError('mine')\n")
    ran = run_file(path)
    assert str(ran.error) == "mine"
    assert ran.output == "before\n"
