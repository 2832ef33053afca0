"""Copies between host and device, and the host's page-locked memory that they run from.

`batch_to_host` copies in a lane of its own, beside the training step's kernels.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from egeria_cache.device.kinds import accelerator, module_of, runs_late
from egeria_cache.device.streams import Event, Held, Lane, mark, streams_of
from egeria_cache.ragged import PaddedRows

LEFT_ALONE = 64
"""So small a part of a device's memory is never taken: what PyTorch does not count lies there."""
SMALL_SIZES = 2 * tuple(1 << n for n in range(13))
"""Verdicts, numbers of samples, labels; PyTorch rounds sizes up to powers of two."""


def pins(device: torch.device) -> bool:
    """Whether copies to and from a device can run beside the host, from page-locked memory."""
    return runs_late(device) and _has_pinned(device.type)


@functools.cache
def _has_pinned(name: str) -> bool:
    kind = accelerator()
    if kind is None or kind.type != name:
        return False
    try:
        return bool(torch.empty(1, pin_memory=True).is_pinned())
    except Exception:  # of any kind: each device says in its own way what it lacks
        return False


def copies_beside(device: torch.device) -> bool:
    """Whether a copy to or from a device can be started without waiting for it."""
    return pins(device) and streams_of(device) is not None


def room(device: torch.device) -> int | None:
    """Return how many bytes of a device may be taken beside training; None: it does not say.

    Half of what was free even when training, this process's, took most so far. A step begins with
    little and ends with little: what is free between two says nothing of what it needs.
    """
    module: Any = module_of(device) if runs_late(device) else None
    try:
        free, total = module.mem_get_info(device)
        kept, most = module.memory_reserved(device), module.max_memory_allocated(device)
    except Exception:  # of any kind: each device says in its own way what it lacks
        return None
    return max(0, int(free + kept - most - total // LEFT_ALONE) // 2)


def lock_ahead(sizes: Iterable[int], device: torch.device) -> None:
    """Lock the pages now that copies with a device will need: it waits while that is done.

    PyTorch gives what was freed to whoever asks for about as much, in any thread.

    Args:
        sizes: Bytes of the pieces that will be in use at a time; small ones come besides.
        device: Nothing is done where it has no use for such memory.
    """
    if pins(device):
        with suppress(RuntimeError):  # no memory left: whoever needs it asks again
            [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in (*sizes, *SMALL_SIZES)]


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor in page-locked memory where a device has that; else the tensor."""
    return tensor.pin_memory() if pins(device) else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; from page-locked memory the copy is only started.

    Whoever gives that memory to others must hold it until the copy is done (`Lane.held`).
    """
    beside = copies_beside(device) and (runs_late(tensor.device) or tensor.is_pinned())
    return tensor.to(device, non_blocking=beside)


_sources, _lock = Held(), threading.Lock()


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy what lies on the host, without waiting for the device; it is held as long as need be."""
    if not (runs_late(device) and tensor.is_cpu):
        return tensor.to(device)
    source = pinned(tensor, device)
    there = to_device(source, device)
    with _lock:
        _sources.hold(source, mark(device))
    return there


def to_host(tensor: Tensor) -> Tensor:
    """Copy from a device into host memory of its own.

    Where there are streams and page-locked memory the copy is only started: wait for a `mark` made
    after it before the numbers are read. Else they are there.
    """
    device = tensor.device
    if not runs_late(device):
        return tensor.detach().clone()
    beside = copies_beside(device)
    # As `empty_like` the copy has the strides of the original, which decide what kernels compute.
    host = torch.empty_like(tensor.detach(), device="cpu", pin_memory=beside)
    return host.copy_(tensor.detach(), non_blocking=beside)


class Answers:
    """Numbers of a device that the host has asked for, and reads when they have come: no wait."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Tensor, Event | None, Any]] = deque()

    def ask(self, number: Tensor, about: Any = None) -> None:
        """Ask for a tensor, and note what it says something about."""
        self.asked.append((to_host(number), mark(number.device), about))

    def come(self, *, wait: bool = False) -> Iterator[tuple[Tensor, Any]]:
        """Give what has come, each once, with what it is about; `wait`: all that was asked for."""
        while self.asked and (wait or _is_past(self.asked[0][1])):
            number, event, about = self.asked.popleft()
            if wait and event is not None:
                event.synchronize()
            yield number, about


def _is_past(event: Event | None) -> bool:
    return event is None or event.query()


_lanes: dict[torch.device, Lane] = {}
_lanes_lock = threading.Lock()


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
    with _lanes_lock:
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
