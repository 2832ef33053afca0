"""What is taken of a device: no context on another one, and no memory that training may need."""

import pytest
import torch

from egeria_cache.device import room
from egeria_cache.prefetch import prefetcher
from tests.device import backend
from tests.device.simulated.runs import DEVICE, assert_same, plain, run

OPS = torch.ops.simulated
LATER_STEPS = range(14, 31)


@pytest.fixture
def second_device():
    torch.accelerator.set_device_index(1)
    yield
    torch.accelerator.set_device_index(0)


def test_threads_begin_no_context_on_another_device_than_the_training_steps(
    tmp_path, second_device
):
    """A rank on the second device: threads of ours begin with the first one as their current."""
    OPS.forget_begun()
    torch.accelerator.set_device_index(1)
    cached = run(tmp_path, gate="always", epochs=3, pin_memory=True)
    assert cached[2].hits == 2 * 48
    assert OPS.begun() == [0, 1]


@pytest.fixture
def full_after(monkeypatch):
    """Give the device so many bytes more than training takes at most."""

    def fill(spare):
        OPS.forget_most_taken()
        monkeypatch.setattr(backend, "total_bytes", OPS.memory(0)[1] + spare)

    return fill


def test_room_is_half_of_what_training_has_never_needed(full_after):
    full_after(0)
    most = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    del most
    assert room(torch.device(DEVICE, 0)) == 0
    full_after(1 << 24)
    total = backend.total_bytes
    assert room(torch.device(DEVICE, 0)) == ((1 << 24) - total // 64) // 2
    assert room(torch.device("cpu")) is None


def rings(cache):
    return [view.ring for view in cache.api.views.everywhere()]


def num_slots_of(ring):
    return None if ring is None else len(ring.slabs["layer1"]) - 1


@pytest.mark.parametrize(
    ("free", "num_slots"), [(0, None), (40_000, (40_000 - 48 * 4) // 1600), (1 << 30, 48)]
)
def test_the_ring_takes_what_is_free_and_rows_come_with_their_batch_where_nothing_is(
    tmp_path, monkeypatch, free, num_slots
):
    found = []
    monkeypatch.setattr(prefetcher, "room", lambda device: free)
    cached = run(
        tmp_path, gate="always", cache_kwargs={"ring_batches": 1},
        finish=lambda model, cache: found.extend(map(num_slots_of, rings(cache))),
    )  # fmt: skip
    assert_same(cached, plain())
    assert cached[2].hits == 2 * 48
    assert found == [num_slots]


def test_the_ring_is_given_back_when_training_comes_to_need_its_memory(
    tmp_path, full_after, monkeypatch
):
    monkeypatch.setattr(prefetcher, "ROOM_EVERY_S", 0.0)
    full_after(1 << 30)
    seen = {}

    def on_step(step, model, cache):
        seen[step] = [ring is not None and not ring.is_closed for ring in rings(cache)]
        if step == LATER_STEPS[0]:
            full_after(0)

    cached = run(tmp_path, gate="always", on_step=on_step, epochs=5)
    assert_same(cached, plain(epochs=5))
    assert cached[2].hits == 4 * 48
    assert seen[LATER_STEPS[0] - 1] == [True]
    assert seen[LATER_STEPS[-1]] == [False]
