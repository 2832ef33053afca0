"""The threads that help serving a batch: they sleep in the kernel, and take records of a batch
beside whoever reads it, as far as that pays by what was measured.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Hashable

from egeria_cache.store.native import Kernel, Pace

__all__ = ["WORTH_NS", "Helpers"]

WORTH_NS = 150_000
"""What each helper must find to do, by what was measured; 0: they help with everything."""
WORTH_BYTES = 2**19
"""Of a batch, decoded; below, they need not be started."""


class Helpers:
    """Owns the threads. Any number of callers at a time, of which one is helped.

    Nothing here waits for a lock of Python's: signal handlers and the collector may read or close,
    too, in the middle of anything.
    """

    def __init__(self, num_threads: int) -> None:
        self.address: int | None = None
        """Where they are, once they were started."""
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._first = threading.Lock()
        """Whoever gets it starts them; it is kept."""
        self._struct: ctypes.Array[ctypes.c_char] | None = None
        self._kernel: Kernel | None = None
        self._is_closed = False
        self._process = os.getpid()
        self._paces: defaultdict[Hashable, Pace] = defaultdict(Pace)

    def pace(self, kind: Hashable) -> Pace:
        """Return what is known of records of one layout, in one generation."""
        return self._paces[kind]

    def at(self, num_bytes: int, kernel: Kernel) -> int | None:
        """Return where they are, for a batch of so many bytes; the first large one starts them."""
        if self.address is None and num_bytes >= WORTH_BYTES and self._num_threads:
            self._start(kernel)
        return self.address

    def _start(self, kernel: Kernel) -> None:
        if self._is_closed or not self._first.acquire(blocking=False):
            return
        struct = ctypes.create_string_buffer(kernel.helpers_bytes)
        kernel.begin_helpers(ctypes.addressof(struct), self._num_threads, WORTH_NS)
        self._kernel, self._struct = kernel, struct
        for _ in range(self._num_threads):
            thread = threading.Thread(
                target=_help, args=(kernel, struct), name="egeria-help", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no more: nobody comes who is not there
                break
            self._threads.append(thread)
        if self._is_closed:  # meanwhile, perhaps before there was anything to end
            kernel.end_helpers(ctypes.addressof(struct))
        else:
            self.address = ctypes.addressof(struct)

    def close(self) -> None:
        """Join the threads. Idempotent."""
        if os.getpid() != self._process:  # they stayed behind, and perhaps held their lock
            return
        self._is_closed, self.address = True, None
        if self._kernel is not None and self._struct is not None:
            self._kernel.end_helpers(ctypes.addressof(self._struct))
        for thread in self._threads:
            if thread is not threading.current_thread():  # which may be collecting
                thread.join()


def _help(kernel: Kernel, struct: ctypes.Array[ctypes.c_char]) -> None:
    unpacker = kernel.unpacker()
    kernel.help(ctypes.addressof(struct), unpacker.context)
