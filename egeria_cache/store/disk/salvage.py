"""Records of a file whose tree is damaged, found without it: each tells its own key and length, and
has a checksum. By plain reads; nothing is handed to LMDB.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from egeria_cache.store.disk.environment import DATA_NAME
from egeria_cache.store.disk.own import open_own
from egeria_cache.store.records.layout import Layout, RecordError
from egeria_cache.store.records.record import key_of, number_of, open_record, split_block

__all__ = ["salvaged"]

PAGE_BYTES = 4096
_PAGE = struct.Struct("<QHHI")
"""Its number, nothing, flags; how many pages a large value has."""
_LEAF, _LARGE = 2, 4
_NODE = struct.Struct("<HHHH")
"""Bytes of the value, low and high; flags; bytes of the key."""
_LAYOUT = b"layout"
Found = tuple[Layout, list[tuple[bytes, memoryview]]]


def salvaged(directory: Path, identity: int) -> Iterator[Found]:
    """Yield the intact records of each block of more than half a page, by layout.

    Args:
        directory: The generation's, wherever it lies now.
        identity: Of the generation, as it was named.

    Raises:
        OSError: The file cannot be opened.
    """
    with open(open_own(directory / DATA_NAME, os.O_RDONLY), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        layouts = dict(_layouts(file.fileno(), size))
        for page, flags, count in _pages(file.fileno(), size):
            if flags & _LARGE and 0 < count <= size // PAGE_BYTES - page:
                with contextlib.suppress(OSError):
                    block = os.pread(file.fileno(), count * PAGE_BYTES - 16, page * PAGE_BYTES + 16)
                    yield from _intact(memoryview(block), layouts, identity)


def _pages(descriptor: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, flags and count of the pages that begin with their own number."""
    for page in range(2, size // PAGE_BYTES):
        with contextlib.suppress(OSError):
            number, _, flags, count = _PAGE.unpack(os.pread(descriptor, 16, page * PAGE_BYTES))
            if number == page:
                yield page, flags, count


def _layouts(descriptor: int, size: int) -> Iterator[tuple[int, Layout]]:
    """Yield what looks like a layout in any leaf of the tree; its number is its hash."""
    for page, flags, _ in _pages(descriptor, size):
        if not flags & _LEAF:
            continue
        with contextlib.suppress(OSError, RecordError, struct.error):
            content = os.pread(descriptor, PAGE_BYTES, page * PAGE_BYTES)
            at = content.find(_LAYOUT, 24)
            while at >= 0:
                low, high, _, _ = _NODE.unpack_from(content, at - _NODE.size)
                end = at + len(_LAYOUT) + 2
                with contextlib.suppress(RecordError):
                    layout = Layout.parse(content[end : end + (low | high << 16)])
                    yield layout.number, layout
                at = content.find(_LAYOUT, end)


def _intact(block: memoryview, layouts: dict[int, Layout], identity: int) -> Iterator[Found]:
    groups: dict[int, list[tuple[bytes, memoryview]]] = {}
    for record in split_block(block):
        with contextlib.suppress(RecordError, KeyError):
            key, number = key_of(record), number_of(record)
            open_record(key, record, layouts[number], identity)
            groups.setdefault(number, []).append((key, record))
    for number, records in groups.items():
        yield layouts[number], records
