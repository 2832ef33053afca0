from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from egeria_cache.attempt import is_ours
from egeria_cache.errors import EgeriaError

# One thread for each process, and for those that it starts: the tests are many and small, and
# threads that wait for each other on a busy machine make them ten times slower. A child that is
# forked would wait for ever for those of its parent, whatever the shell says of their number.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Tests train for a few batches, and are to see them served all the same.
os.environ.setdefault("EGERIA_POSTPONE", "0")

# From Python 3.14 on workers are no longer forked, and have to be sent what tests make on the spot.
multiprocessing.set_start_method("fork")

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("egeria", deadline=None)
hypothesis.settings.load_profile("egeria")

# A shell starts what runs in the background, or under nohup, with Ctrl-C ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Whatever the test before has set."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _modes_go_without_saying(request: pytest.FixtureRequest) -> Iterator[None]:
    """What inference mode of a front changes is told to users, and by tests that ask for it."""
    logger = logging.getLogger("egeria.modes")
    logger.disabled = request.node.get_closest_marker("modes") is None
    yield
    logger.disabled = False


@pytest.fixture(autouse=True)
def _nothing_fails_unseen(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """An error of our own beside the loop costs no training anything; a test fails by it."""
    from egeria_cache.cache.engine_callbacks import EngineCallbacks

    found: list[Exception] = []
    failed = EngineCallbacks.failed, EngineCallbacks.failed_for

    def note(error: Exception) -> None:
        if is_ours(error) and not isinstance(error, EgeriaError):
            found.append(error)

    monkeypatch.setattr(
        EngineCallbacks, "failed", lambda h, e, b=None: (note(e), failed[0](h, e, b))
    )
    monkeypatch.setattr(
        EngineCallbacks, "failed_for", lambda h, n, e: (note(e), failed[1](h, n, e))
    )
    yield
    if found and "test_beside" not in request.node.nodeid:
        raise found[0]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["rows with the batch", "rows with the batch, read by training", "ring"])
def way_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on the CPU, with readers and without, and with the ring of other devices."""
    monkeypatch.setattr("egeria_cache.prefetch.View.has_ring", request.param == "ring")
    most = 1 << 40 if request.param.endswith("training") else -1
    monkeypatch.setattr("egeria_cache.prefetch.prefetcher.SHORT_BYTES", most)


NUM_CASES = 2
"""So many cases of a test with parameters are run by default, spread over all of them."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, lie evenly between 0 and 1, however many they are."""
STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("egeria", "what is run of a suite that takes long")
    group.addoption(
        "--cases", type=int, default=NUM_CASES,
        help="of each test with parameters, run so many cases by default (%(default)s)",
    )  # fmt: skip
    group.addoption(
        "--turn", type=int, metavar="N",
        help="begin elsewhere for each N; in a few turns that are cut short all has been run",
    )  # fmt: skip
    group.addoption("--minutes", type=float, help="begin no test after so long; that is no failure")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        for item in _left_to_the_long_mode(same, config.option.cases):
            item.add_marker(pytest.mark.long)
    is_named = any("::" in argument for argument in config.args)
    if "long" not in config.option.markexpr and not is_named:
        os.environ["EGERIA_FEW_WAYS"] = "1"
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if config.option.turn is not None:
        first = int(config.option.turn * GOLDEN % 1 * len(items))
        items[:] = items[first:] + items[:first]


def _left_to_the_long_mode(items: list[pytest.Item], number: int) -> list[pytest.Item]:
    """Return the cases of one test that are not run by default."""
    quick = [item for item in items if not item.get_closest_marker("long")]
    marker = items[0].get_closest_marker("cases")
    number = marker.args[0] if marker else number
    kept = {id(quick[i * len(quick) // number]) for i in range(number)} if quick else set()
    return [item for item in quick if id(item) not in kept]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip("no time is left for it")
