"""One generation's files: LMDB's, as this process holds them; who uses them; the records in them.

LMDB must not have a file open twice in a process, nor across a fork, and some damage of its pages
aborts the process that meets it. So its environments are kept by device and inode, whoever opens
them, and a file is handed to LMDB if another process has it open, or after its tree was walked by
plain reads.

Any thread may read; the writer thread owns every write, under the directory's lock. What other
processes have committed is seen by the next look.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash
from lmdb.verify import verify

from egeria_cache.errors import StoreError
from egeria_cache.store import record
from egeria_cache.store.codecs import Codec
from egeria_cache.store.disk import place as places
from egeria_cache.store.disk.place import Claim, DamagedError, GoneError, Manifest, open_own
from egeria_cache.store.record import Encoded, Layout, Record, RecordError, Records, key_of

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

ENTRY = np.dtype([("place", "<u8"), ("size", "<u4"), ("block", "<u4")])
"""Of a sample: where in the file its record lies, 0 where only its block says so; the record's
bytes, 0 if there is none; the block that it is in."""
Entries = npt.NDArray[Any]
LOCATED = np.dtype([("key", object), ("entry", ENTRY)])
Located = npt.NDArray[Any]
"""Where the records of some samples are: each one's key, and its entry."""
_NO_ENTRY = bytes(ENTRY.itemsize)
BLOCK_BYTES = 512 * 1024 - 16
"""Of records that are one value of LMDB: of larger pieces Linux looks for memory in huge pages."""
ENTRY_BYTES = 8 + 2 + ENTRY.itemsize
"""Of a page of LMDB, without the key."""
_BLOCK_KEY, _ENTRY = struct.Struct(">Q"), struct.Struct("<QII")
TOTALS, LAYOUT = b"totals", b"layout"
_TOTALS = struct.Struct("<QQ16xQ")
_NO_CODEC = 255
FEW_BLOCKS = 16
"""Of a disk: fewer are left once it was full."""


@dataclass(slots=True)
class Totals:
    """Sums over a generation's records, written in the same commit as these."""

    raw_bytes: int = 0
    """Decoded."""
    stored_bytes: int = 0
    """Encoded, with headers."""
    codec: Codec | None = None
    """What records were last written with; each field of each record names its own."""
    num_samples: int = 0
    """How many records there are, of all samples and variants."""

    @classmethod
    def parse(cls, stored: Any) -> Totals:
        """Undo `pack`."""
        raw_bytes, stored_bytes, code = _TOTALS.unpack(stored)
        codec = Codec(code) if code in Codec._value2member_map_ else None
        return cls(raw_bytes, stored_bytes, codec)

    def pack(self) -> bytes:
        """Return the bytes of a commit's head."""
        code = _NO_CODEC if self.codec is None else self.codec
        return _TOTALS.pack(self.raw_bytes, self.stored_bytes, code)


def is_unfinished(directory: Path) -> bool:
    """Whether a generation's making was cut short before it could hold anything."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (directory / DATA_NAME).lstat().st_size <= 2 * mmap.PAGESIZE  # no table as yet
    return True


@contextlib.contextmanager
def inspected(directory: Path) -> Iterator[View]:
    """Look into a generation, without holding it.

    Raises:
        StoreError: It is damaged, of an earlier format, or not ours.
        OSError: It cannot be read now.
    """
    Manifest.read(directory)
    files = GenerationFiles(directory, inspects=True)
    with contextlib.closing(files), files.reading() as view:
        yield view


class GenerationFiles:
    """Records of one generation. To inspect it, they are neither claimed nor written to.

    Raises:
        DamagedError: They cannot be trusted to LMDB, or are lost.
        ForeignError: A file is not ours.
        OSError: A file cannot be opened now; EBUSY where another process is just removing it.
    """

    def __init__(self, directory: Path, *, inspects: bool = False) -> None:
        self.directory = directory
        self.identity = xxhash.xxh3_64_intdigest(directory.name.encode())
        """Part of every checksum."""
        self.layout: Layout | None = None
        """Of all records; None before the first one."""
        self.hidden: dict[bytes, bool] = {}
        """Records that could not be read and count as absent; whether they may be stored again, or
        else something else may be wrong, and pass."""
        self._closed = threading.Lock()
        """Taken for good by whoever closes them."""
        vetted = places.in_use_elsewhere(directory)
        self._claim = None if inspects else Claim(directory)
        try:
            self._environment = Environment.open(directory, writes=not inspects, vetted=vetted)
        except BaseException:
            if self._claim is not None:
                self._claim.release()
            raise

    def close(self, *, removes: bool = False) -> None:
        """Give the lock up; the files are closed when nobody reads them, and unlinked, if that is
        wanted (under the directory's lock), unless another process uses them. Only the first call
        does anything.
        """
        if not self._closed.acquire(blocking=False):
            return
        if removes and self._claim is not None:
            self._claim.remove(self.directory)
        if os.getpid() == self._environment.process:
            self._environment.close()
        if self._claim is not None:
            self._claim.release()

    def check_present(self) -> None:
        """Raise `GoneError` if the files were removed or replaced under us."""
        try:
            found = os.fstat(self._environment.descriptor)
            is_ours = os.path.samestat(found, (self.directory / DATA_NAME).lstat())
        except OSError as error:  # anything else may pass
            is_ours = error.errno not in (errno.ENOENT, errno.ENOTDIR)
        if not is_ours:
            raise GoneError(f"{self.directory} was removed while in use")

    @contextlib.contextmanager
    def reading(self, *, writes: bool = False) -> Iterator[View]:
        """What is committed now, for as long as it is looked at. What is added to it is committed
        at the end, durably, or not at all if anything is raised.

        Raises:
            GoneError: Closed.
            StoreError: It was opened by the parent of this process.
            OSError: The disk is full, or fails, or LMDB cannot read now.
        """
        environment = self._environment
        if os.getpid() != environment.process:
            raise StoreError(
                f"{self.directory} was opened before fork(), whose child has neither its threads "
                "nor its locks; open the ActivationStore in the child process itself, or start the "
                "child with 'spawn'"
            )
        environment.users.append(None)
        try:
            if self._closed.locked():
                raise GoneError("closed")
            if writes:  # what the killed have read would never be used again
                environment.env.reader_check()
            with environment.env.begin(None, None, writes, writes) as transaction:  # type: ignore[call-overload]
                yield View(self, environment, transaction)
        except lmdb.Error as error:
            # To LMDB, a write that was cut short is an input/output error.
            is_full = writes and os.fstatvfs(environment.descriptor).f_bavail < FEW_BLOCKS
            is_full = is_full or isinstance(error, lmdb.DiskError | lmdb.MapFullError)
            raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error)) from error
        finally:
            environment.close()


class View:
    """What one transaction sees of a generation, and adds to it."""

    def __init__(self, files: GenerationFiles, environment: Environment, transaction: Any) -> None:
        self.files, self.environment, self._transaction = files, environment, transaction
        self.descriptor, self.tables = environment.descriptor, environment.tables
        if files.layout is None and (stored := self.get(b"about", LAYOUT)) is not None:
            with contextlib.suppress(RecordError):
                files.layout = Layout.unsealed(bytes(stored), files.identity)
        self.layout = files.layout
        """What records hold; None where there are none, or where that is lost."""

    def get(self, table: bytes, key: bytes) -> Any:
        """Return a value, if there is one; it is good while the transaction lasts."""
        return self._transaction.get(key, db=self.tables[table])

    def located(self, keys: Sequence[bytes]) -> Entries:
        """Return where records are, shape (B,), whatever was remembered of them."""
        # One by one: `getmulti` takes three times as long.
        absent, table = repeat(_NO_ENTRY), repeat(self.tables[b"samples"])
        values = list(map(self._transaction.get, keys, absent, table))
        whole = b"".join(values)
        if len(whole) != len(keys) * ENTRY.itemsize:  # damaged: a value of another size
            whole = b"".join(one if len(one) == ENTRY.itemsize else _NO_ENTRY for one in values)
        return np.frombuffer(bytearray(whole), ENTRY)

    def totals(self) -> Totals:
        """Return the sums over all records."""
        found = Totals()
        with contextlib.suppress(struct.error):
            found = Totals.parse(self.get(b"about", TOTALS) or b"")
        found.num_samples = self._transaction.stat(self.tables[b"samples"])["entries"]
        return found

    def record(self, key: bytes, entry: Any) -> Record:
        """Return a sample's record: from its place, or from its block where a compacted copy of the
        file has moved it.

        Raises:
            RecordError: There is no intact one.
            OSError: The disk cannot read it.
        """
        if self.layout is None:
            raise RecordError("what records hold is lost")
        place, size, block = entry.tolist()
        there = min(size, os.fstat(self.descriptor).st_size - place) if place else 0
        if there > 0:
            with contextlib.suppress(RecordError):
                found = os.pread(self.descriptor, there, place)
                return Record.open(key, found, self.layout, self.files.identity)
        records = record.split_block(memoryview(self.get(b"blocks", _BLOCK_KEY.pack(block)) or b""))
        found = next((bytes(one) for one in records if key_of(one) == key), b"")
        return Record.open(key, found, self.layout, self.files.identity)

    def records(self) -> Iterator[tuple[bytes, Record | RecordError]]:
        """Yield all keys, each with its record, or with why it has no intact one."""
        keys = self._transaction.cursor(self.tables[b"samples"]).iternext(values=False)
        for key in map(bytes, keys):
            found: Record | RecordError
            try:
                found = self.record(key, self.located([key])[0])
            except RecordError as error:
                found = error
            except OSError as error:
                found = RecordError(f"the disk cannot read it: {error.strerror}")
            yield key, found

    # -- writing -------------------------------------------------------------------------------

    def new_among(self, records: Records) -> list[Encoded]:
        """Return those of the records that nobody has stored by now, each key once. What another
        process stored is the same; what proved damaged is new.
        """
        first = {one.key: one for one in reversed(records)}
        sizes = self.located([*first])["size"].tolist()
        known = {key for key, size in zip(first, sizes, strict=True) if size}
        known -= {key for key, may_be_again in self.files.hidden.items() if may_be_again}
        return [one for one in records if first[one.key] is one and one.key not in known]

    def growth_bytes(self, records: Records) -> list[int]:
        """Return, shape (N,), by how much the file grows at most by the first 1 to N of these:
        their blocks, and copies of all pages of the index that are touched, some of which split.
        """
        page, sizes = PAGE_BYTES, np.array([one.size for one in records], np.int64)
        stat = self._transaction.stat(self.tables[b"samples"])
        entries = np.cumsum(np.array([len(one.key) + ENTRY_BYTES for one in records], np.int64))
        if records[0].replaced is None:
            whole = np.cumsum((sizes + 7) & -8)
            blocks = whole + (whole // (BLOCK_BYTES // 2) + 1) * 2 * page
        else:
            blocks = np.cumsum((sizes // page + 2) * page)
        touched = np.minimum(np.arange(1, len(sizes) + 1), stat["leaf_pages"])
        touched += 2 * (2 * entries // page + 1) + stat["branch_pages"] // 8 + 32
        growth: list[int] = (blocks + touched * page).tolist()
        return growth

    def add(self, records: Records, raw_bytes: int, told: Totals) -> None:
        """Write records that are new.

        Raises:
            ValueError: Others have another layout.
        """
        known, own = self.layout, records[0].layout
        put, about = self._transaction.put, self.tables[b"about"]
        if known is None:
            put(LAYOUT, own.sealed(self.files.identity), db=about)
        elif known != own:
            raise ValueError("another process has stored records of another layout")
        totals = self.totals()
        self._remove_superseded([one.replaced for one in records if one.replaced], totals)
        # What is to be superseded one by one lies one by one: LMDB then uses its pages again.
        entries = self._add_blocks(records, BLOCK_BYTES if records[0].replaced is None else 0)
        self._transaction.cursor(self.tables[b"samples"]).putmulti(sorted(entries))
        totals.raw_bytes += raw_bytes
        totals.stored_bytes += sum(one.size for one in records)
        totals.codec = told.codec
        put(TOTALS, totals.pack(), db=about)

    def _add_blocks(self, records: Records, most_bytes: int) -> Iterator[tuple[bytes, bytes]]:
        """Write records, so many bytes of neighbours as one value; yield their entries."""
        table = self.tables[b"blocks"]
        cursor = self._transaction.cursor(table)
        number = _BLOCK_KEY.unpack(cursor.key())[0] if cursor.last() else 0
        rest = iter(records)
        for starts, content in record.blocks(records, most_bytes):
            number += 1
            key = _BLOCK_KEY.pack(number)
            self._transaction.put(key, content, db=table)
            place = self.environment.place_of(self.get(b"blocks", key))
            for start, one in zip(starts, rest, strict=False):
                yield one.key, _ENTRY.pack(place and place + start, one.size, number)

    def _remove_superseded(self, replaced: Sequence[bytes], totals: Totals) -> None:
        """Remove what is stored of each sample up to this variant; each record of it lies alone."""
        cursor = self._transaction.cursor(self.tables[b"samples"])
        for last in replaced:
            prefix = last[:-4]
            is_there = cursor.set_range(prefix + bytes(4))
            while is_there and (key := bytes(cursor.key())) <= last and key[:-4] == prefix:
                _, size, number = self.located([key])[0].tolist()
                totals.raw_bytes -= round(size * totals.raw_bytes / max(totals.stored_bytes, 1))
                totals.stored_bytes -= size
                block = _BLOCK_KEY.pack(number)
                if 0 <= len(self.get(b"blocks", block) or b"") - size < 8:  # else others lie there
                    self._transaction.delete(block, db=self.tables[b"blocks"])
                is_there = cursor.delete() and bool(cursor.key())


# -- LMDB ------------------------------------------------------------------------------------


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
        self._identity, self.users = identity, list[None]()
        """One for each who opened it, reads or writes. They come and go without a lock: `_lock` is
        held while another one's tree is walked over."""
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
                one.users.append(None)
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
        self.users.pop()
        if self.users:
            return
        with _lock:  # it may have been opened, or closed, meanwhile
            if not self.users and _opened.get(self._identity) is self:
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
            with open(open_own(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT), "rb") as lock:
                os.posix_fallocate(lock.fileno(), 0, LOCK_BYTES)
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


# -- of a damaged tree: found without it, by plain reads; nothing is handed to LMDB ---------------

_PAGE = struct.Struct("<QHHI")
"""Its number, nothing, flags; how many pages a large value has."""
_LEAF, _LARGE = 2, 4
_MOST_PAGES = 2**31 // PAGE_BYTES + 1
"""Of the largest record: a damaged count does not take all memory."""
_NODE = struct.Struct("<HHHH")
"""Bytes of the value, low and high; flags; bytes of the key."""


def salvaged(directory: Path, identity: int) -> Iterator[list[Encoded]]:
    """Yield the intact records of each block of more than half a page.

    Args:
        directory: The generation's, wherever it lies now.
        identity: Of the generation, as it was named.

    Raises:
        OSError: The file cannot be opened.
    """
    with open(open_own(directory / DATA_NAME, os.O_RDONLY), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        layouts = {*_layouts(file.fileno(), size, identity)}
        for page, flags, count in _pages(file.fileno(), size):
            if flags & _LARGE and 0 < count <= min(size // PAGE_BYTES - page, _MOST_PAGES):
                with contextlib.suppress(OSError):
                    block = os.pread(file.fileno(), count * PAGE_BYTES - 16, page * PAGE_BYTES + 16)
                    for layout in layouts:
                        if found := [*_intact(memoryview(block), layout, identity)]:
                            yield found


def _pages(descriptor: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, flags and count of the pages that begin with their own number."""
    for page in range(2, size // PAGE_BYTES):
        with contextlib.suppress(OSError):
            number, _, flags, count = _PAGE.unpack(os.pread(descriptor, 16, page * PAGE_BYTES))
            if number == page:
                yield page, flags, count


def _layouts(descriptor: int, size: int, identity: int) -> Iterator[Layout]:
    """Yield what is a layout, by its hash, in any leaf of the tree."""
    for page, flags, _ in _pages(descriptor, size):
        with contextlib.suppress(OSError, RecordError, struct.error):
            content = os.pread(descriptor, PAGE_BYTES, page * PAGE_BYTES) if flags & _LEAF else b""
            if (at := content.find(LAYOUT, 24)) >= 0:
                low, high, _, _ = _NODE.unpack_from(content, at - _NODE.size)
                begin = at + len(LAYOUT)
                yield Layout.unsealed(content[begin : begin + (low | high << 16)], identity)


def _intact(block: memoryview, layout: Layout, identity: int) -> Iterator[Encoded]:
    for one in record.split_block(block):
        with contextlib.suppress(RecordError):
            Record.open(key_of(one), one, layout, identity)
            yield Encoded(layout, key_of(one), (one,), len(one))
