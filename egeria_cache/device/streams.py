"""Order on a device: queues of copies beside the training step's own work, and points in them."""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from egeria_cache.device.kinds import accelerator, current, runs_late

_THREAD_LOCAL = 1
"""As CUDA and HIP number the ways in which a thread may have to do with captures."""


class Event:
    """A point in what a device was given to do; PyTorch's event is recorded anew, for another one,
    once nobody asks for this.
    """

    __slots__ = ("_spare", "event")

    def __init__(self, event: Any, spare: list[Any]) -> None:
        self.event, self._spare = event, spare

    def synchronize(self) -> None:
        """Wait until the device is there."""
        self.event.synchronize()

    def query(self) -> bool:
        """Whether it is there."""
        return bool(self.event.query())

    def __del__(self) -> None:
        self._spare.append(self.event)


class Streams:
    """The streams and events of one device, as `torch.accelerator` has them.

    Whatever touches the device is given to it while it is the thread's current one. PyTorch's own
    way, from another device and back, sets that other one again: a thread of ours, whose current
    device is the first, would begin a context there, of some hundred megabytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: list[Any] = []

    def current(self) -> Any:
        """The stream that this thread's kernels go to."""
        return torch.accelerator.current_stream(self.device)

    def another(self) -> Any:
        """A stream beside it."""
        with current(self.device):
            return torch.Stream(self.device)

    def record(self, stream: Any) -> Event:
        """Return the point after all that a stream was given so far."""
        with current(self.device):
            try:
                event = self._spare.pop()
            except IndexError:
                event = torch.Event(self.device)
            event.record(stream)
        return Event(event, self._spare)

    def order(self, point: Any, stream: Any) -> None:
        """What a stream is given from now on runs after `point`. The host does not wait."""
        with current(self.device):
            stream.wait_event(point.event)

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Give what this thread does inside the block to a stream.

        Not the stream's own context: it keeps what was before in the stream, which threads share.
        """
        with current(self.device):
            before = self.current()
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)


def leave_captures_alone() -> None:
    """What the calling thread does from now on breaks no capture of a graph in another thread.

    While one captures in "global" mode, PyTorch's default, all others must not allocate, nor ask
    whether an event is past; unless they have said by this that they are no part of it.
    """
    for library, call in (
        ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
        ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
    ):
        with suppress(OSError, AttributeError):  # it is no such device's driver
            getattr(ctypes.CDLL(library), call)(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


def streams_of(device: torch.device) -> Streams | None:
    """Return a device's streams; None where it has none and does everything in order."""
    return _tried(device) if runs_late(device) else None


@functools.cache
def _tried(device: torch.device) -> Streams | None:
    """Return the streams if all that is asked of them works: nothing but a trial tells."""
    kind, streams = accelerator(), Streams(device)
    if kind is None or kind.type != device.type:
        return None
    try:
        current, another = streams.current(), streams.another()
        event: Any = streams.record(current)
        streams.order(event, another)
        with streams.use(another):
            torch.zeros(1, device=streams.device)
        event = streams.record(another)
        streams.order(event, current)
        event.query()
        event.synchronize()
    except Exception:  # of any kind: each device says in its own way what it lacks
        return None
    return streams


def mark(device: torch.device) -> Event | None:
    """Return the point after all that this thread has given a device; None where it keeps order."""
    streams = streams_of(device)
    return None if streams is None else streams.record(streams.current())


class Held:
    """Tensors that copies under way still use: their memory must not be given to others before.

    Not `Tensor.record_stream`, which not every device has, and which says nothing of the host's
    memory. What is no longer used is let go of with the next call; nobody waits.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[Event, Any]] = deque()

    def hold(self, what: Any, until: Event | None) -> None:
        """Keep `what` until a point is passed; None: it is."""
        while self._held and self._held[0][0].query():
            self._held.popleft()
        if until is not None:
            self._held.append((until, what))


class Lane:
    """A queue of copies beside the training step's kernels; where there are no streams, among them.

    Not thread-safe: whoever shares one has a lock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        self._home = None if self._streams is None else self._streams.current()
        self._stream = None if self._streams is None else self._streams.another()
        self.held = Held()
        """What copies in this lane still use."""

    @contextmanager
    def use(self) -> Iterator[None]:
        """Queue what this thread gives the device inside the block."""
        if self._streams is None:
            yield
        else:
            with self._streams.use(self._stream):
                yield

    def follow(self, event: Event | None) -> None:
        """What is queued from now on runs after `event`. The host does not wait."""
        if self._streams is not None and event is not None:
            self._streams.order(event, self._stream)

    def follow_current(self) -> None:
        """What is queued from now on runs after all that this thread has given the device."""
        if self._streams is not None:
            self.follow(self._streams.record(self._streams.current()))

    def lead(self, event: Event | None) -> None:
        """What this thread gives the device from now on runs after `event`, a point in any lane."""
        if self._streams is not None and event is not None:
            self._streams.order(event, self._streams.current())

    def rejoin(self) -> None:
        """Memory that was allocated where the lane was made may be given to others from now on.

        It is used there only after all that the lane, and this thread, were given.
        """
        if self._streams is not None:
            for stream in (self._stream, self._streams.current()):
                self._streams.order(self._streams.record(stream), self._home)

    def mark(self) -> Event | None:
        """Return the point after what was queued so far; None where it is done already."""
        return None if self._streams is None else self._streams.record(self._stream)
