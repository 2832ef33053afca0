"""The whole chain on a device that is not the CPU: equal to plain computation there."""

import pytest
import torch

from egeria_cache import device as devices
from tests.device import backend
from tests.device.simulated.runs import compared, plain


@pytest.mark.parametrize(
    ("boundary", "workers"), [("layer1", 0), ("stem", 0), ("layer2", 0), ("layer1", 2)]
)
def test_misses_are_written_and_hits_served_to_the_bit(tmp_path, boundary, workers):
    settings = {"boundary": boundary, "num_workers": workers, "epochs": 4}
    assert compared(tmp_path, hits=48 * 3, **settings).misses == 48
    assert plain(**settings)[2].hits == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_that_are_made_anew_in_turns_are_computed_beside_what_is_read(tmp_path, workers):
    stats = compared(tmp_path, num_workers=workers, epochs=6, reuse=3)
    assert stats.partial_batches > 12
    assert 0.5 < stats.hits / (5 * 48) < 0.8


@pytest.mark.parametrize(
    "moves",
    [{4: "layer2"}, {9: "layer2", 14: None}, {2: None, 9: "stem", 13: "layer2", 21: "layer1"}],
    ids=str,
)
def test_boundary_moves_change_nothing(tmp_path, moves):
    assert compared(tmp_path, moves=moves, epochs=5).hits > 0


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_is_part_of_the_signature(tmp_path, autocast):
    compared(tmp_path, hits=48 * 2, autocast=autocast)


def test_audits_compare_on_the_device(tmp_path):
    stats = compared(tmp_path, cache_kwargs={"audit_rate": 0.5})
    assert stats.audited > 10
    assert stats.audit_failures == 0


def test_the_room_knows_what_the_device_has(device):
    has_streams = "streams" not in backend.WITHOUT and "events" not in backend.WITHOUT
    assert devices.runs_late(device)
    assert devices.pins(device) == ("pinned" not in backend.WITHOUT)
    assert (devices.Lane(device).mark() is not None) == has_streams
    assert (devices.mark(device) is None) == (not has_streams)
    assert len(devices.random_states()) == (0 if "module" in backend.WITHOUT else 2)
    assert devices.located(torch.device(device.type)) == device
    devices.synchronize()
    devices.synchronize()
