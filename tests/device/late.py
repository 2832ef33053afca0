"""A device that does everything late, and in any order that its events allow.

Under `Late` each operation on a tensor of the simulated device is put at the end of the queue of
the stream that is current, and so are the events that are recorded and waited for. What is at the
head of a queue runs when a choice says so, or when the host waits for it. Memory is not kept
for what is queued: whoever frees or overwrites it too early gets, or makes, wrong numbers.

Nothing else of the simulation is needed for that: this sits above its operators, as a mode of
PyTorch's, and in the place of its streams and events.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from egeria_cache import attempt
from egeria_cache import device as devices
from egeria_cache.skip.state import quiet
from tests.device.backend import NAME

__all__ = ["Late", "late"]

aten = torch.ops.aten
_WITHOUT_NUMBERS = {f"aten::{name}" for name in (
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"
)}  # fmt: skip
_COPIES = (aten.copy_.default, aten._to_copy.default)


class LateEvent:
    """A point in a queue."""

    def __init__(self, device: Late) -> None:
        self.device = device
        self.is_past = False

    def query(self) -> bool:
        self.device.stir()
        return self.is_past

    def synchronize(self) -> None:
        self.device.run_until(self)


class Late(TorchDispatchMode):
    """Queues what is done on the simulated device.

    Args:
        order: How far queues get before the host waits for one. "nothing": nowhere. "main" or
            "lanes": the stream of the training step runs at once and all others nowhere, or the
            other way round. A number is the seed of a random choice, at each thing that is queued,
            of how many heads of queues run, and of whose.
    """

    def __init__(self, order: str | int) -> None:
        super().__init__()
        self._order = order
        self._random = random.Random(order if isinstance(order, int) else 0)
        self._queues: dict[Any, deque[Any]] = {}
        self._lock = threading.RLock()
        self.num_late = 0
        """Operations that have run after the call that gave them had returned."""
        self.num_waits = 0
        """Times that an operation made the host wait."""

    # ---- queues -------------------------------------------------------------------------------

    def put(self, stream: Any, what: Any) -> None:
        with self._lock:
            self._queues.setdefault(_key(stream), deque()).append(what)
        self.stir()

    def record(self, device: torch.device, stream: Any) -> LateEvent:
        event = LateEvent(self)
        self.put(stream, ("record", event))
        return event

    def order(self, device: torch.device, event: Any, stream: Any) -> None:
        self.put(stream, ("wait", event))

    def stir(self) -> None:
        """Run as many heads of queues as is chosen."""
        with self._lock:
            if self._order == "nothing":
                return
            most = self._random.randrange(4) if isinstance(self._order, int) else 1 << 30
            while most and (ready := self._ready(self._order)):
                self._run_head(self._random.choice(ready))
                most -= 1

    def run_until(self, event: LateEvent) -> None:
        """Do what has to be done before a point is past, and no more."""
        with self._lock:
            while not event.is_past:
                queue = next(q for q in self._queues.values() if ("record", event) in q)
                if not _may_run(queue[0]):
                    self.run_until(queue[0][1])
                self._run_head(queue)

    def run_stream(self, stream: Any) -> None:
        """The host waits for a stream."""
        with self._lock:
            self.num_waits += 1
            last = LateEvent(self)
            self._queues.setdefault(_key(stream), deque()).append(("record", last))
            self.run_until(last)

    def drain(self, *_: Any) -> None:
        """The host waits for all."""
        with self._lock:
            while ready := self._ready(None):
                self._run_head(self._random.choice(ready))
            assert not any(self._queues.values()), "what is queued waits for itself"

    def _ready(self, order: str | int | None) -> list[deque[Any]]:
        """Return the queues whose heads may run now."""
        out = {"main": lambda lane: lane != 0, "lanes": lambda lane: lane == 0}.get(str(order))
        own = (queue for key, queue in self._queues.items() if out is None or not out(key[1]))
        return [queue for queue in own if queue and _may_run(queue[0])]

    def _run_head(self, queue: deque[Any]) -> None:
        kind, what = queue.popleft()
        if kind == "record":
            what.is_past = True
        elif kind == "run":
            self.num_late += 1
            try:
                what()
            except (IndexError, RuntimeError) as error:  # what it found are no indices, say
                raise AssertionError("an operation has failed on the numbers it found") from error

    # ---- operations ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a stand-in without memory; what it does inside comes here again
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = next((x.device for x in tensors if x.device.type == NAME), None)
        wanted = kwargs.get("device")
        if there is None and wanted is not None and torch.device(wanted).type == NAME:
            there = torch.device(NAME, torch.device(wanted).index or 0)
        if there is None or func._schema.name in _WITHOUT_NUMBERS:
            return func(*args, **kwargs)
        stream = torch.accelerator.current_stream(there)
        if func in _COPIES:
            return self._copy(func, stream, args, kwargs)
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **kwargs)  # a view
        if func.is_view:
            return func(*args, **kwargs)
        if any(r.alias_info is not None and r.alias_info.is_write for r in returns):
            return self._in_place(func, stream, args, kwargs)
        return self._functional(func, stream, there, args, kwargs)

    def _in_place(self, func: Any, stream: Any, args: Any, kwargs: Any) -> Any:
        run_args, run_kwargs = tree_map(_argument, (args, kwargs))
        self.put(stream, ("run", lambda: func(*run_args, **run_kwargs)))
        written = [
            value
            for argument, value in zip(
                func._schema.arguments, [*args, *kwargs.values()], strict=False
            )
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written = written or [kwargs["out"]]
        return written[0] if len(func._schema.returns) == 1 else tuple(written)

    def _functional(self, func: Any, stream: Any, there: Any, args: Any, kwargs: Any) -> Any:
        try:
            metas = func(*tree_map(_meta, args), **_on("meta", tree_map(_meta, kwargs)))
            shapes = [x for x in tree_leaves(metas) if x is not None]
            if not all(isinstance(x, Tensor) for x in shapes) or not shapes:
                raise NotImplementedError
        except (NotImplementedError, RuntimeError):  # its result depends on numbers: the host waits
            self.run_stream(stream)
            return func(*args, **kwargs)
        outs = tree_map(
            lambda m: torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=there)
            if isinstance(m, Tensor) else m,
            metas,
        )  # fmt: skip
        run_args, run_kwargs = tree_map(_argument, (args, kwargs))
        targets = tree_map(_argument, outs)

        def run() -> None:
            results = func(*run_args, **_on("cpu", run_kwargs))
            for target, result in zip(tree_leaves(targets), tree_leaves(results), strict=True):
                if isinstance(target, Tensor) and target.shape == result.shape:
                    target.copy_(result)

        self.put(stream, ("run", run))
        return outs

    def _copy(self, func: Any, stream: Any, args: Any, kwargs: Any) -> Tensor:
        if func is aten.copy_.default:
            to, source = args[0], args[1]
            beside = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, beside = args[0], bool(kwargs.get("non_blocking", False))
            dtype, device = kwargs.get("dtype"), kwargs.get("device")
            device = source.device if device is None else torch.device(device)
            to = torch.empty_like(
                source, dtype=dtype, device=device, memory_format=kwargs.get("memory_format")
            )
        if to.device.type == NAME:
            stream = torch.accelerator.current_stream(to.device)
        host = [x for x in (to, source) if x.device.type == "cpu"]
        beside = beside or not host
        is_staged = beside and source.device.type == "cpu" and not source.is_pinned()
        # What is not page-locked is read before the call returns, and written before, too.
        beside = beside and (to.device.type == NAME or to.is_pinned())
        run_to = torch.ops.simulated.unowned(to)
        run_source = source.clone() if is_staged else torch.ops.simulated.unowned(source)
        self.put(stream, ("run", lambda: run_to.copy_(run_source)))
        if not beside:
            self.run_stream(stream)
        return to


def _key(stream: Any) -> Any:
    return stream.device_index, stream.stream_id


def _may_run(item: Any) -> bool:
    return item[0] != "wait" or item[1].is_past


def _argument(value: Any) -> Any:
    """What a queued operation is given: the memory as it will be then, the host's numbers now."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type == NAME or (value.numel() and value.is_pinned()):
        return torch.ops.simulated.unowned(value)
    return value.clone()


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"device": torch.device(device)} if kwargs.get("device") is not None else kwargs


def _through_the_mode(make: Any) -> Any:
    """`torch.tensor(..., device=...)` copies to the device beneath all modes: do it above them."""

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        made = make(data, **kwargs)
        return made if device is None else made.to(device)

    return tensor


@contextmanager
def late(order: str | int) -> Iterator[Late]:
    """Make the simulated device late inside the block, for this thread's operations."""
    mode = Late(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_has_streams", lambda device: device.type == NAME)
        patch.setattr(devices, "_record", mode.record)
        patch.setattr(devices, "_order", mode.order)
        patch.setattr(devices, "_to_host_lane", functools.cache(devices.Lane))
        patch.setattr(devices, "_sources", devices.Held())
        patch.setattr(torch.accelerator, "synchronize", mode.drain)
        # Ours is a mode in the place of a device: it is not to be left out as those of loops are.
        for count in ("num_dispatch_modes", "num_function_modes"):
            patch.setattr(attempt, count, int)
        patch.setattr(quiet, "_leave_modes", lambda stack: None)
        patch.setattr(torch, "tensor", _through_the_mode(torch.tensor))
        with torch.autograd.set_multithreading_enabled(False), mode:
            yield mode
        mode.drain()
