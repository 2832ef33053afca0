"""The one gate between the training loop and all that happens beside it.

Dry runs, proofs, checks, audits, comparisons, fingerprints, reads ahead and look-ups call code of
the user's in ways in which the loop never does. What goes wrong there is none of the loop's errors.
It computes on one core in threads of its own, takes turns at the process's random generators, and
runs under no mode of the loop's.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import clear_frames, walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeGuard

import torch
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

num_dispatch_modes = torch._C._len_torch_dispatch_stack
num_function_modes = torch._C._len_torch_function_stack


class Attempt:
    """A block of what happens beside the loop: an error in it is kept, and not raised.

    What is none of its own goes out unchanged: Ctrl-C, and what a signal's handler has raised.
    """

    __slots__ = ("_but", "_told", "error")

    def __init__(
        self, told: Callable[[Exception], None] | None = None, *, but: type[Exception] | None = None
    ) -> None:
        """Begin; `told` is called with the error. Errors of the kind `but` are the loop's."""
        self.error: Exception | None = None
        self._told, self._but = told, but

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or not is_beside(error) or (self._but and isinstance(error, self._but)):
            return False
        self.error = without_us(error)
        clear_frames(error.__traceback__)
        if self._told is not None:
            self._told(error)
        return True


def is_beside(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether an error that was raised beside the loop is none of the loop's."""
    if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return False
    is_an_error = isinstance(error, Exception) or not is_ours(error)  # what code of ours leaves by
    return is_an_error and not _is_of_a_signal(error.__traceback__)


def without_us(error: Exception) -> Exception:
    """Return it without the frame that has caught it, and holds it: a cycle would keep all that was
    tried in memory.
    """
    traceback = error.__traceback__
    return error.with_traceback(None if traceback is None else traceback.tb_next)


def place_of(error: BaseException) -> tuple[FrameType, int] | None:
    """Return the frame and the line in which it was raised."""
    *_, place = None, *walk_tb(error.__traceback__)
    return place


def is_ours(error: BaseException) -> bool:
    """Whether it was raised by this package, and by nothing that this has called."""
    place = place_of(error)
    # Generated code, that of torch.fx say, may have no name.
    module = "" if place is None else str(place[0].f_globals.get("__name__", ""))
    return module.partition(".")[0] == __package__


def _is_of_a_signal(traceback: TracebackType | None) -> bool:
    """Whether a handler of the user's has raised it, which may come between any two lines."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in walk_tb(traceback))


def _code(handler: Any) -> CodeType | None:
    """Return the code of what handles a signal: a function, a method, a partial, an object."""
    handler = getattr(handler, "func", handler)
    called = handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__")
    return getattr(called, "__code__", None)


# ---- threads, turns and modes -------------------------------------------------------------------

_AS_IT_IS = nullcontext()
_locks: dict[int, threading.Lock] = {}


def compute_on_one_core() -> None:
    """Give the calling thread one core; called first thing in a thread of our own.

    PyTorch gives every thread that computes an OpenMP team of its own, as large as the machine.
    Such a team beside training crowds the cores, and slows every kernel of the training thread.

    What `torch.set_num_threads` sets is also what threads made later start with, the user's too:
    that default is put back, from a thread that ends with it.
    """
    # One for each process: a child forked while it is held would wait for ever.
    with _locks.setdefault(os.getpid(), threading.Lock()):
        default = torch.get_num_threads()
        torch.set_num_threads(1)
        keeper = threading.Thread(target=torch.set_num_threads, args=(default,))
        keeper.start()
        keeper.join()


_turns: dict[int, threading.RLock] = {}
_PATIENCE_S = 60.0


@contextmanager
def in_turns() -> Iterator[None]:
    """Seed, save and put back the process's random generators, as another thread of the user's may:
    one at a time. One that holds them for long, and perhaps waits for this one, is not waited for.
    """
    turn = _turns.setdefault(os.getpid(), threading.RLock())
    is_ours = turn.acquire(timeout=_PATIENCE_S)
    try:
        yield
    finally:
        if is_ours:
            turn.release()


@contextmanager
def uncollected() -> Iterator[None]:
    """Make many objects that are dropped again, with no automatic garbage collection in between: a
    full one takes as long as a proof where large libraries are in memory.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def has_other_operations() -> bool:
    """Tell whether a mode of the caller's stands between an operation and its result; under a
    default device, and under what PyTorch counts operations with, the numbers are the same.
    """
    if not (num_dispatch_modes() or num_function_modes()):
        return False
    if not all(map(_only_counts, _get_current_dispatch_mode_stack())):
        return True
    return any(type(mode) is not DeviceContext for mode in _function_modes())


_COUNTERS = {"torch.utils.flop_counter", "torch.distributed.tensor.debug"}


def _only_counts(mode: object) -> bool:
    return any(base.__module__ in _COUNTERS for base in type(mode).__mro__)


def without_modes() -> AbstractContextManager[None]:
    """Compute what a thread of ours would compute: the modes of the calling thread (one of fake
    tensors, one that counts operations, a default device) are not that one's.
    """
    has_modes = num_dispatch_modes() or num_function_modes()
    if not has_modes:
        return _AS_IT_IS
    return _within(torch._C.DisableTorchFunction(), _disable_current_modes())


def outside_inference_mode() -> AbstractContextManager[None]:
    """Make ordinary tensors, also where inference mode is on: those have a version counter."""
    if not torch.is_inference_mode_enabled():
        return _AS_IT_IS
    return _within(torch.inference_mode(False), torch.no_grad())


@contextmanager
def _within(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield
