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


SLOW = (
    ("test_other_ways_to_start_workers_are_served_the_same", "ring"),
    ("test_a_dead_or_stuck_worker_gives_dataloaders_own_error", "ring"),
    ("test_a_generation_cleared_by_the_inspector_while_a_loader_runs_is_left_alone", "ring"),
    ("test_a_stopped_run_goes_on_to_the_same_losses", "segmentation"),
)
"""(test, parameter) whose like is tested by default, and which takes long."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.name.startswith(test) and part in item.name for test, part in SLOW):
            item.add_marker(pytest.mark.long)
    if "long" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long mode: run with -m long"))
