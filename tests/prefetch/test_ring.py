"""The ring and its hash table against a dict, over random orders of events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from egeria_cache.prefetch.ring import HashTable, Ring

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("device", DEVICES)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 2**62), max_size=20)), max_size=25))
@settings(max_examples=60, deadline=None)
def test_the_hash_table_answers_as_a_dict_does(device, operations):
    table, model, device = HashTable(64, torch.device(device)), {}, torch.device(device)
    seen: set[int] = set()
    for is_insert, keys in operations:
        seen |= keys
        if is_insert:
            new = sorted(keys - model.keys())[: 64 - len(model)]
            slots = [len(seen) * 100 + i for i in range(len(new))]
            table.insert(torch.tensor(new, dtype=torch.int64, device=device),
                         torch.tensor(slots, dtype=torch.int64, device=device))  # fmt: skip
            model.update(zip(new, slots, strict=True))
        else:
            table.remove(torch.tensor(sorted(keys), dtype=torch.int64, device=device))
            for key in keys:
                model.pop(key, None)
        asked = sorted(seen)
        answer = table.lookup(torch.tensor(asked, dtype=torch.int64, device=device))
        assert answer.tolist() == [model.get(key, -1) for key in asked]


def test_keys_that_all_collide_are_all_found():
    table = HashTable(16, CPU)
    home = table._home(torch.arange(100_000))
    same = torch.nonzero(home == home[0]).flatten()[:16]
    assert len(same) == 16
    table.insert(same, torch.arange(16))
    assert table.lookup(same).tolist() == list(range(16))
    assert table.max_probe == 16


def row_of(key: int) -> torch.Tensor:
    return torch.full((2, 3), float(key))


class RingMachine(RuleBasedStateMachine):
    """Batches come in any order within a window; those not yet released must be gatherable."""

    @initialize(num_slots=st.integers(8, 40))
    def start(self, num_slots):
        self.ring = Ring({"a": torch.empty(1, 2, 3)}, num_slots, CPU)
        self.num_slots = num_slots
        self.next_batch = 0
        self.released = 0
        self.live: dict[int, list[int]] = {}
        self.pinned: dict[int, list[int]] = {}

    @rule(keys=st.sets(st.integers(0, 30), min_size=1, max_size=8))
    def load(self, keys):
        batch, keys = self.next_batch, sorted(keys)
        self.next_batch += 1
        resident = self.ring.adopt(batch, keys)
        missing = [key for key, there in zip(keys, resident, strict=True) if not there]
        placed = self.ring.insert(
            batch,
            missing,
            {"a": torch.stack([row_of(k) for k in missing]) if missing else torch.empty(0, 2, 3)},
            [(f"label {key}",) for key in missing],
        )
        held = [k for b, k in (self.live | self.pinned).items() if b >= self.released]
        if placed:
            self.live[batch] = keys
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
            rows = self.ring.gather(batch, torch.tensor(keys))["a"]
            assert torch.equal(rows, torch.stack([row_of(key) for key in keys]))
            assert self.ring.kept(keys) == [(f"label {key}",) for key in keys]


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_evicted_batch_is_a_lookup_error_not_other_rows():
    ring = Ring({"a": torch.empty(1, 2, 3)}, 2, CPU)
    assert ring.insert(0, [1, 2], {"a": torch.stack([row_of(1), row_of(2)])}, [(), ()])
    ring.release_before(1)
    assert ring.insert(1, [3], {"a": row_of(3)[None]}, [()])
    with pytest.raises(LookupError, match="batch 0"):
        ring.gather(0, torch.tensor([1, 2]))
    assert torch.equal(ring.gather(1, torch.tensor([3]))["a"], row_of(3)[None])


def test_a_full_ring_refuses_rather_than_drop_a_batch_that_is_still_needed():
    ring = Ring({"a": torch.empty(1, 2, 3)}, 2, CPU)
    rows = {"a": torch.stack([row_of(1), row_of(2)])}
    assert ring.insert(0, [1, 2], rows, [(), ()])
    assert not ring.insert(1, [3], {"a": row_of(3)[None]}, [()])
    assert torch.equal(ring.gather(0, torch.tensor([1, 2]))["a"], rows["a"])
