"""A cache directory: made, recognised or refused; its byte limit; who uses which generation of it;
and what a generation is: its fields in words, their hash as its name.

Any file of ours is opened here. A cache directory is private: what is found in it and is not a
plain file of this user's is neither read nor written to, for a planted link would lead us outside.

Every opening, commit and removal happens under one file lock per directory, so that two processes
cannot both see the last free megabyte. All locks are the kernel's: any death drops them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from egeria_cache.errors import ForeignError, StoreError
from egeria_cache.tables import PAGE_BYTES

logger = logging.getLogger("egeria_cache.store")

FORMAT, ROOT_FORMAT = 4, 1
"""Version of a generation, and of the directory around it; what has a higher one is refused, never
guessed at. A generation of a lower one is left alone, and goes when room is needed."""
MANIFEST_NAME = "manifest.json"
MAX_JSON_BYTES = 16 * 2**20
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
NETWORK_TYPES = {
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs3", "nfs4", "smb3", "smbfs", "wekafs",
}  # fmt: skip
"""Where hosts see different contents of a file, or file locks are not reliable."""


class DamagedError(StoreError):
    """A file of the cache is not what was written."""


class GoneError(StoreError):
    """The generation is void, closed, of an earlier release, or its files are not there."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation's description."""

    name: str
    fields: Mapping[str, Any]
    created: float
    """Seconds since the epoch."""

    @classmethod
    def new(cls, fields: Mapping[str, Any]) -> Manifest:
        """Describe a generation that begins now.

        Raises:
            StoreError: A value that JSON cannot hold.
        """
        try:
            loaded = json.loads(json.dumps(dict(fields), sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"the fields of a generation must be plain JSON values: {error}"
            ) from None
        return cls(generation_name(loaded), loaded, time.time())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read and check a generation's manifest.

        Raises:
            DamagedError: Missing, or damaged.
            GoneError: Of an earlier format.
            StoreError: Of a newer one.
        """
        path = directory / MANIFEST_NAME
        content = read_json(path, FORMAT)
        if content["format"] < FORMAT:
            raise GoneError(
                f"{directory.name} is of an earlier release (format {content['format']}): not "
                "read by this one"
            )
        try:
            fields, created = content["fields"], float(content["created"])
            if not isinstance(fields, dict) or not math.isfinite(created):
                raise TypeError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise DamagedError(f"{path} is damaged") from None
        return cls(directory.name, fields, created)

    def found_in(self, directory: Path) -> Manifest:
        """Return what a generation of these fields says of itself; where that is damaged, it is
        written anew.
        """
        with contextlib.suppress(DamagedError):
            found = Manifest.read(directory)
            if found.fields == self.fields:
                return found
        logger.warning("the description of %s is damaged; it is written anew", directory)
        self.write(directory)
        return self

    def write(self, directory: Path) -> None:
        """Replace the manifest in one step."""
        write_json(directory / MANIFEST_NAME, self.content())

    def content(self) -> dict[str, Any]:
        """Return what stands in the file."""
        created, fields = self.created, dict(self.fields)
        return {"format": FORMAT, "name": self.name, "created": created, "fields": fields}


def generation_name(fields: Mapping[str, Any]) -> str:
    """Return "gen-" and 12 hexadecimal digits of the SHA-256 of format and fields."""
    text = json.dumps([FORMAT, fields], sort_keys=True, separators=(",", ":"))
    return "gen-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def read_json(path: Path, newest: int) -> dict[str, Any]:
    """Read one of our JSON files.

    Args:
        path: The file.
        newest: Format that this release knows.

    Raises:
        StoreError: Missing, damaged, too large, or written by a newer release.
    """
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            text = file.read(min(os.fstat(file.fileno()).st_size, MAX_JSON_BYTES))
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:  # of now: nothing is wrong with it
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return parsed(text, newest, path)


def parsed(text: bytes, newest: int, name: object) -> dict[str, Any]:
    """Undo `dumped`; raises as `read_json`, of what has this name."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError(f"{name} is damaged: it is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise DamagedError(f"{name} was not written by Egeria")
    if content.pop("sum", (known := _sum_of(content))) != known:  # others may leave it out
        raise DamagedError(f"{name} is damaged: its checksum does not match")
    if content["format"] > newest:
        raise StoreError(
            f"{name} has format {content['format']}, this release knows up to {newest}; use the "
            "release that wrote it, or another directory"
        )
    return content


def dumped(content: Mapping[str, Any]) -> str:
    """Return a description as one line of JSON, with a checksum."""
    return json.dumps({**content, "sum": _sum_of(content)}, sort_keys=True)


def _sum_of(content: Mapping[str, Any]) -> str:
    content = {name: value for name, value in content.items() if name != "sum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write beside, and rename over: a reader sees the old or the new one. Nobody waits for a disk:
    what a power cut takes, its opener writes anew.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(open_own(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            file.write(dumped(content))
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


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


# -- the directory ---------------------------------------------------------------------------


def claim_directory(directory: Path, *, force_network: bool) -> None:
    """Create the directory, or check that it is a cache this release can use.

    Raises:
        StoreError: It cannot be used; the message says why, and what to do.
    """
    kind = network_type(directory)
    if kind is not None and not force_network:
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
        foreign = [name for name in names if not name.startswith(OURS)]
        if ROOT_NAME not in names and foreign:
            raise StoreError(
                f"{directory} is not an Egeria cache: it holds {foreign[0]!r}; choose an empty or "
                "new directory"
            )
        if ROOT_NAME not in names:
            write_json(root, _ROOT)
        elif not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            read_json(root, ROOT_FORMAT)
    except DamagedError as error:  # nothing in it is needed
        logger.warning("%s; it is written anew", error)
        with contextlib.suppress(OSError):  # a full disk
            write_json(root, _ROOT)
    except (NotADirectoryError, FileExistsError) as error:
        raise StoreError(
            f"{directory} is not a directory; give the path of one, which need not exist yet"
        ) from error
    except OSError as error:
        hint = "; check its owner and mode" if isinstance(error, PermissionError) else ""
        raise StoreError(f"{directory} cannot be written: {error.strerror}{hint}") from error


def network_type(path: Path) -> str | None:
    """Return the type of the network's filesystem that a path lies on, or would lie on; None if it
    is none.

    To read what is mounted takes a quarter of a millisecond: not where the path is on a block
    device that Linux knows. Lustre has numbers that look like one's.
    """
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    device = os.stat(there).st_dev
    if os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"):
        return None
    kind = filesystem_type(path)
    return kind if kind in NETWORK_TYPES else None


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
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(directory) if name.startswith(prefixes))
        return [directory / name for name in names if is_own_directory(directory / name)]
    return []


def is_own_directory(path: Path) -> bool:
    """Tell a real directory of ours from links and others' directories."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0)
    return False


def last_use(directory: Path) -> float:
    """Return when a process last opened or closed the generation, seconds since the epoch."""
    with contextlib.suppress(OSError):
        return (directory / IN_USE_NAME).lstat().st_mtime
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
            for path in sorted(generation_directories(self.directory, damaged=True), key=last_use):
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
    try:  # the disk may be read-only
        with open(open_own(directory / IN_USE_NAME, os.O_RDONLY), "rb") as file:
            return not _lock_alone(file.fileno())
    except FileNotFoundError:
        return False
    except Exception:
        return True


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

    def remove(self, directory: Path) -> None:
        """Remove the generation, if the shared lock can be turned into the only one."""
        if self.release.alive and _lock_alone(self._descriptor):
            remove_directory(directory)


def _unlock(descriptor: int, process: int) -> None:
    """Give a lock up. Closing is not enough: a child forked meanwhile has a duplicate of it."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):  # it is closed whatever close() says
        os.close(descriptor)


def _lock_alone(descriptor: int) -> bool:
    """Try to get the only lock, or to turn a shared one into it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
