from __future__ import annotations

import pytest


@pytest.fixture(params=["rows with the batch", "ring"])
def way_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on the CPU, and with the ring that other devices have."""
    monkeypatch.setattr(
        "egeria_cache.prefetch.prefetcher.needs_ring", lambda device: request.param == "ring"
    )
