"""Who uses a generation's directory; setting it aside, and its removal. The locks are the kernel's:
any death drops them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import weakref
from pathlib import Path

from egeria_cache.store.disk.own import is_own_directory, open_own

IN_USE_NAME = "in-use"
GRAVE, SET_ASIDE = ".gone-", "damaged-"
"""What a generation is renamed to before its files are unlinked one by one; and if it cannot be
opened for damage, which no run removes for that."""
MANIFEST_NAME = "manifest.json"
OUR_FILES = (
    "records.bin", "index.bin", "data.mdb", "lock.mdb", IN_USE_NAME, MANIFEST_NAME,
)  # fmt: skip
"""In the order of their removal: what carries no manifest any more holds nothing else of ours.
Those of earlier formats are among them."""


def remove_directory(directory: Path) -> bool:
    """Unlink a generation; readers of other processes keep its files until they close them.

    Only a real directory of this user's that carries our manifest, or nothing, is touched; of what
    lies in it, only files of ours.

    Returns:
        Whether it is gone.
    """
    ours = is_own_directory(directory) and (directory / MANIFEST_NAME).is_file()
    grave = directory.with_name(f"{GRAVE}{directory.name}-{os.getpid()}-{time.time_ns():x}")
    with contextlib.suppress(OSError):
        if not ours:
            directory.rmdir()  # an empty one: a beginning that was cut short
        elif not (set(os.listdir(directory)) - {*OUR_FILES} - {*_beginnings(directory)}):
            directory.rename(grave)  # one step: nobody opens a half-removed generation
            _bury(grave)
    return not os.path.lexists(directory)


def clear_graves(directory: Path) -> None:
    """Finish removals that a kill interrupted: what is left of them counts against the limit."""
    for grave in directory.glob(f"{GRAVE}*"):
        if is_own_directory(grave):
            _bury(grave)


def set_aside(directory: Path) -> Path:
    """Rename a damaged generation, for a look at it and for `prune --damaged`; return where to.

    Raises:
        OSError: It cannot be renamed.
    """
    aside = directory.with_name(f"{SET_ASIDE}{directory.name}-{time.time_ns():x}")
    return directory.rename(aside)


def in_use_elsewhere(directory: Path) -> bool:
    """Tell whether any live process, this one included, holds the generation; if that cannot be
    told, it does.
    """
    try:
        descriptor = open_own(directory / IN_USE_NAME, os.O_RDONLY)  # the disk may be read-only
    except FileNotFoundError:
        return False
    except Exception:
        return True
    try:
        return not lock_alone(descriptor)
    finally:
        os.close(descriptor)


class Claim:
    """A shared lock on a generation, held until it is released or the process dies.

    Raises:
        OSError: The file cannot be opened now; EBUSY while another process has the only lock, or
            where the directory is gone: it is just being removed, and can be made anew.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._descriptor = open_own(directory / IN_USE_NAME, os.O_RDWR | os.O_CREAT)
            self.release = weakref.finalize(self, unlock, self._descriptor, os.getpid())
            """May be called twice; happens by itself to a claim that is dropped."""
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(self._descriptor).st_nlink == 0:  # removed between opening and locking
                raise BlockingIOError
            os.utime(self._descriptor)
        except (FileNotFoundError, BlockingIOError) as error:
            raise OSError(errno.EBUSY, "it is being removed", str(directory)) from error

    def alone(self) -> bool:
        """Try to turn the shared lock into the only one."""
        return self.release.alive and lock_alone(self._descriptor)


def unlock(descriptor: int, process: int) -> None:
    """Give a lock up. Closing is not enough: a child forked meanwhile has a duplicate of it."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):  # it is closed whatever close() says
        os.close(descriptor)


def lock_alone(descriptor: int) -> bool:
    """Try to get the only lock, or to turn a shared one into it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _beginnings(directory: Path) -> list[str]:
    """Return the names of descriptions that a kill kept from being renamed."""
    return [path.name for path in directory.glob(".*.json.*")]


def _bury(grave: Path) -> None:
    with contextlib.suppress(OSError):
        for name in (*_beginnings(grave), *OUR_FILES):
            (grave / name).unlink(missing_ok=True)
        grave.rmdir()
