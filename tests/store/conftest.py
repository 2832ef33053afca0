from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from egeria_cache.store.store import ActivationStore


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(directory: Path) -> Iterator[ActivationStore]:
    with ActivationStore(directory, limit="1GB") as opened:
        yield opened


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long mode: run with -m long"))


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small batches be decoded by several threads."""
    monkeypatch.setattr("egeria_cache.store.reader.MIN_BYTES_PER_THREAD", 1)
