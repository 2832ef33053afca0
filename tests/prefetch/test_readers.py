"""Reader threads: as many as keep up with training, and work done in order."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from egeria_cache.prefetch.readers import Crew, ReaderCount, ReaderThreads
from egeria_cache.store import NotInMemoryError


class Machine:
    """Training of a fixed pace beside readers, in made-up seconds: no clock is looked at.

    Args:
        step_s: A step without reading.
        read_s: What a batch costs one reader.
        helps: Whether readers work side by side; else they share one interpreter.
    """

    def __init__(self, most, *, step_s, read_s, helps=True):
        self.count, self.step_s, self.read_s, self.helps = ReaderCount(most), step_s, read_s, helps
        self.history = []

    def run(self, batches):
        for _ in range(batches):
            wanted = self.count.wanted
            pace = self.read_s / (wanted if self.helps and wanted else 1)
            interval = max(self.step_s, pace)
            self.history.append(
                self.count.batch(
                    read_s=pace * max(wanted, 1),
                    waited_s=interval - self.step_s,
                    interval_s=interval,
                )
            )
        return self

    @property
    def tried(self):
        return [i for i in range(1, len(self.history)) if self.history[i] > self.history[i - 1]]


@pytest.mark.parametrize("read_s", [0.001, 0.004, 0.0099])
def test_one_reader_as_long_as_it_keeps_up(read_s):
    assert set(Machine(4, step_s=0.01, read_s=read_s).run(500).history) == {1}


@pytest.mark.parametrize(("read_s", "wanted"), [(0.015, 2), (0.025, 3), (0.1, 4)])
def test_as_many_readers_as_keep_up_where_there_are_cores(read_s, wanted):
    assert Machine(4, step_s=0.01, read_s=read_s).run(500).history[-1] == wanted


def test_no_second_reader_where_there_is_no_core():
    assert set(Machine(1, step_s=0.01, read_s=0.1).run(500).history) == {1}


def test_a_reader_that_does_not_help_is_let_go_and_tried_ever_more_rarely():
    machine = Machine(4, step_s=0.01, read_s=0.02, helps=False).run(2000)
    assert machine.history[-1] == 1
    assert set(machine.history) == {1, 2}
    between = [later - one for one, later in zip(machine.tried, machine.tried[1:], strict=False)]
    assert len(between) >= 3
    assert between == sorted(between)
    assert between[-1] > 2 * between[0]


def test_fewer_again_when_reading_is_cheap_again():
    machine = Machine(4, step_s=0.01, read_s=0.028).run(500)
    assert machine.history[-1] == 3
    machine.read_s = 0.002  # the page cache is warm
    assert machine.run(200).history[-1] == 1


def test_waiting_for_something_else_than_readers_brings_no_other():
    count = ReaderCount(4)
    wanted = {count.batch(read_s=0.001, waited_s=0.005, interval_s=0.01) for _ in range(500)}
    assert wanted == {1}


def test_short_reads_are_left_to_training():
    assert Machine(1, step_s=0.005, read_s=0.0003).run(100).history[-1] == 0


def test_reads_that_became_long_go_back_to_a_reader_at_once_and_are_tried_ever_more_rarely():
    machine = Machine(1, step_s=0.01, read_s=0.0009, helps=False)
    machine.run(2000)  # short beside training, and not brief enough where training waits for it
    assert set(machine.history) == {0, 1}
    at = [i for i, wanted in enumerate(machine.history) if wanted == 0]
    alone = [one for one in at if one - 1 not in at]
    assert len(at) <= 4 * len(alone)
    between = [later - one for one, later in itertools.pairwise(alone)]
    assert len(between) >= 3
    assert between == sorted(between)
    assert between[-1] > 2 * between[0]


def test_one_read_in_many_that_takes_long_changes_nothing():
    count = ReaderCount(1)
    told = {"waited_s": 0.0, "interval_s": 0.01}
    wanted = [count.batch(read_s=5e-3 if i % 50 == 9 else 2e-4, **told) for i in range(5000)]
    assert set(wanted[100:]) == {0}
    assert count.batch(read_s=5e-3, **told) == 0
    assert 1 in [count.batch(read_s=5e-3, **told) for _ in range(8)]


def test_a_device_that_runs_late_always_has_a_reader():
    count = ReaderCount(1)
    told = {"read_s": 0.0001, "waited_s": 0.0, "interval_s": 0.01}
    assert {count.batch(**told, may_be_none=False) for _ in range(100)} == {1}
    assert count.batch(**told) == 0
    assert count.batch(**told, may_be_none=False) == 1


def test_a_pause_of_training_is_no_pace():
    machine = Machine(4, step_s=0.01, read_s=0.025).run(300)
    machine.count.batch(read_s=0.025, waited_s=0.0, interval_s=60.0)
    assert machine.run(60).history[-1] == 3


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


@pytest.fixture
def crew():
    made = Crew(3)
    yield made
    made.shutdown(wait=True, cancel_futures=True)


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_so_many_work_at_a_time_as_are_wanted(crew, wanted):
    crew.wanted, busy = wanted, Busy()
    done = [crew.submit(busy) for _ in range(6)]
    assert busy.num_under_way(wanted) == wanted
    busy.let_go.set()
    assert len({one.result(30) for one in done}) <= wanted


def test_one_too_many_stops_after_what_it_does(crew):
    crew.wanted, first, later = 3, Busy(), Busy()
    done = [crew.submit(first) for _ in range(3)]
    assert first.num_under_way(3) == 3
    crew.wanted = 1
    done += [crew.submit(later) for _ in range(4)]
    first.let_go.set()
    for one in done[:3]:
        one.result(30)
    assert later.num_under_way(1) == 1
    later.let_go.set()
    for one in done:
        one.result(30)


def test_work_is_done_in_order_and_its_errors_come_back(crew):
    order = []
    done = [crew.submit(order.append, number) for number in range(50)]
    failed = crew.submit(int, "x")
    for one in done:
        one.result(30)
    assert order == list(range(50))
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(30)


def test_a_read_that_is_spared_the_way_is_done_by_who_asks_once(crew):
    crew.is_spared, read_on = True, []
    read = crew.read(lambda in_memory: not read_on.append((in_memory, threading.get_ident())))
    assert read_on == []
    assert read.result()
    assert read.result()
    assert read_on == [(True, threading.get_ident())]


def test_what_is_not_in_memory_is_a_readers(crew):
    crew.is_spared, let_go = True, threading.Event()

    def read(in_memory):
        if in_memory:
            raise NotInMemoryError
        assert let_go.wait(30)
        return threading.get_ident()

    asked = crew.read(read)
    with pytest.raises(TimeoutError):
        asked.result(timeout=0.05)  # a disk that hangs
    assert not crew.is_spared
    let_go.set()
    assert asked.result() not in (False, threading.get_ident())


def test_a_reader_is_back_when_not_all_was_in_memory():
    threads, told = ReaderThreads(), {"read_s": 1e-4, "waited_s": 0.0, "interval_s": 0.01}
    crew = threads.executor
    try:
        for _ in range(100):
            threads.served(**told, may_be_none=True)
        assert crew.is_spared
        crew.is_spared = False  # as such a read leaves it
        threads.served(**told, may_be_none=True)
        assert not crew.is_spared
        for _ in range(100):
            threads.served(**told, may_be_none=True)
        assert crew.is_spared
    finally:
        threads.close()


def test_a_read_on_the_training_thread_does_not_see_its_modes(crew):
    crew.is_spared = True
    read = crew.read(lambda in_memory: type(torch.from_numpy(np.ones(3))) is torch.Tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert read.result()
        assert type(torch.ones(3)) is not torch.Tensor


def test_a_read_that_fails_where_it_was_asked_for_is_not_there_later_either(crew):
    crew.is_spared = True
    read = crew.read(lambda in_memory: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read.result()
    assert not read.result()


def test_what_has_not_begun_is_dropped_and_nothing_more_is_taken():
    crew, busy = Crew(1), Busy()
    under_way, waiting = crew.submit(busy), crew.submit(int)
    assert busy.num_under_way(1) == 1
    busy.let_go.set()
    closer = threading.Thread(target=crew.shutdown, kwargs={"cancel_futures": True})
    closer.start()
    closer.join(30)
    assert under_way.done()
    assert waiting.cancelled() or waiting.result() == 0
    with pytest.raises(RuntimeError):
        crew.submit(int)
