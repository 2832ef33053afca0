"""Who uses a generation's directory, and its removal. The locks are the kernel's: any death drops
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

__all__ = [
    "IN_USE_NAME",
    "BeingRemovedError",
    "claim",
    "clear_graves",
    "identity",
    "in_use_elsewhere",
    "lock_alone",
    "remove_directory",
]

IN_USE_NAME = "in-use"
GRAVE = ".gone-"
"""What a generation is renamed to, before its files are unlinked one by one."""


class BeingRemovedError(Exception):
    """Another thread or process is just removing the generation; it can be made anew."""


def remove_directory(directory: Path) -> None:
    """Unlink a generation; readers of other processes keep their mapping until they close."""
    grave = directory.with_name(f"{GRAVE}{directory.name}-{os.getpid()}-{time.time_ns():x}")
    with contextlib.suppress(OSError):
        directory.rename(grave)  # one step: nobody opens a half-removed generation
    shutil.rmtree(grave, ignore_errors=True)


def clear_graves(directory: Path) -> None:
    """Finish removals that a kill interrupted: what is left of them counts against the limit."""
    for grave in directory.glob(f"{GRAVE}*"):
        shutil.rmtree(grave, ignore_errors=True)


def in_use_elsewhere(directory: Path) -> bool:
    """Tell whether any live process, this one included, holds the generation."""
    try:
        descriptor = os.open(directory / IN_USE_NAME, os.O_RDONLY)  # the disk may be read-only
    except OSError:
        return False
    try:
        return not lock_alone(descriptor)
    finally:
        os.close(descriptor)


def claim(path: Path) -> int:
    """Hold a shared lock for as long as the process lives; the kernel drops it at any death."""
    writable = os.access(path.parent, os.W_OK)
    flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise BeingRemovedError(str(path.parent)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if writable:
            os.utime(path)
    except OSError as error:
        os.close(descriptor)
        raise BeingRemovedError(str(path.parent)) from error
    return descriptor


def lock_alone(descriptor: int | None) -> bool:
    """Try to turn a shared lock into the only one."""
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def identity(path: Path) -> tuple[int, int] | None:
    """Return what tells this very file from one put in its place; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
