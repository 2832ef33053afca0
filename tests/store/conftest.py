from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from egeria_cache.store import ActivationStore


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(directory: Path) -> Iterator[ActivationStore]:
    with ActivationStore(directory, limit="1GB") as opened:
        yield opened
