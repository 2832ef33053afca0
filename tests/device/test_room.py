"""One room knows what an accelerator is; nothing else names a kind of device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from egeria_cache import device as devices

ROOT = Path(__file__).parents[2]
KINDS = re.compile(r"(?<![a-z])(is_)?(cuda|xpu|mps|hip|rocm|mtia|hpu|nccl|xccl)(?![a-z])")
CPU = torch.device("cpu")


def _sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_code_but_the_rooms_names_a_kind_of_device():
    room = ROOT / "egeria_cache" / "device"
    assert any(KINDS.search(path.read_text()) for path in _sources("egeria_cache/device"))
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _sources("egeria_cache", "egeria_core", "examples", "benchmarks", "tools")
        if room not in path.parents
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KINDS.search(line)
    ]
    assert named == []


def test_no_code_but_the_rooms_makes_streams_events_or_pinned_memory():
    forbidden = re.compile(
        r"torch\.(Stream|Event|accelerator|get_device_module)\b|record_stream|non_blocking=True"
    )
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in _sources("egeria_cache", "egeria_core")
        if (ROOT / "egeria_cache" / "device") not in path.parents
        for match in forbidden.finditer(path.read_text())
    ]
    assert found == []


def test_the_host_runs_nothing_late_and_pins_nothing():
    assert not devices.runs_late(CPU)
    assert not devices.runs_late("meta")
    assert not devices.pins(CPU)
    assert devices.mark(CPU) is None
    assert devices.device_name(CPU) is None
    devices.synchronize(CPU)


def test_a_lane_of_the_host_is_the_order_of_the_calls():
    lane = devices.Lane(CPU)
    assert not lane.is_beside
    with lane.use():
        x = torch.arange(3)
    assert lane.mark() is None
    lane.follow(None)
    lane.follow_current()
    lane.lead(None)
    assert torch.equal(devices.to_device(x, CPU), torch.arange(3))


def test_a_copy_to_the_host_is_ones_own_and_has_the_same_strides():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    copy = devices.to_host(x)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert copy.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_kind_without_a_device_has_no_streams_and_no_pinned_memory(kind):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    device = torch.device(kind, 0)
    assert devices.runs_late(device)
    assert not devices.pins(device)
    assert devices.mark(device) is None
    assert not devices.Lane(device).is_beside


def test_methods_named_after_a_device_are_known_as_moves():
    assert devices.moved_to(Tensor.cuda) == "cuda"
    assert devices.moved_to(Tensor.xpu) == "xpu"
    assert devices.moved_to(Tensor.cpu) is None
    assert devices.moved_to(Tensor.float) is None


class Passed:
    """An event that is past when it is told to be."""

    def __init__(self) -> None:
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self.is_past = True


def test_what_a_copy_uses_is_held_until_the_copy_is_past():
    import weakref

    held, first, second = devices.Held(), Passed(), Passed()
    x = torch.zeros(2)
    seen = weakref.ref(x)
    held.hold(x, first)
    del x
    held.hold(torch.zeros(1), second)
    assert seen() is not None
    first.is_past = True
    held.hold(None, None)
    assert seen() is None
