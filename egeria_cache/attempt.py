"""The one gate between the training loop and all that happens beside it.

Dry runs, proofs, checks, audits, comparisons, fingerprints, reads ahead and look-ups call code of
the user's in ways in which the loop never does. What goes wrong there is none of the loop's errors.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from traceback import clear_frames
from types import CodeType, TracebackType
from typing import Any, TypeGuard


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


def place_of(error: BaseException) -> TracebackType | None:
    """Return where it was raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place


def is_ours(error: BaseException) -> bool:
    """Whether it was raised by this package, and by nothing that this has called."""
    place = place_of(error)
    # Generated code, that of torch.fx say, may have no name.
    module = "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == __package__


def _is_of_a_signal(traceback: TracebackType | None) -> bool:
    """Whether a handler of the user's has raised it, which may come between any two lines."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while traceback is not None and handlers:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """Return the code of what handles a signal: a function, a method, a partial, an object."""
    handler = getattr(handler, "func", handler)
    called = handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__")
    return getattr(called, "__code__", None)
