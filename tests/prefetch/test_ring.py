"""The ring against a dict, over random orders of events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from egeria_cache.prefetch import ring as rings
from egeria_cache.prefetch.ring import Ring

CPU = torch.device("cpu")


def row_of(key: int) -> torch.Tensor:
    return torch.full((2, 3), float(key))


def rows_of(keys) -> dict[str, torch.Tensor]:
    return {"a": torch.stack([row_of(k) for k in keys]) if keys else torch.empty(0, 2, 3)}


def a_ring(num_slots: int) -> Ring:
    return Ring({"a": torch.empty(1, 2, 3)}, num_slots, CPU)


def gathered(ring: Ring, batch: int, keys) -> torch.Tensor:
    return ring.gather(ring.place(batch, keys))["a"]


class RingMachine(RuleBasedStateMachine):
    """Batches come in any order within a window; those not yet released must be gatherable."""

    @initialize(num_slots=st.integers(8, 40), max_runs=st.integers(0, 8))
    def start(self, num_slots, max_runs):
        self.max_runs, rings.MAX_RUNS = rings.MAX_RUNS, max_runs
        self.ring = a_ring(num_slots)
        self.num_slots = num_slots
        self.next_batch = 0
        self.released = 0
        self.live: dict[int, list[int]] = {}
        self.places = {}
        self.pinned: dict[int, list[int]] = {}

    def teardown(self):
        rings.MAX_RUNS = getattr(self, "max_runs", rings.MAX_RUNS)

    @rule(keys=st.sets(st.integers(0, 30), min_size=1, max_size=8))
    def load(self, keys):
        batch, keys = self.next_batch, sorted(keys)
        self.next_batch += 1
        resident = self.ring.adopt(batch, keys)
        missing = [key for key, there in zip(keys, resident, strict=True) if not there]
        placed = self.ring.insert(batch, missing, rows_of(missing), [f"label {k}" for k in missing])
        held = [k for b, k in (self.live | self.pinned).items() if b >= self.released]
        if placed:
            self.live[batch] = keys
            self.places[batch] = self.ring.place(batch, keys)
        else:
            assert len(set(keys).union(*held)) > self.num_slots
            self.pinned[batch] = [k for k, there in zip(keys, resident, strict=True) if there]

    @rule(ahead=st.integers(0, 3))
    def release(self, ahead):
        self.released = max(self.released, self.next_batch - ahead)
        self.ring.release_before(self.released)

    @invariant()
    def every_batch_that_may_still_be_needed_is_right(self):
        for batch, keys in getattr(self, "live", {}).items():
            if batch < self.released:
                continue
            assert torch.equal(self.ring.gather(self.places[batch])["a"], rows_of(keys)["a"])
            assert self.ring.kept(keys) == [f"label {key}" for key in keys]

    @invariant()
    def what_was_released_is_right_or_gone(self):
        for batch, place in getattr(self, "places", {}).items():
            try:
                rows = self.ring.gather(place)["a"]
            except LookupError:
                assert batch < self.released
            else:
                assert torch.equal(rows, rows_of(self.live[batch])["a"])


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_evicted_batch_is_a_lookup_error_not_other_rows():
    ring = a_ring(2)
    assert ring.insert(0, [1, 2], rows_of([1, 2]), [(), ()])
    place = ring.place(0, [1, 2])
    ring.release_before(1)
    assert ring.insert(1, [3], rows_of([3]), [()])
    with pytest.raises(LookupError, match="batch 0"):
        ring.gather(place)
    assert torch.equal(gathered(ring, 1, [3]), rows_of([3])["a"])


def test_a_full_ring_refuses_rather_than_drop_a_batch_that_is_still_needed():
    ring = a_ring(2)
    assert ring.insert(0, [1, 2], rows_of([1, 2]), [(), ()])
    assert not ring.insert(1, [3], rows_of([3]), [()])
    assert torch.equal(gathered(ring, 0, [1, 2]), rows_of([1, 2])["a"])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1], [1, 1, 0, 3]])
def test_rows_come_in_the_order_that_is_asked_for_repeats_included(order):
    ring = a_ring(8)
    assert ring.insert(0, [0, 1, 2, 3], rows_of([0, 1, 2, 3]), [()] * 4)
    for max_runs in (0, 1, 8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rings, "MAX_RUNS", max_runs)
            assert torch.equal(gathered(ring, 0, order), rows_of(order)["a"])


def test_what_is_gathered_is_the_callers_own():
    ring = a_ring(4)
    assert ring.insert(0, [0, 1], rows_of([0, 1]), [()] * 2)
    place = ring.place(0, [0, 1])
    ring.gather(place)["a"].zero_()
    assert torch.equal(ring.gather(place)["a"], rows_of([0, 1])["a"])


def test_a_closed_ring_serves_and_takes_nothing():
    ring = a_ring(4)
    assert ring.insert(0, [0], rows_of([0]), [()])
    place = ring.place(0, [0])
    ring.close()
    ring.close()
    with pytest.raises(LookupError):
        ring.gather(place)
    assert not ring.insert(1, [1], rows_of([1]), [()])
    assert ring.adopt(1, [0]) == [False]
