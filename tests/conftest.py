from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

# One thread for each process, and for those that it starts: the tests are many and small, and
# threads that wait for each other on a busy machine make them ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests train for a few batches, and are to see them served all the same.
os.environ.setdefault("EGERIA_POSTPONE", "0")

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("egeria", deadline=None)
hypothesis.settings.load_profile("egeria")

# A shell starts what runs in the background, or under nohup, with Ctrl-C ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=["rows with the batch", "rows with the batch, read by training", "ring"])
def way_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on the CPU, with readers and without, and with the ring of other devices."""
    monkeypatch.setattr(
        "egeria_cache.prefetch.prefetcher.needs_ring", lambda device: request.param == "ring"
    )
    if request.param.endswith("training"):
        always = property(lambda crew: True, lambda crew, value: None)
        monkeypatch.setattr("egeria_cache.prefetch.Crew.is_spared", always, raising=False)


NUM_CASES = 2
"""So many cases of a test with parameters are run by default, spread over all of them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        for item in _left_to_the_long_mode(same):
            item.add_marker(pytest.mark.long)
    if "long" in config.option.markexpr or any("[" in argument for argument in config.args):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long mode: run with -m long"))


def _left_to_the_long_mode(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that are not run by default."""
    quick = [item for item in items if not item.get_closest_marker("long")]
    marker = items[0].get_closest_marker("cases")
    number = marker.args[0] if marker else NUM_CASES
    kept = {id(quick[i * len(quick) // number]) for i in range(number)} if quick else set()
    return [item for item in quick if id(item) not in kept]
