"""The reference on the site has every public name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
