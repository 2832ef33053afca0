"""Rows that stay on a device against a dict, over random orders; batches that come ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from egeria_cache.prefetch.ring import Place, Resident, Ring, numbers_of, ring_of

CPU = torch.device("cpu")
NUM_SAMPLES = 31


def rows_of(keys, draw: int = 0) -> dict[str, torch.Tensor]:
    numbers = torch.as_tensor(keys, dtype=torch.float32) + 1000 * draw
    return {"a": numbers[:, None, None].expand(-1, 2, 3).clone()}


def labels_of(keys) -> dict[str, torch.Tensor]:
    return {"label": torch.as_tensor(keys, dtype=torch.int64) * 7}


def resident() -> Resident:
    return Resident(Ring(CPU), rows_of([0]), labels_of([0]), NUM_SAMPLES)


def insert(held: Resident, keys, draw: int = 0) -> None:
    held.insert(np.array(keys), np.full(len(keys), draw), rows_of(keys, draw), labels_of(keys))


def place(held: Resident, keys, draw: int = 0) -> Place | None:
    return held.place(np.array(keys), np.full(len(keys), draw))


KEYS = st.lists(st.integers(0, NUM_SAMPLES - 1), min_size=1, max_size=8)


class ResidentMachine(RuleBasedStateMachine):
    """Batches come in any order, of ever newer draws; what is given is right, or it is refused."""

    def __init__(self):
        super().__init__()
        self.held, self.draw, self.known, self.places = resident(), 0, {}, []

    @rule(keys=KEYS)
    def load(self, keys):
        insert(self.held, keys, self.draw)
        self.known |= dict.fromkeys(keys, self.draw)

    @rule()
    def draw_anew(self):
        self.draw += 1

    @rule(keys=KEYS, age=st.integers(0, 1))
    def plan(self, keys, age):
        draw = max(0, self.draw - age)
        found = place(self.held, keys, draw)
        assert (found is not None) is all(self.known.get(key) == draw for key in keys)
        if found is not None:
            assert torch.equal(found.kept["label"], labels_of(keys)["label"])
            self.places.append((keys, draw, found))

    @invariant()
    def what_was_planned_is_right_or_gone(self):
        for keys, draw, found in self.places:
            if all(self.known[key] == draw for key in keys):
                assert torch.equal(self.held.gather(found)["a"], rows_of(keys, draw)["a"])
            else:
                with pytest.raises(LookupError, match="any more"):
                    self.held.gather(found)


TestResident = ResidentMachine.TestCase
TestResident.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_what_is_gathered_is_the_callers_own_in_the_order_that_is_asked_for_repeats_included():
    held = resident()
    insert(held, [0, 1, 2, 3])
    found = place(held, [3, 1, 1, 0])
    held.gather(found)["a"].zero_()
    assert torch.equal(held.gather(found)["a"], rows_of([3, 1, 1, 0])["a"])


def test_a_lookup_on_the_device_gives_what_is_there_now_and_nan_for_what_is_not():
    """A graph that was captured asks nobody: it must not get the rows of others."""
    held, index = resident(), torch.tensor([4, 5, 6])
    insert(held, [4, 5])
    assert torch.equal(held.rows(index)["a"][:2], rows_of([4, 5])["a"])
    assert held.rows(index)["a"][2].isnan().all()
    insert(held, [4], draw=1)
    assert torch.equal(held.rows(index)["a"][:1], rows_of([4], 1)["a"])


def test_samples_are_whole_numbers_of_the_data_set():
    assert numbers_of([3, 0, 3], NUM_SAMPLES).tolist() == [3, 0, 3]
    for others in (["a"], [-1], [NUM_SAMPLES], [(1, 2)], [1, "a"], [1 << 70], [True]):
        assert numbers_of(others, NUM_SAMPLES) is None


def test_rows_that_cannot_be_written_give_all_back():
    held = resident()
    insert(held, [0])
    with pytest.raises(RuntimeError):
        held.insert(np.array([1]), np.zeros(1, int), {"a": torch.zeros(1, 5, 5)}, labels_of([1]))
    assert held.is_closed


def test_what_was_given_back_serves_and_takes_nothing():
    held = resident()
    insert(held, [0])
    found = place(held, [0])
    held.close()
    held.close()
    insert(held, [1])
    for keys in ([0], [1]):
        assert place(held, keys) is None
    with pytest.raises(LookupError):
        held.gather(found)


def test_batches_that_come_ahead_are_those_that_were_read():
    ring = ring_of(CPU)
    assert ring_of(CPU) is ring
    staged = [ring.stage(rows_of([key])) for key in range(5)]
    for key, one in enumerate(staged):
        assert torch.equal(ring.take(one)["a"], rows_of([key])["a"])
