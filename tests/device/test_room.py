"""One file knows what an accelerator is; nothing else names a kind of device."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from egeria_cache import device as devices

ROOT = Path(__file__).parents[2]
DEVICE = ROOT / "egeria_cache" / "device.py"
KINDS = re.compile(r"(?<![a-z])(is_)?(cuda|xpu|mps|hip|rocm|mtia|hpu|nccl|xccl)(?![a-z])")


def _sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_other_code_names_a_kind_of_device():
    assert KINDS.search(DEVICE.read_text())
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _sources("egeria_cache", "egeria_core", "examples", "benchmarks", "tools")
        if path != DEVICE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KINDS.search(line)
    ]
    assert named == []


def test_no_other_code_makes_streams_events_or_pinned_memory():
    forbidden = re.compile(
        r"torch\.(Stream|Event|accelerator|get_device_module)\b|record_stream|non_blocking=True"
    )
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in _sources("egeria_cache", "egeria_core")
        if path != DEVICE
        for match in forbidden.finditer(path.read_text())
    ]
    assert found == []


def test_a_copy_to_the_host_is_ones_own_and_has_the_same_strides():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    copy = devices.to_host(x)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert copy.data_ptr() != x.data_ptr()
