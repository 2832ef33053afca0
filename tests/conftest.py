from __future__ import annotations

import os
from pathlib import Path

import pytest

# One thread for each process, and for those that it starts: the tests are many and small, and
# threads that wait for each other on a busy machine make them ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=["rows with the batch", "ring"])
def way_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on the CPU, and with the ring that other devices have."""
    monkeypatch.setattr(
        "egeria_cache.prefetch.prefetcher.needs_ring", lambda device: request.param == "ring"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long mode: run with -m long"))
