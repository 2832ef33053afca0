"""`python -m egeria_cache` says what a bug report needs."""

from __future__ import annotations

import pytest
import torch

from egeria_cache.__main__ import NEEDED, OPTIONAL, main


def test_versions_and_what_is_at_hand(capsys):
    assert main() == 0
    text = capsys.readouterr().out
    for name in (*NEEDED, *OPTIONAL):
        assert f"  {name}" in text
    assert torch.__version__ in text
    assert "not installed" not in text.partition("optional:")[0]


def test_needed_are_the_dependencies_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {one.partition(">")[0] for one in project["dependencies"]} == set(NEEDED)
