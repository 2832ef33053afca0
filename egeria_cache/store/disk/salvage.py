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
from egeria_cache.store.disk.files import LAYOUT
from egeria_cache.store.disk.own import open_own
from egeria_cache.store.records.layout import Layout, RecordError
from egeria_cache.store.records.record import Encoded, key_of, open_record, split_block

__all__ = ["salvaged"]

PAGE_BYTES = 4096
_PAGE = struct.Struct("<QHHI")
"""Its number, nothing, flags; how many pages a large value has."""
_LEAF, _LARGE = 2, 4
_NODE = struct.Struct("<HHHH")
"""Bytes of the value, low and high; flags; bytes of the key."""


def salvaged(directory: Path, identity: int) -> Iterator[Encoded]:
    """Yield the intact records of each block of more than half a page.

    Args:
        directory: The generation's, wherever it lies now.
        identity: Of the generation, as it was named.

    Raises:
        OSError: The file cannot be opened.
    """
    with open(open_own(directory / DATA_NAME, os.O_RDONLY), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        layouts = {*_layouts(file.fileno(), size)}
        for page, flags, count in _pages(file.fileno(), size):
            if flags & _LARGE and 0 < count <= size // PAGE_BYTES - page:
                with contextlib.suppress(OSError):
                    block = os.pread(file.fileno(), count * PAGE_BYTES - 16, page * PAGE_BYTES + 16)
                    for layout in layouts:
                        if found := [*_intact(memoryview(block), layout, identity)]:
                            yield Encoded.of(layout, found)


def _pages(descriptor: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, flags and count of the pages that begin with their own number."""
    for page in range(2, size // PAGE_BYTES):
        with contextlib.suppress(OSError):
            number, _, flags, count = _PAGE.unpack(os.pread(descriptor, 16, page * PAGE_BYTES))
            if number == page:
                yield page, flags, count


def _layouts(descriptor: int, size: int) -> Iterator[Layout]:
    """Yield what is a layout, by its hash, in any leaf of the tree."""
    for page, flags, _ in _pages(descriptor, size):
        with contextlib.suppress(OSError, RecordError, struct.error):
            content = os.pread(descriptor, PAGE_BYTES, page * PAGE_BYTES) if flags & _LEAF else b""
            if (at := content.find(LAYOUT, 24)) >= 0:
                low, high, _, _ = _NODE.unpack_from(content, at - _NODE.size)
                begin = at + len(LAYOUT)
                yield Layout.parse(content[begin : begin + (low | high << 16)])


def _intact(block: memoryview, layout: Layout, identity: int) -> Iterator[tuple[bytes, memoryview]]:
    for record in split_block(block):
        with contextlib.suppress(RecordError):
            key = key_of(record)
            open_record(key, record, layout, identity)
            yield key, record
