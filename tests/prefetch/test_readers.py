"""Reader threads: none where reads are short, and work done in order."""

import itertools
import threading

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from egeria_cache.prefetch.prefetcher import ReaderThreads
from egeria_cache.store import NotInMemoryError


@pytest.fixture
def readers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    made = ReaderThreads()
    yield made
    made.close()


def told(readers, *, read_s, batches, may_be_none=True):
    """Return, after each of so many batches, whether training is to read them itself."""
    found = []
    for number in range(batches):
        now_s = read_s(number, readers.is_spared) if callable(read_s) else read_s
        readers.served(now_s, may_be_none=may_be_none)
        found.append(readers.is_spared)
    return found


@pytest.mark.parametrize(
    ("read_s", "may_be_none", "spared"),
    [(2e-3, True, {False}), (3e-4, True, {True}), (3e-4, False, {False})],
)
def test_short_reads_are_left_to_training_where_it_can(readers, read_s, may_be_none, spared):
    found = told(readers, read_s=read_s, batches=200, may_be_none=may_be_none)
    assert set(found[100:]) == spared


def test_reads_that_became_long_go_back_to_a_reader_at_once_and_are_tried_ever_more_rarely(readers):
    # Short beside training, and not brief enough where training waits for it.
    found = told(readers, read_s=9e-4, batches=2000)
    at = [i for i, is_spared in enumerate(found) if is_spared]
    alone = [one for one in at if one - 1 not in at]
    assert len(at) <= 4 * len(alone)
    between = [later - one for one, later in itertools.pairwise(alone)]
    assert len(between) >= 3
    assert between == sorted(between)
    assert between[-1] > 2 * between[0]


def test_one_read_in_many_that_takes_long_changes_nothing(readers):
    slow_now_and_then = told(
        readers, read_s=lambda n, _: 5e-3 if n % 50 == 9 else 2e-4, batches=5000
    )
    assert set(slow_now_and_then[100:]) == {True}
    assert told(readers, read_s=5e-3, batches=9)[-1] is False


def test_a_device_that_runs_late_always_has_a_reader(readers):
    assert told(readers, read_s=1e-4, batches=100)[-1] is True
    assert told(readers, read_s=1e-4, batches=1, may_be_none=False) == [False]


class Busy:
    """Work that stays under way until it is let go, and says how much is at a time."""

    def __init__(self):
        self.let_go, self.began = threading.Event(), threading.Semaphore(0)

    def __call__(self):
        self.began.release()
        assert self.let_go.wait(30)
        return threading.get_ident()

    def num_under_way(self, at_least):
        for _ in range(at_least):
            assert self.began.acquire(timeout=30)
        return at_least + self.began.acquire(timeout=0.2)


@pytest.mark.parametrize(
    ("cores", "ranks", "most"), [(2, "", 1), (4, "", 3), (64, "", 4), (64, "32", 1)]
)
def test_so_many_work_at_a_time_as_there_are_cores(monkeypatch, cores, ranks, most):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    readers, busy = ReaderThreads(), Busy()
    done = [readers.submit(busy) for _ in range(6)]
    assert busy.num_under_way(most) == most
    busy.let_go.set()
    assert len({one.result(30) for one in done}) <= most
    readers.close()


def test_work_is_done_in_order_and_its_errors_come_back(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2))
    crew, order = ReaderThreads(), []
    done = [crew.submit(order.append, number) for number in range(50)]
    failed = crew.submit(int, "x")
    for one in done:
        one.result(30)
    assert order == list(range(50))
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(30)
    crew.close()


def test_a_read_that_is_spared_the_way_is_done_by_who_asks_once(readers):
    readers.is_spared, read_on = True, []
    read = readers.read(lambda in_memory: not read_on.append((in_memory, threading.get_ident())))
    assert read_on == []
    assert read.result()
    assert read.result()
    assert read_on == [(True, threading.get_ident())]


def test_what_is_not_in_memory_is_a_readers(readers):
    readers.is_spared, let_go = True, threading.Event()

    def read(in_memory):
        if in_memory:
            raise NotInMemoryError
        assert let_go.wait(30)
        return threading.get_ident()

    asked = readers.read(read)
    with pytest.raises(TimeoutError):
        asked.result(timeout=0.05)  # a disk that hangs
    assert not readers.is_spared
    let_go.set()
    assert asked.result() not in (False, threading.get_ident())


def test_a_reader_is_back_when_not_all_was_in_memory(readers):
    assert told(readers, read_s=1e-4, batches=100)[-1] is True
    readers.turn(is_spared=False)  # as such a read does
    assert told(readers, read_s=1e-4, batches=1) == [False]
    assert told(readers, read_s=1e-4, batches=100)[-1] is True


def test_a_read_on_the_training_thread_does_not_see_its_modes(readers):
    readers.is_spared = True
    read = readers.read(lambda in_memory: type(torch.from_numpy(np.ones(3))) is torch.Tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert read.result()
        assert type(torch.ones(3)) is not torch.Tensor


def test_a_read_that_fails_where_it_was_asked_for_is_not_there_later_either(readers):
    readers.is_spared = True
    read = readers.read(lambda in_memory: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read.result()
    assert not read.result()


def test_what_has_not_begun_is_dropped_and_nothing_more_is_taken(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2))
    crew, busy = ReaderThreads(), Busy()
    under_way, waiting = crew.submit(busy), crew.submit(int)
    assert busy.num_under_way(1) == 1
    busy.let_go.set()
    closer = threading.Thread(target=crew.close)
    closer.start()
    closer.join(30)
    assert under_way.done()
    assert waiting.cancelled() or waiting.result() == 0
    with pytest.raises(RuntimeError):
        crew.submit(int)
