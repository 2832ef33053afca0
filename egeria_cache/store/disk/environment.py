"""One LMDB environment per file and process, whoever opens it, and only if the file is sound.

LMDB must not have a file open twice in a process, nor across a fork, and some damage of its pages
aborts the process that meets it. So environments are kept by device and inode, and a file is handed
to LMDB if another process has it open, or after its tree was walked by plain reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from lmdb.verify import verify

from egeria_cache.store.disk.place import DamagedError, GoneError, open_own

try:
    from lmdb import _envid
except ImportError:  # of another release: there a child is refused what its parent has open
    _envid = None  # type: ignore[assignment]

DATA_NAME, LOCK_NAME = "data.mdb", "lock.mdb"
TABLES = (b"about", b"blocks", b"samples")
MAP_BYTES = 1 << 40
"""Of address space, which costs nothing: a generation is never mapped anew."""
SMALLEST_MAP_BYTES = 16 << 20
PAGE_BYTES = min(mmap.PAGESIZE, 1 << 15)
"""As LMDB takes it from the machine."""
LOCK_BYTES = 8192
"""Room for 126 threads that read at a time, of all processes."""

_opened: dict[tuple[int, int], Environment] = {}
_walked: set[tuple[int, ...]] = set()
"""States of files whose trees this process has walked over and found sound."""
_lock = threading.RLock()


class Environment:
    """Tables of LMDB, and a descriptor of their file. Any thread may read; one at a time writes."""

    def __init__(
        self, directory: Path, descriptor: int, *, identity: tuple[int, int], writes: bool
    ) -> None:
        self.descriptor = descriptor
        """Of the file, for reading records."""
        self.writes = writes
        self.process = os.getpid()
        """Whose threads may use it."""
        self._identity, self._num_users = identity, 0
        self.env = _open_lmdb(directory, writes=writes)
        try:
            self.env.reader_check()
            self.tables = {name: self.env.open_db(name, create=writes) for name in TABLES}
            with self.env.begin(buffers=True) as transaction:
                self.map = self._map_of(transaction.get(TABLES[-1]))
            """Where LMDB has mapped the file, how many bytes at most, and its descriptor."""
        except BaseException:
            self.env.close()
            raise

    @classmethod
    def open(cls, directory: Path, *, writes: bool, vetted: bool) -> Environment:
        """Open the environment of a generation, or the one that this process has open.

        Args:
            directory: The generation's.
            writes: It is made where there is none.
            vetted: Another process has it open, and so has looked at it.

        Raises:
            DamagedError: Its tree is damaged.
            ForeignError: A file is not ours.
            OSError: It cannot be opened now; EBUSY while another thread looks at it.
        """
        with _lock:
            flags = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
            descriptor = open_own(directory / DATA_NAME, flags)
            try:
                found = os.fstat(descriptor)
                identity = found.st_dev, found.st_ino
                one = _opened.get(identity)
                if one is None:
                    if not vetted and (problem := tree_problem(directory)):
                        raise DamagedError(f"{directory} is damaged: {problem}")
                    one = cls(directory, descriptor, identity=identity, writes=writes)
                    _opened[identity] = one
                    descriptor = -1
                elif writes and not one.writes:
                    raise OSError(errno.EBUSY, "it is being looked at by this process")
                one._num_users += 1
                return one
            except lmdb.Error as error:
                is_empty = getattr(error, "code", 0) == errno.EBADF
                if is_empty or isinstance(error, lmdb.NotFoundError):  # and only read here
                    raise GoneError("nothing is stored in it as yet") from None
                if isinstance(error, _DAMAGE):
                    raise DamagedError(f"{directory / DATA_NAME} is damaged: {error}") from None
                raise OSError(errno.EIO, str(error)) from error
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def close(self) -> None:
        """One user less; the last one closes it."""
        with _lock:
            self._num_users -= 1
            if not self._num_users:
                del _opened[self._identity]
                self.env.close()
                with contextlib.suppress(OSError):  # it is closed whatever close() says
                    os.close(self.descriptor)

    def place_of(self, view: memoryview) -> int:
        """Return where in the file a value of more than half a page lies, which never moves: LMDB
        gives it pages of its own, and the first begins with its number. 0 for a smaller one.
        """
        if len(view) <= PAGE_BYTES // 2:
            return 0
        begin = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        number = ctypes.c_uint64.from_address(begin - 16).value
        flags = ctypes.c_uint16.from_address(begin - 6).value
        return int(number) * PAGE_BYTES + 16 if flags & 4 else 0

    def _map_of(self, view: Any) -> tuple[int, int, int]:
        """Return `map` as the page of a value tells; of no bytes where its number is damaged."""
        page = np.frombuffer(view, np.uint8).ctypes.data & -PAGE_BYTES
        place = ctypes.c_uint64.from_address(page).value * PAGE_BYTES
        size = os.fstat(self.descriptor).st_size
        there = os.pread(self.descriptor, PAGE_BYTES, place) if place < size else b""
        if there != ctypes.string_at(page, PAGE_BYTES):
            return 0, 0, self.descriptor
        return page - place, self.env.info()["map_size"], self.descriptor


_DAMAGE = (
    lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError,
    lmdb.IncompatibleError, lmdb.BadDbiError,
)  # fmt: skip


def tree_problem(directory: Path) -> str | None:
    """Return what is wrong with a generation's tree, if anything, by a walk over it, which takes
    some seconds for a million samples; one that was found sound is not walked over again.

    Raises:
        ForeignError: The file is not ours.
        OSError: It cannot be read now.
    """
    with open(open_own(directory / DATA_NAME, os.O_RDONLY), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        state = found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns
        if not found.st_size or state in _walked:
            return None
        try:
            problems = verify(f"/proc/self/fd/{file.fileno()}", subdir=False)  # type: ignore[no-untyped-call]
        except OSError:
            raise
        except Exception as error:  # also of pages that the walker did not foresee
            problems = [f"{type(error).__name__}: {error}"]
    if not problems:
        _walked.add(state)
    return f"{DATA_NAME}: {problems[0]}" if problems else None


def _open_lmdb(directory: Path, *, writes: bool) -> lmdb.Environment:
    """Open by descriptor: LMDB takes no path that is not UTF-8, and follows links."""
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    settings: dict[str, Any] = {
        "path": f"/proc/self/fd/{at}", "max_dbs": len(TABLES),
        "metasync": False, "mode": 0o600, "readonly": not writes, "create": writes,
        "max_spare_txns": 4, "readahead": False,
    }  # fmt: skip
    # To py-lmdb, what a forked child's parent has open is open there, too; `_opened` knows better.
    keys = _envid.env_keys if _left_behind and _envid is not None else None
    try:
        if writes:
            # Its mapping is touched, which would kill where the disk has no room for it.
            lock = open_own(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
            try:
                os.posix_fallocate(lock, 0, LOCK_BYTES)
            finally:
                os.close(lock)
        if keys is not None:
            _envid.env_keys = lambda *_: ()
        return _mapped(settings)
    finally:
        os.close(at)
        if keys is not None:
            _envid.env_keys = keys


def _mapped(settings: dict[str, Any]) -> lmdb.Environment:
    """Map `MAP_BYTES`, or where addresses are scarce (`ulimit -v`, machines that have 39 bits of
    them) a quarter of what can be had.
    """
    size = MAP_BYTES
    while True:
        try:
            found = lmdb.open(map_size=size, **settings)
        except lmdb.MemoryError:
            if size == SMALLEST_MAP_BYTES:
                raise
            size //= 4
        else:
            if size < MAP_BYTES:
                found.set_mapsize(max(size // 4, SMALLEST_MAP_BYTES))
            return found


_left_behind: list[Environment] = []


def _forget_in_child() -> None:
    """A forked child leaves its parent's environments alone: freeing one there would take the
    parent's places among the readers.
    """
    global _lock
    _lock = threading.RLock()
    for one in _opened.values():
        _left_behind.append(one)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one.env))
    _opened.clear()


os.register_at_fork(after_in_child=_forget_in_child)
