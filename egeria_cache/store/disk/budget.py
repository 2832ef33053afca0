"""The byte limit of one cache directory, over all its generations and all processes.

Every commit happens under one file lock per directory, so that two processes cannot both see the
last free megabyte.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from egeria_cache.errors import StoreError
from egeria_cache.store.disk.claims import (
    IN_USE_NAME,
    SET_ASIDE,
    clear_graves,
    in_use_elsewhere,
    lock_alone,
    remove_directory,
    unlock,
)
from egeria_cache.store.disk.own import is_own_directory, open_own
from egeria_cache.tables import PAGE_BYTES

logger = logging.getLogger("egeria_cache.store")

LOCK_NAME = "cache.lock"
LOCK_WAIT_S = 10.0


def directory_bytes(directory: Path) -> int:
    """Return the bytes all files below use on disk, in whole pages, directories included."""
    pages = 0
    for folder, _, names in os.walk(directory):
        pages += 1
        for name in names:
            with contextlib.suppress(OSError):  # removed while we looked, or not for us to see
                pages += -(-os.lstat(os.path.join(folder, name)).st_size // PAGE_BYTES)
    return pages * PAGE_BYTES


def generation_directories(directory: Path, *, damaged: bool = False) -> list[Path]:
    """Return the generations' directories, by name; also those that were set aside, if asked for.
    Links and what belongs to others are none.
    """
    prefixes = ("gen-", SET_ASIDE) if damaged else ("gen-",)
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(prefixes))
    except OSError:
        return []
    return [directory / name for name in names if is_own_directory(directory / name)]


class Budget:
    """Admits bytes, and makes room by removing whole generations that nobody uses."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock; the kernel drops it if this process dies.

        Raises:
            StoreError: Another process holds it for more than ten seconds (it may be stopped).
        """
        descriptor = open_own(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        try:
            deadline = time.monotonic() + LOCK_WAIT_S
            while not lock_alone(descriptor):
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"{self.directory / LOCK_NAME} is held for too long by another process: is "
                        "that one stopped (SIGSTOP, a debugger)?"
                    )
                time.sleep(0.002)  # flock has no timed wait
            yield
        finally:
            unlock(descriptor, os.getpid())

    def make_room(self, needed_bytes: int) -> int:
        """Return how many bytes may be added; call with the lock held.

        Removes unused generations, oldest use first, while less than `needed_bytes` is free.
        """
        free = self._free_bytes()
        if free < needed_bytes:
            clear_graves(self.directory)
            paths = generation_directories(self.directory, damaged=True)
            for path in sorted(paths, key=last_use):
                if self._free_bytes() >= needed_bytes:
                    break
                if not in_use_elsewhere(path) and remove_directory(path):
                    logger.info("%s removed: unused, and the limit was reached", path)
            free = self._free_bytes()
        return max(free, 0)

    def _free_bytes(self) -> int:
        return self.limit_bytes - directory_bytes(self.directory)


def last_use(directory: Path) -> float:
    """Return when a process last opened or closed the generation, seconds since the epoch."""
    try:
        return (directory / IN_USE_NAME).lstat().st_mtime
    except OSError:
        return 0.0


def remove_generations(directory: Path, names: Iterable[str]) -> list[str]:
    """Remove generations of a cache that no live process uses; return the names of those that are
    gone.

    Raises:
        StoreError: Another process holds the directory's lock.
    """
    with Budget(directory, 0).locked():  # no run opens what is being removed
        unused = [name for name in names if not in_use_elsewhere(directory / name)]
        gone = [name for name in unused if remove_directory(directory / name)]
        clear_graves(directory)
    return gone
