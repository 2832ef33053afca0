"""What runs beside the loop may not be heard, nor change the world, nor step an optimizer.

Streams, filters and hooks are the whole process's. Each of these asks whether the code that calls
it runs beside the loop, which a context variable says: other threads do not notice, and what an
interrupt leaves behind does nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar, copy_context
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import is_installed_code, is_library

_OPENERS = (__name__, "pathlib", "pathlib._local", "pathlib._abc", "codecs", "gzip")
"""Modules of Python's that open what they are given."""
_CHANGES = {
    "builtins": "open",
    "io": "open",
    "pathlib._normal_accessor": "open",
    "os": "open read write pread pwrite readv writev sendfile truncate ftruncate mkdir mkfifo link "
    "symlink rename replace remove unlink rmdir chdir chmod chown utime setxattr removexattr lockf "
    "system fork forkpty posix_spawn posix_spawnp execv execve kill killpg",
    "socket.socket": "bind connect connect_ex send sendall sendmsg sendto",
    "sqlite3": "connect",
    "subprocess.Popen": "__init__",
    "torch._C": "PyTorchFileWriter",
}
"""What cannot be taken back, where all of Python's own libraries find it. Of what is opened: to be
written, and what code of the user's opens at all, which each run would read again.
"""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_WRITING = frozenset("wax+")
_BY_NUMBER = frozenset({"os.read", "os.write", "os.pread", "os.pwrite", "os.readv", "os.writev"})
_SHOWN = (str, bytes, int, list, tuple, os.PathLike)
_ONCE = (
    "importlib.", "logging", "numba.", "torch._dynamo.convert_frame", "torch._inductor.",
    "torch.utils.cpp_extension", "triton.",
)  # fmt: skip
"""What imports, compiles and logs does so once, whoever is the first to ask."""
_BESIDE: ContextVar[Any] = ContextVar("egeria_beside", default=())
"""A list with what was refused, not empty while this runs beside the loop; what outlives that finds
it empty.
"""


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; context variables that it sets are its own."""
    return copy_context().run(quietly_here, function, *args, **kwargs)


def quietly_here(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; context variables that it sets stay so in this context, a copy.

    What it prints, warns of and logs is dropped: the loop's own call says it. Loggers of libraries
    are left: some say a thing once only. What it saves for a gradient is seen by no hook of the
    loop's.

    Raises:
        BoundaryError: An optimizer steps: it would count that; or what cannot be taken back was to
            be done, even if the code has made do without.
    """
    state: list[BoundaryError | None] = [None]
    _BESIDE.set(state)
    with ExitStack() as stack:
        stack.callback(state.clear)
        stack.callback(register_optimizer_step_pre_hook(_refuse).remove)
        for name in ("stdout", "stderr"):
            _put(stack, sys, name, _Muted)
        _put(stack, logging.Logger, "handle", _unheard)  # not a filter of each: there are hundreds
        for path, names in _CHANGES.items():
            holder = _loaded(path)
            for name in names.split():
                _put(stack, holder, name, partial(_told, f"{path}.{name}"))
        _unhook_saving(stack)
        _leave_modes(stack)
        # In place: `catch_warnings` would forget what was said once.
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        filters.insert(0, _IGNORE)
        stack.callback(_no_more, filters)
        try:
            return function(*args, **kwargs)
        finally:
            if state[0] is not None and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
                raise state[0]


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _BESIDE.get():
        raise BoundaryError(
            f"the forward steps an optimizer ({type(optimizer).__name__}), and a dry run "
            "would do that again; step it in the training loop"
        )


def _put(stack: ExitStack, holder: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Have what is made of something stand in its place meanwhile."""
    before = getattr(holder, name, None)
    if before is not None and getattr(before, "__module__", "") != __name__:
        ours = make(before)
        stack.callback(_put_back, holder, name, before, ours)
        setattr(holder, name, ours)


def _put_back(holder: Any, name: str, before: Any, ours: Any) -> None:
    if getattr(holder, name) is ours:
        setattr(holder, name, before)


def _unheard(heard: Callable[..., None]) -> Callable[..., None]:
    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not _BESIDE.get() or is_library(logger.name):
            heard(logger, record)

    return handle


def _loaded(path: str) -> Any:
    """Return a module, or a class of one, if that is loaded."""
    module, _, name = path.rpartition(".")
    return sys.modules.get(path) or getattr(sys.modules.get(module), name, None)


@lru_cache(256)
def _told(what: str, does: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        state = _BESIDE.get()
        if state and _is_refused(what, args, kwargs, sys._getframe(1)):
            given = next((repr(one) for one in args if isinstance(one, _SHOWN)), "...")
            state[0] = BoundaryError(
                f"{what}({given}) cannot be taken back, and a dry run would do it once more; keep "
                "it out of the model's forward"
            )
            raise state[0]
        return does(*args, **kwargs)

    return told


def _is_refused(what: str, args: Any, kwargs: Any, frame: FrameType | None) -> bool:
    """Whether a dry run would do what the loop does once more; not what is done once, by whoever
    comes first, nor what a library reads.
    """
    if _only_reads(what, args, kwargs):
        while frame is not None and frame.f_globals.get("__name__") in _OPENERS:
            frame = frame.f_back
        return frame is not None and not is_installed_code(frame.f_code)
    while frame is not None and frame.f_code is not quietly_here.__code__:
        if str(frame.f_globals.get("__name__")).startswith(_ONCE):
            return False
        frame = frame.f_back
    return what != "torch._C.PyTorchFileWriter" or isinstance(args[0], str)


def _only_reads(what: str, args: Any, kwargs: Any) -> bool:
    """Whether a file is opened to be read, or what is open by a number is: libraries use pipes of
    their own.
    """
    if what == "os.open":
        return not _WRITES & (args[1] if len(args) > 1 else kwargs.get("flags", 0))
    if what.endswith(".open"):
        return _WRITING.isdisjoint(args[1] if len(args) > 1 else kwargs.get("mode", "r"))
    return what in _BY_NUMBER


def _leave_modes(stack: ExitStack) -> None:
    """Let no mode of the loop see what is computed here: a counter of operations, say."""
    modes = stack.enter_context(_disable_current_modes())
    for mode in modes[::-1]:
        if type(mode).__module__.startswith("egeria_cache."):
            _push_mode(mode)
            stack.callback(_pop_mode)


def _unhook_saving(stack: ExitStack) -> None:
    """Let no region that the loop checkpoints count what is saved for a gradient here."""
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        stack.callback(torch._C._autograd._push_saved_tensors_default_hooks, *hooks)


class _Beside:
    """Stands for the pattern of a filter of warnings."""

    def match(self, module: str) -> bool:
        return bool(_BESIDE.get())


_IGNORE: Any = ("ignore", None, Warning, _Beside(), 0)


def _no_more(filters: list[Any]) -> None:
    while _IGNORE in filters:
        filters.remove(_IGNORE)


class _Muted:
    """Stands for a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return len(text) if _BESIDE.get() else self._stream.write(text)
