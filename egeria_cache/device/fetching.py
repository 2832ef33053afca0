"""Device -> page-locked host memory in a lane of its own, beside the training step's kernels."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egeria_cache.device.kinds import runs_late
from egeria_cache.device.memory import to_host
from egeria_cache.device.streams import Event, Lane
from egeria_cache.ragged import PaddedRows

_lanes: dict[torch.device, Lane] = {}
_lock = threading.Lock()


def batch_to_host(
    fields: Mapping[str, Tensor | Sequence[Any]],
) -> tuple[dict[str, Tensor | Sequence[Any]], tuple[Event, ...]]:
    """Return the fields in host memory, and the events to wait for before reading them.

    Host tensors pass through untouched. The caller does not wait for the copy, where the device can
    copy beside it.
    """
    moved: dict[str, Tensor | Sequence[Any]] = dict(fields)
    elsewhere = set[torch.device]()
    for value in moved.values():
        value = value.padded if isinstance(value, PaddedRows) else value
        many = (value,) if isinstance(value, Tensor) else value
        elsewhere |= {
            one.device for one in many if isinstance(one, Tensor) and runs_late(one.device)
        }
    with _lock:
        events = [_fetch(moved, device) for device in filter(runs_late, elsewhere)]
    return moved, tuple(event for event in events if event is not None)


def _fetch(fields: dict[str, Tensor | Sequence[Any]], device: torch.device) -> Event | None:
    """Replace what lies on a device; return when it has arrived."""
    if device not in _lanes:
        _lanes[device] = Lane(device)
    lane, sources = _lanes[device], []

    def fetched(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.device != device:
            return item
        copy = to_host(item)
        sources.append((item, copy))
        return copy

    lane.follow_current()
    with lane.use():
        for name, value in fields.items():
            if isinstance(value, PaddedRows):  # one copy, not one a row
                fields[name] = value.on(fetched(value.padded))
            else:
                many = not isinstance(value, Tensor)
                fields[name] = list(map(fetched, value)) if many else fetched(value)
    ready = lane.mark()
    # The training step may let go of a tensor, and a full queue of its copy, before that is done.
    lane.held.hold(sources, ready)
    return ready
