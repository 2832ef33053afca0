"""The threads that help serving a batch: they sleep in the kernel, and take records of a batch
beside whoever reads it, as far as that pays by what was measured.
"""

from __future__ import annotations

import ctypes
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
    """Owns the threads. Any number of callers at a time, of which one is helped."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._kernel: Kernel | None = None
        self.address: int | None = None
        """Where they are, once they were started."""
        self._is_closed = False
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
        with self._lock:
            if self.address is not None or self._is_closed:
                return
            self._kernel, self._struct = kernel, ctypes.create_string_buffer(kernel.helpers_bytes)
            self.address = ctypes.addressof(self._struct)
            kernel.begin_helpers(self.address, self._num_threads, WORTH_NS)
            for _ in range(self._num_threads):
                thread = threading.Thread(
                    target=_help, args=(kernel, self._struct), name="egeria-help", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the system has no more: nobody comes who is not there
                    break
                self._threads.append(thread)

    def close(self) -> None:
        """Join the threads. Idempotent."""
        with self._lock:
            self._is_closed, self.address = True, None
            if self._kernel is not None:
                self._kernel.end_helpers(ctypes.addressof(self._struct))
        for thread in self._threads:
            thread.join()


def _help(kernel: Kernel, struct: ctypes.Array[ctypes.c_char]) -> None:
    unpacker = kernel.unpacker()
    kernel.help(ctypes.addressof(struct), unpacker.context)
