"""A generation as one stream of bytes, to be copied to another machine: packed, and unpacked.

Both pass over the records once, in the order they were stored, and hold one block of them in
memory. Every block has a checksum and every record its own, which also covers the generation: what
arrives is what was stored, or is refused. Bytes: docs/format.md.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from egeria_cache.store.codecs.lossy import LossyError
from egeria_cache.store.disk.files import GenerationFiles, GoneError
from egeria_cache.store.disk.manifest import (
    FORMAT,
    MAX_JSON_BYTES,
    DamagedError,
    Manifest,
    generation_name,
)
from egeria_cache.store.disk.totals import TOTALS_BYTES, Totals
from egeria_cache.store.generation import Part
from egeria_cache.store.records.layout import Layout
from egeria_cache.store.records.record import Encoded, number_of, open_record
from egeria_cache.store.records.values import RecordError
from egeria_cache.store.store import ActivationStore

__all__ = ["Parcelled", "pack", "unpack"]

MAGIC, VERSION = b"EGPK", 2
BLOCK_BYTES = 16 * 2**20
"""Of records in one block, where one record is not more."""
LAYOUT = b"layout"
"""Stands where a record's key would: the bytes are a layout's."""
_PIECE_BYTES = 8 * 2**20
_HEAD = struct.Struct("<4sII")
"""Magic, version, bytes of the manifest."""
_BLOCK = struct.Struct("<QIIQ")
"""Checksum, number of records, bytes of their keys, bytes of the records; in the last block, which
has no records, how many came before."""
Pairs = list[tuple[bytes, Any]]
"""Of keys and records; a record is any buffer."""


@dataclass(slots=True)
class Parcelled:
    """What was packed or unpacked."""

    name: str
    """Of the generation."""
    num_records: int = 0
    num_bytes: int = 0
    """Of the stream."""
    num_damaged: int = 0
    """Records that were left out."""
    num_known: int = 0
    """Records that were there before."""
    num_left: int = 0
    """Records for which the limit had no room."""


def pack(path: Path, out: BinaryIO) -> Parcelled:
    """Write a generation to a stream; a live run may go on storing.

    Args:
        path: The generation's directory.
        out: Is written to once, from its beginning to its end.

    Raises:
        DamagedError: It cannot be read.
        StoreError: It is of an earlier format.
        OSError: The stream cannot be written.
    """
    manifest = Manifest.read(path)
    manifest.check_current()
    files = GenerationFiles.open(path, inspecting=True)
    text = json.dumps({"format": FORMAT, "fields": dict(manifest.fields)}).encode()
    head = _HEAD.pack(MAGIC, VERSION, len(text)) + text + files.totals.pack()
    done, writer = Parcelled(path.name), _Writer(out, head)
    block, size, told = Pairs(), 0, set[int]()
    try:
        for key, value, found in files.records():
            if isinstance(found, RecordError):
                done.num_damaged += 1
                continue
            if found.layout.number not in told:  # before the first record that has it
                told.add(found.layout.number)
                block.append((LAYOUT, found.layout.packed))
            block.append((key, value))
            size += len(value)
            done.num_records += 1
            if size >= BLOCK_BYTES:
                writer.block(block)
                block, size = [], 0
    finally:
        files.release()
    if block:
        writer.block(block)
    writer.block([], done.num_records)
    out.flush()
    done.num_bytes = writer.num_bytes
    return done


def unpack(stream: BinaryIO, store: ActivationStore) -> Parcelled:
    """Store what `pack` has written; what is there already stays.

    Raises:
        DamagedError: The stream is not what was packed, or was cut short. What came before that
            is stored, and is intact.
        StoreError: It is of another format, or the directory cannot be used.
        OSError: The stream cannot be read, or the disk not be written.
    """
    reader = _Reader(stream)
    fields, totals = reader.head()
    blocks = reader.blocks()
    first = next(blocks, [])  # before anything is made: it vouches for the description, too
    done = Parcelled(generation_name(fields))
    generation = store.open_generation(fields)
    identity = xxhash.xxh3_64_intdigest(done.name.encode())
    error, layouts = totals.error, dict[int, Layout]()
    per_byte = totals.raw_bytes / max(totals.stored_bytes, 1)
    for pairs in itertools.chain([first], blocks):
        parts = []
        for layout, records in _by_layout(pairs, layouts, identity):
            raw_bytes = round(per_byte * sum(len(value) for _, value in records))
            parts.append(Part(Encoded.of(layout, records), raw_bytes, error))
            error = LossyError()
        if not parts:
            continue
        num_records = sum(len(part.records) for part in parts)
        num_new, num_stored = num_records, 0
        with contextlib.suppress(GoneError):  # the limit has no room even for an empty one
            num_new, num_stored = generation.take(parts, totals.codec)
        done.num_records += num_stored
        done.num_known += num_records - num_new
        done.num_left += num_new - num_stored
    done.num_bytes = reader.num_bytes
    return done


def _by_layout(
    pairs: Pairs, layouts: dict[int, Layout], identity: int
) -> list[tuple[Layout, Pairs]]:
    """Check records, and sort them by their layouts, which come among them."""
    groups: dict[int, Pairs] = {}
    try:
        for key, value in pairs:
            if key == LAYOUT:
                layout = Layout.parse(bytes(value))
                layouts[layout.number] = layout
            else:
                number = number_of(value)
                open_record(key, value, layouts[number], identity)
                groups.setdefault(number, []).append((key, value))
    except (RecordError, KeyError) as problem:
        raise DamagedError(f"a record of the stream is damaged: {problem}") from None
    return [(layouts[number], records) for number, records in groups.items()]


class _Writer:
    def __init__(self, out: BinaryIO, head: bytes) -> None:
        self._out, self._seed = out, xxhash.xxh3_64_intdigest(head)
        self.num_bytes = self._num_blocks = 0
        self.write(head)

    def write(self, data: Any) -> None:
        self._out.write(data)
        self.num_bytes += len(data)

    def block(self, records: Pairs, num_before: int = 0) -> None:
        keys = [key for key, _ in records]
        size = sum(len(value) for _, value in records) if records else num_before
        lengths = np.fromiter(map(len, keys), "<u2", len(keys)).tobytes()
        sizes = np.fromiter((len(value) for _, value in records), "<u8", len(keys)).tobytes()
        head = _BLOCK.pack(0, len(keys), sum(map(len, keys)), size)[8:]
        state = xxhash.xxh3_64(head, (self._seed + self._num_blocks) % 2**64)
        parts = [head, lengths, sizes, *keys, *(value for _, value in records)]
        for part in parts[1:]:
            state.update(part)
        self.write(struct.pack("<Q", state.intdigest()))
        for part in parts:
            self.write(part)
        self._num_blocks += 1


class _Reader:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.num_bytes = self._seed = 0

    def head(self) -> tuple[dict[str, Any], Totals]:
        head = self._read(_HEAD.size)
        magic, version, length = _HEAD.unpack(head)
        if magic != MAGIC:
            raise DamagedError("this is no packed generation")
        if version != VERSION or length > MAX_JSON_BYTES:
            raise DamagedError(f"version {version} of a packed generation; this reads {VERSION}")
        try:
            text = self._read(length)
            content = json.loads(bytes(text))
            fields, found = content["fields"], content["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedError("the description of the packed generation is damaged") from None
        if found != FORMAT or not isinstance(fields, dict):
            raise DamagedError(f"a generation of format {found}; this release reads {FORMAT}")
        totals = self._read(TOTALS_BYTES)
        self._seed = xxhash.xxh3_64_intdigest(b"".join((head, text, totals)))
        return fields, Totals.parse(totals)

    def blocks(self) -> Iterator[Pairs]:
        num_blocks = num_records = 0
        while True:
            head = self._read(_BLOCK.size)
            checksum, count, key_bytes, size = _BLOCK.unpack(head)
            state = xxhash.xxh3_64(head[8:], (self._seed + num_blocks) % 2**64)
            body = self._read(10 * count + key_bytes + size if count else 0)
            state.update(body)
            if state.intdigest() != checksum:
                raise DamagedError(f"block {num_blocks} of the stream is damaged")
            if not count:
                if size != num_records or self._stream.read(1):
                    raise DamagedError("the stream does not end where it should")
                return
            num_blocks += 1
            pairs = _split(body, count, key_bytes, size)
            num_records += sum(key != LAYOUT for key, _ in pairs)
            yield pairs

    def _read(self, size: int) -> memoryview:
        """Read so many bytes; no more memory is taken than there are bytes."""
        pieces, left = [], size
        while left:
            piece = self._stream.read(min(left, _PIECE_BYTES))
            if not piece:
                raise DamagedError("the stream was cut short")
            pieces.append(piece)
            left -= len(piece)
        self.num_bytes += size
        return memoryview(b"".join(pieces))


def _split(body: memoryview, count: int, key_bytes: int, size: int) -> Pairs:
    lengths = np.frombuffer(body[: 2 * count], "<u2").tolist()
    sizes = np.frombuffer(body[2 * count : 10 * count], "<u8").tolist()
    if sum(lengths) != key_bytes or sum(sizes) != size:
        raise DamagedError("the sizes in a block of the stream contradict each other")
    keys = _cut(body[10 * count : 10 * count + key_bytes], lengths)
    values = _cut(body[10 * count + key_bytes :], sizes)
    return [(bytes(key), value) for key, value in zip(keys, values, strict=True)]


def _cut(part: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        yield part[at : at + size]
        at += size
