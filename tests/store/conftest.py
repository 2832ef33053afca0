from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from egeria_cache.store.native import SWITCH, Kernel, kernel
from egeria_cache.store.store import ActivationStore


@pytest.fixture
def store(directory: Path) -> Iterator[ActivationStore]:
    with ActivationStore(directory, limit="1GB") as opened:
        yield opened


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small batches be decoded by several threads."""
    monkeypatch.setattr("egeria_cache.store.decoders.num_parts", lambda work_s, more_s, most: most)
    monkeypatch.setattr("egeria_cache.store.helpers.WORTH_NS", 0)
    monkeypatch.setattr("egeria_cache.store.helpers.WORTH_BYTES", 0)


@pytest.fixture(autouse=True, params=["", pytest.param("python", marks=pytest.mark.long)])
def way_to_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every test with the kernel, and in the long mode without it, too."""
    if request.param:
        monkeypatch.setenv(SWITCH, "0")
        kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.fixture
def compiled(way_to_read: None) -> Kernel:
    """The kernel; without one the test is skipped."""
    found = kernel()
    if found is None:
        pytest.skip("no kernel here, or left aside")
    return found
