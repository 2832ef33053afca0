"""The threads that help serving: the same rows as without, whoever reads, comes, or goes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from egeria_cache.store import ActivationStore, helpers
from egeria_cache.store.native import Pace

FLUSH_S = 30
NUM = 96
pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(NUM, 500).relu_()


@pytest.fixture(params=["raw", "zstd", "split+zstd", "bitmap+split"])
def store(
    directory: Path, rows: Tensor, request: pytest.FixtureRequest
) -> Iterator[ActivationStore]:
    with ActivationStore(directory, codec=request.param, num_threads=4) as opened:
        opened.put_batch(range(NUM), rows)
        assert opened.flush(FLUSH_S)
        yield opened


def helping() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "egeria-help"]


def pace_of(store: ActivationStore) -> Pace:
    (pace,) = store._reader._helpers._paces.values()
    return pace


def test_rows_are_right_whatever_is_asked_for(store, rows):
    generator = np.random.default_rng(0)
    for number in range(300):
        ids = generator.integers(0, NUM + 8, size=number)
        found, hit = store.get_batch(ids)
        assert (hit == (ids < NUM)).all()
        if hit.any():
            assert torch.equal(found[torch.from_numpy(hit)], rows[ids[hit]])
    assert len(helping()) == 3
    assert pace_of(store).num_helped > 0


def test_many_read_at_once_and_one_of_them_is_helped(store, rows):
    def read(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(200):
            ids = generator.permutation(NUM)[: generator.integers(1, NUM)]
            found, hit = store.get_batch(ids)
            assert hit.all()
            assert torch.equal(found, rows[ids])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(read, seed) for seed in range(4)]:
            future.result()
    assert pace_of(store).num_helped > 0


def test_they_leave_when_the_store_is_closed_while_others_read(store, rows):
    assert store.get_batch(range(NUM))[1].all()
    begun, seen = threading.Event(), []

    def read() -> None:
        while store._own().alive:
            found, hit = store.get_batch(range(NUM))
            if hit.all():
                seen.append(torch.equal(found, rows))
                begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(FLUSH_S)
    store.close()
    reading.join(FLUSH_S)
    assert not reading.is_alive()
    assert all(seen)
    assert not helping()


def test_where_the_system_has_no_threads_a_batch_is_read_without_them(store, rows, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):
        found, hit = store.get_batch(range(NUM))
        assert hit.all()
        assert torch.equal(found, rows)


@pytest.mark.parametrize("moment", ["begin_helpers", "start"])
def test_a_store_that_is_closed_while_they_are_started_leaves_none(
    store, compiled, monkeypatch, moment
):
    """By a signal handler, say, or by the collector."""
    of = compiled if moment == "begin_helpers" else threading.Thread
    original, closed = getattr(of, moment), []

    def closing(*arguments: Any) -> None:
        if not closed:
            closed.append(moment)
            store._reader.close()
        original(*arguments)

    monkeypatch.setattr(of, moment, closing)
    store.get_batch(range(NUM))
    assert closed
    for thread in helping():
        thread.join(FLUSH_S)
    assert not helping()
    assert store._reader._helpers.address is None


def test_one_of_them_may_close_the_store(store, monkeypatch):
    """The collector may run in it."""
    begun, closed, help_on = threading.Event(), [], helpers._help

    def close_and_help(*arguments: Any) -> None:
        assert begun.wait(FLUSH_S)
        if not closed:
            closed.append(True)
            store._reader.close()
            closed.append(False)
        help_on(*arguments)

    monkeypatch.setattr(helpers, "_help", close_and_help)
    store.get_batch(range(NUM))
    threads = helping()
    begun.set()
    for thread in threads:
        thread.join(FLUSH_S)
    assert closed == [True, False]
    assert not helping()


def test_a_forked_child_leaves_them_alone(store, monkeypatch):
    assert store.get_batch(range(NUM))[1].all()
    own, process = store._reader._helpers, os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    own.close()
    monkeypatch.undo()
    assert len(helping()) == 3
    assert own.address is not None


def test_whatever_was_noted_of_their_pace_rows_are_right(store, rows):
    assert store.get_batch(range(NUM))[1].all()
    for record_ns in (-(2**40), -8000, -4000, -1, 0, 1, 2**40):
        pace_of(store).record_ns = record_ns
        found, hit = store.get_batch(range(NUM))
        assert hit.all()
        assert torch.equal(found, rows)


@pytest.mark.parametrize("store", ["raw"], indirect=True)
def test_they_do_not_come_for_what_takes_less_than_to_call_them(store, monkeypatch):
    monkeypatch.setattr("egeria_cache.store.helpers.WORTH_BYTES", 2 * NUM * 500 * 4)
    for _ in range(3):
        assert store.get_batch(range(NUM))[1].all()
    assert not helping()
    assert 0 < pace_of(store).record_ns < 10**9


@pytest.mark.parametrize("store", ["raw"], indirect=True)
def test_where_they_are_of_no_help_they_are_asked_less_and_less(store, monkeypatch):
    monkeypatch.setattr("egeria_cache.store.helpers.WORTH_NS", 1)
    store.get_batch(range(NUM))
    pace, asked = pace_of(store), []
    for number in range(400):
        pace.record_ns = 1  # nothing is as fast as this
        before = pace.patience
        assert store.get_batch(range(NUM))[1].all()
        if pace.patience != before or pace.alone == pace.patience == 64:
            asked.append(number)
    assert pace.patience == 64
    assert [*np.diff(asked)] == [2, 3, 5, 9, 17, 33, 65, 65, 65, 65, 65]


@pytest.mark.parametrize("store", ["raw"], indirect=True)
def test_where_they_help_they_are_asked_but_for_every_sixteenth_batch(store, monkeypatch):
    monkeypatch.setattr("egeria_cache.store.helpers.WORTH_NS", 1)
    store.get_batch(range(NUM))
    pace, alone = pace_of(store), []
    pace.patience = 8
    for number in range(100):
        pace.record_ns = 10**9  # whatever it takes is less
        assert store.get_batch(range(NUM))[1].all()
        assert pace.patience == 0
        if pace.record_ns != 10**9:
            alone.append(number)
    assert {*np.diff(alone)} == {18}


ENDS = """
import sys, torch
from egeria_cache.store import ActivationStore, helpers
helpers.WORTH_NS = helpers.WORTH_BYTES = 0
store = ActivationStore(sys.argv[1])
store.put_batch(range(64), torch.randn(64, 1000))
assert store.flush(60)
for _ in range(3):
    assert store.get_batch(range(64))[1].all()
print("done")
"""


def test_an_interpreter_that_ends_does_not_wait_for_them(directory):
    ran = subprocess.run(
        [sys.executable, "-c", ENDS, str(directory)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
