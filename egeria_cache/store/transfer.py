"""Device -> page-locked host memory on a stream of its own, beside the training step's kernels."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["to_host"]

_streams: dict[torch.device, torch.cuda.Stream] = {}
_streams_lock = threading.Lock()


def to_host(
    fields: Mapping[str, Tensor | Sequence[Any]],
) -> tuple[dict[str, Tensor | Sequence[Any]], torch.cuda.Event | None]:
    """Return the fields in host memory, and the event to wait for before reading them.

    Host tensors pass through untouched. The caller does not wait for the copy.
    """
    devices = {
        item.device
        for value in fields.values()
        for item in ([value] if isinstance(value, Tensor) else value)
        if isinstance(item, Tensor) and item.is_cuda
    }
    if not devices:
        return dict(fields), None
    device = devices.pop()
    with _streams_lock:
        stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        moved: dict[str, Tensor | Sequence[Any]] = {
            name: _copy(value, stream)
            if isinstance(value, Tensor)
            else [_copy(item, stream) if isinstance(item, Tensor) else item for item in value]
            for name, value in fields.items()
        }
        event = torch.cuda.Event()
        event.record(stream)
    return moved, event


def _copy(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    tensor.record_stream(stream)  # its memory must not be reused before the copy is done
    return host
