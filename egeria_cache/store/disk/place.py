"""A cache directory: made, recognised or refused; its byte limit; who uses which generation of it.

Every opening, commit and removal happens under one file lock per directory, so that two processes
cannot both see the last free megabyte. All locks are the kernel's: any death drops them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from egeria_cache.errors import ForeignError, StoreError
from egeria_cache.store.disk.manifest import (
    MANIFEST_NAME,
    ROOT_FORMAT,
    DamagedError,
    open_own,
    read_json,
    write_json,
)
from egeria_cache.tables import PAGE_BYTES

logger = logging.getLogger("egeria_cache.store")

ROOT_NAME, LOCK_NAME, IN_USE_NAME = "cache.json", "cache.lock", "in-use"
SET_ASIDE = "damaged-"
"""Begins the name of a generation that could not be opened for damage, for a look at it."""
OUR_FILES = (
    "records.bin", "index.bin", "data.mdb", "lock.mdb", IN_USE_NAME, MANIFEST_NAME,
)  # fmt: skip
"""Of a generation, in the order of their removal: what carries no manifest any more holds nothing
else of ours. Those of earlier formats are among them."""
_ROOT = {"format": ROOT_FORMAT, "created_by": "egeria"}
OURS = f".{ROOT_NAME}.", LOCK_NAME, "gen-", "damaged-gen-", "note-", ".note-"
"""What a cache's files begin with: where nothing else is, a root that was lost is written anew."""
LOCK_WAIT_S = 10.0
NETWORK_TYPES = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.gcsfuse", "fuse.glusterfs",
        "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
        "nfs3", "nfs4", "smb3", "smbfs", "wekafs"
    }
)  # fmt: skip
"""Where hosts see different contents of a file, or file locks are not reliable."""


# -- the directory ---------------------------------------------------------------------------


def claim_directory(directory: Path, *, force_network: bool) -> None:
    """Create the directory, or check that it is a cache this release can use.

    Raises:
        StoreError: It cannot be used; the message says why, and what to do.
    """
    kind = filesystem_type(directory)
    if kind in NETWORK_TYPES and not force_network:
        raise StoreError(
            f"{directory} lies on a network filesystem ({kind}), where file locks and "
            "what other hosts see of a file are not reliable; choose a local disk, or pass "
            "force_network=True if only one host at a time will use it"
        )
    root = directory / ROOT_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not force_network:  # a server may give files to another user
            _check_private(directory)
        # A beginning by another process, or by one that was killed, is not foreign.
        names = sorted(path.name for path in directory.iterdir())
        if ROOT_NAME in names:
            _join(root)
            return
        foreign = [name for name in names if not name.startswith(OURS)]
        if foreign:
            raise StoreError(
                f"{directory} is not an Egeria cache: it holds {foreign[0]!r}; choose an empty or "
                "new directory"
            )
        write_json(root, _ROOT)
    except (NotADirectoryError, FileExistsError) as error:
        raise StoreError(
            f"{directory} is not a directory; give the path of one, which need not exist yet"
        ) from error
    except OSError as error:
        hint = "; check its owner and mode" if isinstance(error, PermissionError) else ""
        raise StoreError(f"{directory} cannot be written: {error.strerror}{hint}") from error


def filesystem_type(path: Path) -> str | None:
    """Return the type of the filesystem a path lies on, or would lie on; None if unknown."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    real = os.path.realpath(path)
    above = [one for one in mounts if os.path.commonpath((real, one.mountpoint)) == one.mountpoint]
    # Of two mounts at one place, the later one covers the earlier.
    above.sort(key=lambda one: len(one.mountpoint))
    return above[-1].fstype if above else None


def _check_private(directory: Path) -> None:
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


def _join(root: Path) -> None:
    """Read the root of an existing cache."""
    if not os.access(root.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    try:
        read_json(root, ROOT_FORMAT)
    except DamagedError as error:  # nothing in it is needed
        logger.warning("%s; it is written anew", error)
        with contextlib.suppress(OSError):  # a full disk
            write_json(root, _ROOT)


# -- generations in it -----------------------------------------------------------------------


def directory_bytes(directory: Path) -> int:
    """Return the bytes all files below use on disk, in whole pages, directories included."""
    pages, folders = 0, [os.fspath(directory)]
    for folder in folders:  # not by `os.walk`, which calls itself for each level before Python 3.12
        # Removed while we looked, or not for us to see.
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            pages += 1
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with contextlib.suppress(OSError):
                    pages += -(-entry.stat(follow_symlinks=False).st_size // PAGE_BYTES)
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


def is_own_directory(path: Path) -> bool:
    """Tell a real directory of ours from links and others' directories."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0)


def last_use(directory: Path) -> float:
    """Return when a process last opened or closed the generation, seconds since the epoch."""
    try:
        return (directory / IN_USE_NAME).lstat().st_mtime
    except OSError:
        return 0.0


def remove_directory(directory: Path) -> bool:
    """Unlink a generation, under the directory's lock; readers of other processes keep its files
    until they close them. Where a kill cuts it short, what is left is removed like any.

    Only a real directory of this user's that carries our manifest, or nothing, is touched; of what
    lies in it, only files of ours.

    Returns:
        Whether it is gone.
    """
    with contextlib.suppress(OSError):
        if is_own_directory(directory) and (directory / MANIFEST_NAME).is_file():
            # Descriptions that a kill kept from being renamed are ours, too.
            ours = [*(path.name for path in directory.glob(".*.json.*")), *OUR_FILES]
            for name in ours if not {*os.listdir(directory)} - {*ours} else ():
                (directory / name).unlink(missing_ok=True)
        directory.rmdir()
    return not os.path.lexists(directory)


def remove_generations(directory: Path, names: Iterable[str]) -> list[str]:
    """Remove generations of a cache that no live process uses; return the names of those that are
    gone.

    Raises:
        StoreError: Another process holds the directory's lock.
    """
    with Budget(directory, 0).locked():  # no run opens what is being removed
        unused = [name for name in names if not in_use_elsewhere(directory / name)]
        return [name for name in unused if remove_directory(directory / name)]


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
            while not _lock_alone(descriptor):
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"{self.directory / LOCK_NAME} is held for too long by another process: is "
                        "that one stopped (SIGSTOP, a debugger)?"
                    )
                time.sleep(0.002)  # flock has no timed wait
            yield
        finally:
            _unlock(descriptor, os.getpid())

    def make_room(self, needed_bytes: int) -> int:
        """Return how many bytes may be added; call with the lock held.

        Removes unused generations, oldest use first, while less than `needed_bytes` is free.
        """
        free = self.limit_bytes - directory_bytes(self.directory)
        if free < needed_bytes:
            paths = generation_directories(self.directory, damaged=True)
            for path in sorted(paths, key=last_use):
                if not in_use_elsewhere(path) and remove_directory(path):
                    logger.info("%s removed: unused, and the limit was reached", path)
                free = self.limit_bytes - directory_bytes(self.directory)
                if free >= needed_bytes:
                    break
        return max(free, 0)


# -- who uses a generation -------------------------------------------------------------------


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
        return not _lock_alone(descriptor)
    finally:
        os.close(descriptor)


class Claim:
    """A shared lock on a generation, held until it is released or the process dies.

    Raises:
        OSError: The file cannot be opened now; BlockingIOError while somebody asks who holds it.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = open_own(directory / IN_USE_NAME, os.O_RDWR | os.O_CREAT)
        self.release = weakref.finalize(self, _unlock, self._descriptor, os.getpid())
        """May be called twice; happens by itself to a claim that is dropped."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(self._descriptor)

    def alone(self) -> bool:
        """Try to turn the shared lock into the only one."""
        return self.release.alive and _lock_alone(self._descriptor)


def _unlock(descriptor: int, process: int) -> None:
    """Give a lock up. Closing is not enough: a child forked meanwhile has a duplicate of it."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):  # it is closed whatever close() says
        os.close(descriptor)


def _lock_alone(descriptor: int) -> bool:
    """Try to get the only lock, or to turn a shared one into it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
