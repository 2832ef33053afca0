"""The ring against a dict, over random orders of events."""

from __future__ import annotations

import threading
from concurrent import futures
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch._subclasses.fake_tensor import FakeTensorMode

from egeria_cache.prefetch.prefetcher import PlannedEntry, Prefetcher, ReaderThreads
from egeria_cache.prefetch.ring import Place, Ring, numbered
from egeria_cache.ragged import pad_rows
from egeria_cache.store import NotInMemoryError
from egeria_cache.store.disk.files import LOCATED

CPU = torch.device("cpu")


NUM_SAMPLES = 31


def row_of(key: int, draw: int = 0) -> torch.Tensor:
    return torch.full((2, 3), float(key + 1000 * draw))


def rows_of(keys, draw: int = 0) -> dict[str, torch.Tensor]:
    return {
        "a": torch.stack([row_of(k, draw) for k in keys]) if len(keys) else torch.empty(0, 2, 3)
    }


def a_ring(num_slots: int, **kwargs) -> Ring:
    return Ring({"a": torch.empty(1, 2, 3)}, num_slots, NUM_SAMPLES, CPU, **kwargs)


def drawn(keys, draw: int = 0) -> np.ndarray:
    return np.full(len(keys), draw)


def insert(ring: Ring, batch: int, keys, draw: int = 0) -> bool:
    labels = [f"label {k} {draw}" for k in keys]
    numbers = torch.tensor([int(k) for k in keys])
    return ring.insert(
        batch, np.array(keys, np.int64), drawn(keys, draw), rows_of(keys, draw),
        {"label": labels, "number": numbers},
    )  # fmt: skip


def place(ring: Ring, keys, draw: int = 0) -> Place:
    return ring.place(np.array(keys), drawn(keys, draw))


class RingMachine(RuleBasedStateMachine):
    """Batches come in any order within a window; those not yet released must be gatherable."""

    @initialize(num_slots=st.integers(8, 40))
    def start(self, num_slots):
        self.ring = a_ring(num_slots)
        self.num_slots = num_slots
        self.next_batch = 0
        self.released = 0
        self.draw = 0
        self.live: dict[int, tuple[list[int], int]] = {}
        self.places: dict[int, Place] = {}
        self.pinned: dict[int, set[int]] = {}

    @rule(keys=st.lists(st.integers(0, 30), min_size=1, max_size=8))
    def load(self, keys):
        batch = self.next_batch
        self.next_batch += 1
        numbers = np.array(keys)
        new = self.ring.adopt(batch, numbers, drawn(keys, self.draw))
        missing = numbers[new].tolist()
        assert len(set(missing)) == len(missing)
        placed = insert(self.ring, batch, missing, self.draw)
        held = [set(k) for b, (k, _) in self.live.items() if b >= self.released]
        held += [k for b, k in self.pinned.items() if b >= self.released]
        if placed:
            self.live[batch] = keys, self.draw
            self.places[batch] = place(self.ring, keys, self.draw)
            assert self.places[batch].kept["number"].tolist() == keys
            labels = [f"label {key} {self.draw}" for key in keys]
            assert self.places[batch].kept["label"] == labels
        else:
            assert len(set(keys).union(*held)) > self.num_slots
            self.pinned[batch] = set(keys) - set(missing)

    @rule(ahead=st.integers(0, 3))
    def release(self, ahead):
        self.released = max(self.released, self.next_batch - ahead)
        self.ring.release_before(self.released)

    @rule()
    def draw_anew(self):
        """As the next pass does: the batches of this one were used."""
        self.released = self.next_batch
        self.ring.release_before(self.released)
        self.draw += 1

    @invariant()
    def every_batch_that_may_still_be_needed_is_right(self):
        for batch, (keys, draw) in getattr(self, "live", {}).items():
            if batch >= self.released:
                rows = self.ring.gather(self.places[batch])["a"]
                assert torch.equal(rows, rows_of(keys, draw)["a"])

    @invariant()
    def what_was_released_is_right_or_gone(self):
        for batch, one in getattr(self, "places", {}).items():
            try:
                rows = self.ring.gather(one)["a"]
            except LookupError:
                assert batch < self.released
            else:
                assert torch.equal(rows, rows_of(*self.live[batch])["a"])

    @invariant()
    def the_table_on_the_device_is_that_of_the_host(self):
        if hasattr(self, "ring"):
            assert self.ring.table.tolist() == self.ring._slot_of.tolist()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_what_is_gathered_is_the_callers_own():
    ring = a_ring(4)
    assert insert(ring, 0, [0, 1])
    one = place(ring, [0, 1])
    ring.gather(one)["a"].zero_()
    assert torch.equal(ring.gather(one)["a"], rows_of([0, 1])["a"])


def test_a_lookup_on_the_device_gives_what_is_there_now_and_nan_for_what_is_not():
    """A graph that was captured asks nobody: it must not get the rows of others."""
    ring = a_ring(2)
    index = torch.tensor([4, 5, 6])
    assert insert(ring, 0, [4, 5])
    assert torch.equal(ring.rows(index)["a"][:2], rows_of([4, 5])["a"])
    assert ring.rows(index)["a"][2].isnan().all()
    ring.release_before(1)
    assert insert(ring, 1, [6])
    rows = ring.rows(index)["a"]
    assert torch.equal(rows[2], row_of(6))
    assert rows[0].isnan().all()
    assert torch.equal(rows[1], row_of(5))


@pytest.mark.parametrize("left", [False, True])
def test_padded_rows_are_gathered_as_long_as_their_batch(left):
    dims, kept = ((0, left), (1, False)), [torch.ones(2, 3), torch.ones(1, 1), torch.ones(4, 2)]
    ring = Ring(
        {"a": torch.empty(1, 4, 3), "b": torch.empty(1, 2)}, 4, NUM_SAMPLES, CPU,
        padded={"a": (dims, -1.0)},
    )  # fmt: skip
    b = torch.arange(6.0).view(3, 2)
    for batch, keys in enumerate(([0, 1], [2])):
        rows = [kept[key] for key in keys]
        sizes = [max(row.shape[dim] for row in rows) for dim in (0, 1)]
        named = {"a": pad_rows(rows, dims, sizes, -1.0), "b": b[keys]}
        assert ring.longer(named) is None
        assert ring.insert(batch, np.array(keys), drawn(keys), named, {})
    for keys, whole, given in (
        ([1, 0], [2, 3], [2, 3]), ([1], [1, 1], [1, 1]), ([2, 1], [4, 3], [9, 3])
    ):  # fmt: skip
        found = ring.gather(place(ring, keys), {"a": given})
        assert torch.equal(found["a"], pad_rows([kept[key] for key in keys], dims, whole, -1.0))
        assert torch.equal(found["b"], b[keys])


def test_longer_rows_ask_for_a_ring_that_is_longer_by_a_quarter():
    ring = Ring({"a": torch.empty(1, 4, 3)}, 4, NUM_SAMPLES, CPU, {"a": (((0, False),), 0.0)})
    longer = ring.longer({"a": torch.empty(2, 8, 3)})
    assert longer is not None
    assert longer["a"].shape == (1, 10, 3)
    ring.close()
    assert ring.longer({"a": torch.empty(2, 8, 3)}) is None


def test_samples_are_numbers_below_their_number_or_lie_in_no_ring():
    assert numbered([3, 0, 3], 4).tolist() == [3, 0, 3]
    for others in (["a"], [-1], [4], [(1, 2)], [1, "a"], [1 << 70], [1 << 63], [True]):
        assert numbered(others, 4) is None


def test_rows_that_cannot_be_written_close_the_ring():
    ring = a_ring(4)
    assert insert(ring, 0, [0])
    with pytest.raises(RuntimeError):
        ring.insert(1, np.array([1]), drawn([1]), {"a": torch.zeros(1, 5, 5)}, {})
    assert ring.is_closed


def test_a_closed_ring_serves_and_takes_nothing():
    ring = a_ring(4)
    assert insert(ring, 0, [0])
    one = place(ring, [0])
    ring.close()
    ring.close()
    with pytest.raises(LookupError):
        ring.gather(one)
    assert not insert(ring, 1, [1])
    with pytest.raises(LookupError):
        place(ring, [0])


# Reader threads: none where reads are short, and work done in order.


@pytest.fixture
def readers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    made = ReaderThreads()
    yield made
    made.close()


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


def deferred(readers, read):
    view = SimpleNamespace(is_void=False, cut=None)
    entry = PlannedEntry(view, 0, [7], np.zeros(1), np.ones(1, LOCATED))
    entry._prefetcher = Prefetcher(readers, ring_batches=1, pin_memory=False)
    entry._prefetcher.read = lambda entry: read(False)
    entry._prefetcher._read_together = lambda entry, in_memory: read(in_memory)
    return entry._prefetcher, entry


def test_a_short_read_is_done_by_who_asks_once(readers):
    read_on = []
    prefetcher, read = deferred(
        readers, lambda in_memory: not read_on.append((in_memory, threading.get_ident()))
    )
    assert read_on == []
    assert all(read.ready() for _ in range(2))
    assert read_on == [(True, threading.get_ident())]
    assert not prefetcher.has_waited


def test_what_is_not_in_memory_is_a_readers_and_all_is_read_ahead_from_then_on(readers):
    let_go = threading.Event()

    def read(in_memory):
        if in_memory:
            raise NotInMemoryError
        assert let_go.wait(30)
        return threading.get_ident()

    prefetcher, asked = deferred(readers, read)
    reading = prefetcher.read_now(asked)
    with pytest.raises(futures.TimeoutError):
        reading.result(timeout=0.05)  # a disk that hangs
    assert prefetcher.has_waited
    let_go.set()
    assert reading.result() not in (False, threading.get_ident())


def test_a_read_on_the_training_thread_does_not_see_its_modes(readers):
    _, read = deferred(
        readers, lambda in_memory: type(torch.from_numpy(np.ones(3))) is torch.Tensor
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert read.ready()
        assert type(torch.ones(3)) is not torch.Tensor
