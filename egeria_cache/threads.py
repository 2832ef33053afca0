"""How the threads that work beside training compute: on one core each, and under no mode."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

num_dispatch_modes = torch._C._len_torch_dispatch_stack
num_function_modes = torch._C._len_torch_function_stack
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


def has_modes() -> bool:
    """Tell whether the calling thread is under such a mode."""
    return num_dispatch_modes() > 0 or num_function_modes() > 0


def has_other_operations() -> bool:
    """Tell whether a mode of the caller's stands between an operation and its result; under a
    default device, and under what PyTorch counts operations with, the numbers are the same.
    """
    if not has_modes():
        return False
    if not all(map(_only_counts, _get_current_dispatch_mode_stack())):
        return True
    return any(type(mode) is not DeviceContext for mode in _function_modes())


_COUNTERS = {"torch.utils.flop_counter", "torch.distributed.tensor.debug"}


def _only_counts(mode: TorchDispatchMode) -> bool:
    return any(base.__module__ in _COUNTERS for base in type(mode).__mro__)


def without_modes() -> AbstractContextManager[None]:
    """Compute what a thread of ours would compute: the modes of the calling thread (one of fake
    tensors, one that counts operations, a default device) are not that one's.
    """
    return _disable_modes() if has_modes() else nullcontext()


@contextmanager
def _disable_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def outside_inference_mode() -> AbstractContextManager[None]:
    """Make ordinary tensors, also where inference mode is on: those have a version counter."""
    return _ordinary() if torch.is_inference_mode_enabled() else _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
