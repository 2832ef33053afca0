"""What runs beside the loop may not be heard, nor step an optimizer.

Streams, filters and hooks are the whole process's. Each of these asks whether the code that calls
it runs beside the loop, which a context variable says: other threads do not notice, and what an
interrupt leaves behind does nothing.
"""

from __future__ import annotations

import builtins
import io
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context, ContextVar, copy_context
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _pop_mode, _push_mode

from egeria_cache.errors import BoundaryError
from egeria_cache.pystate import is_installed_code, is_library

_OPENERS = ("pathlib", "pathlib._local", "codecs", "gzip")
"""Modules of Python's that open what they are given."""
_IS_BESIDE: ContextVar[bool] = ContextVar("egeria_beside", default=False)


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; context variables that it sets are its own."""
    return quietly_in(copy_context(), function, *args, **kwargs)


def quietly_in(context: Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, with context variables as a call before has left them there.

    What it prints, warns of and logs is dropped: the loop's own call says it. Loggers of libraries
    are left: some say a thing once only. What it saves for a gradient is seen by no hook of the
    loop's.

    Raises:
        BoundaryError: An optimizer steps: it would count that.
    """
    return context.run(_run, function, args, kwargs)


def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _IS_BESIDE.set(True)
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(_refuse).remove)
        for name in ("stdout", "stderr"):
            _mute(name, stack)
        _mute_loggers(stack)
        _open_nothing(stack)
        _unhook_saving(stack)
        _leave_modes(stack)
        # In place: `catch_warnings` would forget what was said once.
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        filters.insert(0, _IGNORE)
        stack.callback(_no_more, filters)
        return function(*args, **kwargs)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _IS_BESIDE.get():
        raise BoundaryError(
            f"the forward steps an optimizer ({type(optimizer).__name__}), and a dry run "
            "would do that again; step it in the training loop"
        )


def _mute_loggers(stack: ExitStack) -> None:
    heard = logging.Logger.handle  # not a filter of each: there are hundreds
    if heard.__module__ == __name__:
        return

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not _IS_BESIDE.get() or is_library(logger.name):
            heard(logger, record)

    stack.callback(setattr, logging.Logger, "handle", heard)
    logging.Logger.handle = handle  # type: ignore[assignment,method-assign]


def _open_nothing(stack: ExitStack) -> None:
    """What each run would read or write again is no part of it: neither `open` nor a path opens
    anything for code of the user's.
    """
    for module in (builtins, io):
        opens: Any = module.open
        if getattr(opens, "func", None) is not _open:
            stack.callback(setattr, module, "open", opens)
            module.open = partial(_open, opens)  # type: ignore[attr-defined]


def _open(opens: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _IS_BESIDE.get() and _is_users_call(sys._getframe(1)):
        raise BoundaryError(
            "open cannot be copied, so that a dry run would use it up; "
            "keep it out of the model's forward"
        )
    return opens(*args, **kwargs)


def _is_users_call(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in _OPENERS:
        frame = frame.f_back
    return frame is not None and not is_installed_code(frame.f_code)


def _leave_modes(stack: ExitStack) -> None:
    """Let no mode of the loop see what is computed here: a counter of operations, say."""
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    ours = [mode for mode in modes[::-1] if type(mode).__module__.startswith("egeria_cache.")]
    for mode in ours:
        _push_mode(mode)

    def enter_again() -> None:
        for _ in ours:
            _pop_mode()
        for mode in modes[::-1]:
            _push_mode(mode)

    stack.callback(enter_again)


def _unhook_saving(stack: ExitStack) -> None:
    """Let no region that the loop checkpoints count what is saved for a gradient here."""
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        stack.callback(torch._C._autograd._push_saved_tensors_default_hooks, *hooks)


class _Beside:
    """Stands for the pattern of a filter of warnings."""

    def match(self, module: str) -> bool:
        return _IS_BESIDE.get()


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
        return len(text) if _IS_BESIDE.get() else self._stream.write(text)


def _mute(name: str, stack: ExitStack) -> None:
    stream = getattr(sys, name)
    if stream is None or isinstance(stream, _Muted):
        return
    muted = _Muted(stream)

    def put_back() -> None:
        if getattr(sys, name) is muted:
            setattr(sys, name, stream)

    stack.callback(put_back)
    setattr(sys, name, muted)
