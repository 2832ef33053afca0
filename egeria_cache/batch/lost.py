"""The first operation on a new batch after which its rows are no longer known: for explanations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["forget_lost", "lost_by", "note_lost"]

_LOCAL = threading.local()


def note_lost(func: Callable[..., Any], leaf: str, result: Any) -> None:
    """Note that `func` took a leaf of a batch and gave an ordinary tensor."""
    parts = result if isinstance(result, tuple | list) else (result,)
    if lost_by() is None and any(isinstance(part, Tensor) for part in parts):
        name = getattr(func, "__name__", str(func))
        _LOCAL.lost = f"{name!r} of the leaf {leaf!r}" if leaf else f"{name!r} of the batch"


def forget_lost() -> None:
    """Another batch is given out in this thread."""
    _LOCAL.lost = None


def lost_by() -> str | None:
    """Name the operation and the leaf; None if there was none since the last batch."""
    found: str | None = getattr(_LOCAL, "lost", None)
    return found
