"""What an accelerator is: the only file that knows, and that names a kind of device.

Built on `torch.accelerator` and `torch.get_device_module`, so that one code serves every device
that PyTorch knows, also one that is registered from outside. What a device lacks is done without:
where there are no streams or events, or no page-locked memory, copies run in order, and whoever
starts one waits for it. It holds no model and no batch, and decides nothing about caching.

First which devices there are, what they are called, and the states of their generators; then what
orders that which they are given to do; then copies both ways.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.ragged import PaddedRows

_NAMED = ("cuda", "xpu", "mps", "mtia", "hpu", "ipu", "maia")
"""Kinds after which `Tensor` has methods and flags whether or not there is such a device."""

FOREIGN_PACKAGES = ("torch.accelerator", *(f"torch.{kind}" for kind in _NAMED))
"""Packages whose objects are no part of a model's state."""

LEAF_FLAGS = tuple(
    flag for flag in ("is_cpu", *(f"is_{kind}" for kind in _NAMED)) if hasattr(Tensor, flag)
)
"""Properties of a tensor that say where it is."""

_LEFT_ALONE = 64
"""So small a part of a device's memory is never taken: what PyTorch does not count lies there."""
_SMALL_SIZES = 2 * tuple(1 << n for n in range(13))
"""Verdicts, numbers of samples, labels; PyTorch rounds sizes up to powers of two."""
Event = torch.Event
_THREAD_LOCAL = 1
"""As CUDA and HIP number the ways in which a thread may have to do with captures."""

# ---- which devices there are ---------------------------------------------------------------------


def _accelerator() -> torch.device | None:
    """Return the kind of accelerator that can be used, without an index; None: there is none."""
    kind = torch.accelerator.current_accelerator()
    with suppress(RuntimeError, AttributeError):  # its module does not say
        return kind if torch.accelerator.is_available() else None
    return kind


def _is_usable(device: torch.device) -> bool:
    """Whether a device is of the kind of accelerator that can be used."""
    return runs_late(device) and default_device().type == device.type


def default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return _accelerator() or torch.device("cpu")


def located(device: torch.device) -> torch.device:
    """Return the device that tensors are on which were moved there: never without an index."""
    if device.index is not None or not runs_late(device):
        return torch.device("cpu") if device.type == "cpu" else device
    index = 0
    with suppress(RuntimeError):  # it has but one
        index = torch.accelerator.current_device_index() if _is_usable(device) else 0
    return torch.device(device.type, max(0, index))


def device_of(model: nn.Module) -> torch.device:
    """Where the model is, as far as it is on this rank; the CPU if it has no tensor."""
    tensors = chain(model.parameters(), model.buffers())
    tensor = next((tensor for tensor in tensors if not tensor.is_meta), None)
    return torch.device("cpu") if tensor is None else tensor.device


def runs_late(device: torch.device | str) -> bool:
    """Whether what a device is given to do may run after the call that gave it has returned.

    To read a value from it makes the host wait then, and time is not to be taken without waiting.
    """
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    return kind not in ("cpu", "meta")


def _module_of(device: torch.device) -> Any:
    """Return PyTorch's module for a kind of device; None where there is none."""
    with suppress(RuntimeError, AttributeError):
        return torch.get_device_module(device)
    return None


def _module_in_use() -> Any:
    """Return the module of the accelerator that is in use in this process; None without one.

    A forked child of a process that used it cannot.
    """
    kind = _accelerator()
    module = None if kind is None else _module_of(kind)
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    return None if getattr(module, "_is_in_bad_fork", lambda: False)() else module


def synchronize() -> None:
    """Wait until the accelerator, if it is used, has done all it was given to do."""
    module = _module_in_use()
    if module is None:
        return
    try:
        torch.accelerator.synchronize()
    except RuntimeError:  # it cannot be asked so
        getattr(module, "synchronize", lambda: None)()


def device_name(device: torch.device) -> str | None:
    """Return what a device is called by its maker; its kind where nobody says; None for the CPU."""
    if not runs_late(device):
        return None
    name = getattr(_module_of(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def autocast_kinds() -> tuple[str, ...]:
    """Return the kinds of devices for which autocast may be on."""
    kind = torch.accelerator.current_accelerator()
    return ("cpu",) if kind is None else ("cpu", kind.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute on a device in the numbers' own precision inside the block."""
    with suppress(RuntimeError, AssertionError):  # a device that has no autocast
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def moved_to(func: Callable[..., Any]) -> str | None:
    """Return the kind of device that a method of `Tensor` is named after; None for others.

    `x.cuda()` and its like: a device that is registered from outside gives `Tensor` one, too.
    """
    name = getattr(func, "__name__", "")
    if name not in (*_NAMED, *autocast_kinds()[1:]):
        return None
    return name if getattr(Tensor, name, None) is func else None


def random_states() -> tuple[Tensor, ...]:
    """Copy the states of all devices' generators; nothing where none is used, or none has any."""
    module = _module_in_use()
    with suppress(Exception):  # of any kind: it has none, and draws from the host's
        of_all = getattr(module, "get_rng_state_all", None)
        return tuple(of_all()) if of_all else (module.get_rng_state(),)
    return ()


def set_random_states(states: Sequence[Tensor]) -> None:
    """Put back what `random_states` gave. States of other devices than there are now are left."""
    module = _module_in_use()
    if module is None or not states or len(states) != len(random_states()):
        return
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(list(states))
    else:
        module.set_rng_state(states[0])


def seed_devices(number: int) -> None:
    """Begin the generators of the devices in use anew.

    `torch.manual_seed` also notes the seed, with a stack of frames, for every kind of device that
    is not in use: a hundred times as long, and more in deeper calls.
    """
    module = _module_in_use()
    seed = getattr(module, "manual_seed_all", getattr(module, "manual_seed", None))
    if seed is not None:
        seed(number)


def fp32_precision() -> Any:
    """Return how exactly kernels multiply numbers of 32 bits: "highest", if not told otherwise."""
    with suppress(RuntimeError):  # it was told by backend
        return torch.get_float32_matmul_precision()
    backends: Any = torch.backends
    return backends.mkldnn.matmul.fp32_precision, backends.cuda.matmul.fp32_precision


# ---- order on a device ---------------------------------------------------------------------------


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the calling thread's current one inside the block.

    Whatever touches a device is given to it inside. The one before is set again only if it is in
    use by this process. PyTorch's own way, from another device and back, sets it all the same: a
    thread of ours, whose current device is the first, would begin a context there, of some hundred
    megabytes.
    """
    return torch.accelerator.device_index(device.index)


def _record(device: torch.device, stream: Any) -> Event:
    """Return the point after all that a stream was given so far."""
    with _current(device):
        event = Event(device)
        event.record(stream)
    return event


def _order(device: torch.device, point: Event, stream: Any) -> None:
    """What a stream is given from now on runs after `point`. The host does not wait."""
    with _current(device):
        stream.wait_event(point)


@contextmanager
def _use(device: torch.device, stream: Any) -> Iterator[None]:
    """Give what this thread does inside the block to a stream.

    Not the stream's own context: it keeps what was before in the stream, which threads share.
    """
    with _current(device):
        before = torch.accelerator.current_stream(device)
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


@functools.cache
def _has_streams(device: torch.device) -> bool:
    """Whether all that is asked of a device's streams works: nothing but a trial tells."""
    if not _is_usable(device):
        return False
    try:
        lane = Lane(device, has_streams=True)
        lane.follow(_record(device, torch.accelerator.current_stream(device)))
        with lane.use():
            torch.zeros(1, device=device)
        event: Any = lane.mark()
        lane.lead(event)
        event.query()
        event.synchronize()
    except Exception:  # of any kind: each device says in its own way what it lacks
        return False
    return True


def mark(device: torch.device) -> Event | None:
    """Return the point after all that this thread has given a device; None where it keeps order."""
    if not _has_streams(device):
        return None
    return _record(device, torch.accelerator.current_stream(device))


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

    def __init__(self, device: torch.device, has_streams: bool | None = None) -> None:
        self.device = device
        self._home = self._stream = None
        if _has_streams(device) if has_streams is None else has_streams:
            self._home = torch.accelerator.current_stream(device)
            with _current(device):
                self._stream = torch.Stream(device)
        self.held = Held()
        """What copies in this lane still use."""

    def use(self) -> AbstractContextManager[None]:
        """Queue what this thread gives the device inside the block."""
        return nullcontext() if self._stream is None else _use(self.device, self._stream)

    def follow(self, event: Event | None) -> None:
        """What is queued from now on runs after `event`. The host does not wait."""
        if event is not None:
            _order(self.device, event, self._stream)

    def follow_current(self) -> None:
        """What is queued from now on runs after all that this thread has given the device."""
        self.follow(mark(self.device))

    def lead(self, event: Event | None) -> None:
        """What this thread gives the device from now on runs after `event`, a point in any lane."""
        if event is not None:
            _order(self.device, event, torch.accelerator.current_stream(self.device))

    def rejoin(self) -> None:
        """Memory that was allocated where the lane was made may be given to others from now on.

        It is used there only after all that the lane, and this thread, were given.
        """
        for event in (self.mark(), mark(self.device)):
            if event is not None:
                _order(self.device, event, self._home)

    def mark(self) -> Event | None:
        """Return the point after what was queued so far; None where it is done already."""
        return None if self._stream is None else _record(self.device, self._stream)


# ---- copies between host and device, and the page-locked memory that they run from ---------------


@functools.cache
def pins(device: torch.device) -> bool:
    """Whether copies to and from a device can run beside the host, from page-locked memory."""
    with suppress(Exception):  # of any kind: each device says in its own way what it lacks
        return _is_usable(device) and bool(torch.empty(1, pin_memory=True).is_pinned())
    return False


def copies_beside(device: torch.device) -> bool:
    """Whether a copy to or from a device can be started without waiting for it."""
    return pins(device) and _has_streams(device)


def room(device: torch.device) -> int | None:
    """Return how many bytes of a device may be taken beside training; None: it does not say.

    Half of what was free even when training, this process's, took most so far. A step begins with
    little and ends with little: what is free between two says nothing of what it needs.
    """
    module: Any = _module_of(device) if runs_late(device) else None
    with suppress(Exception):  # of any kind: each device says in its own way what it lacks
        free, total = module.mem_get_info(device)
        kept, most = module.memory_reserved(device), module.max_memory_allocated(device)
        return max(0, int(free + kept - most - total // _LEFT_ALONE) // 2)
    return None


def lock_ahead(sizes: Iterable[int], device: torch.device) -> None:
    """Lock the pages now that copies with a device will need: it waits while that is done.

    PyTorch gives what was freed to whoever asks for about as much, in any thread.

    Args:
        sizes: Bytes of the pieces that will be in use at a time; small ones come besides.
        device: Nothing is done where it has no use for such memory.
    """
    if pins(device):
        with suppress(RuntimeError):  # no memory left: whoever needs it asks again
            [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in (*sizes, *_SMALL_SIZES)]


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
        return tensor.to(device)  # itself, where it is there
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


_to_host_lane, _to_host_lock = functools.cache(Lane), threading.Lock()


def batch_to_host(
    fields: Mapping[str, Tensor | Sequence[Any]],
) -> tuple[dict[str, Tensor | Sequence[Any]], tuple[Event, ...]]:
    """Return the fields in host memory, and the events to wait for before reading them.

    They are copied in a lane of their own, beside the training step's kernels; the caller does not
    wait, where the device can copy beside it. Host tensors pass through untouched.
    """
    events = list[Event | None]()

    def fetched(item: Any) -> Any:
        if not isinstance(item, Tensor) or not runs_late(item.device):
            return item
        lane = _to_host_lane(item.device)
        lane.follow_current()
        with lane.use():
            copy = to_host(item)
        events.append(lane.mark())
        # The step may let go of a tensor, and a full queue of its copy, before that is done.
        lane.held.hold((item, copy), events[-1])
        return copy

    moved: dict[str, Tensor | Sequence[Any]] = {}
    with _to_host_lock:
        for name, value in fields.items():
            if isinstance(value, PaddedRows):  # one copy, not one a row
                moved[name] = PaddedRows(fetched(value.padded), value.dims, value.sizes)
            elif isinstance(value, Tensor):
                moved[name] = fetched(value)
            else:
                moved[name] = [*map(fetched, value)]
    return moved, tuple(event for event in events if event is not None)
