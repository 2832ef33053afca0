"""Our own files, told from what others put in their place: symbolic links, devices, foreign owners.

A cache directory is private. What is found in it and is not a plain file of this user's is neither
read nor written to: a planted link would lead us to write outside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from egeria_cache.errors import ForeignError


def open_own(path: Path, flags: int) -> int:
    """Open a plain file of ours; made with mode 0600 if the flags say so.

    Raises:
        ForeignError: It is a link, no plain file, or of another user who is not root.
        OSError: It cannot be opened; nothing is wrong with it then.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ForeignError(f"{path} is no plain file; it is left alone") from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0):
        return descriptor
    os.close(descriptor)
    raise ForeignError(
        f"{path} is no plain file of this user (owner {found.st_uid}); it is left alone"
    )


def check_private(directory: Path) -> None:
    """Make a directory of ours private, or refuse it.

    Raises:
        ForeignError: It belongs to another user, or others may write to it.
    """
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise ForeignError(
            f"{directory} belongs to user {found.st_uid}, who could change what is served from it; "
            "choose a directory of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignError(
            f"{directory} may be written by others (mode {stat.S_IMODE(found.st_mode):o}); "
            f"`chmod 700` it if you trust what it holds, or choose another directory"
        )
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a read-only disk
            directory.chmod(0o700)


def is_own_directory(path: Path) -> bool:
    """Tell a real directory of ours from links and others' directories."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0)
