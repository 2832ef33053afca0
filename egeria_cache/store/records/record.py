"""One sample's named values <-> one record of bytes. Pure; no pickle.

A record tells its own length, layout and key, so that it can be found without the index. Its
checksum covers all of that, the layout itself, and which generation it is of.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from egeria_cache.ragged import PaddedRows
from egeria_cache.store.codecs.codec import Bytes, Codec, CodecError, Coder, NeedsKernelError
from egeria_cache.store.codecs.lossy import LossyError, Storage, pack, unpack
from egeria_cache.store.native import Kernel, kernel
from egeria_cache.store.records.layout import (
    RAGGED,
    FieldLayout,
    Layout,
    RecordError,
    Value,
    decode_value,
    encode_value,
)

__all__ = [
    "Encoded",
    "Record",
    "Rows",
    "aligned",
    "encode_rows",
    "key_of",
    "number_of",
    "open_record",
    "split_block",
]

ALIGNMENT = 8
HEAD = struct.Struct("<QIHH")
"""Checksum, bytes of the record, number of its layout, bytes of its key."""
CHECKSUM_BYTES, HEAD_BYTES = 8, HEAD.size
MAX_RECORD_BYTES = 1 << 31
MAX_RATIO_BITS = 22
"""zstd stores a block of 128 KiB in four bytes at best, a byte of a bitmap stands for 64 bytes of
zeros at most: 2^21 together. A field that claims twice that is refused before room is made."""
LENGTH_MASK = (1 << 56) - 1


def aligned(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# -- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch as the writer takes it: per name, a tensor with rows, or a list of values."""

    bare: bool
    fields: Mapping[str, Tensor | Sequence[Value]]

    @property
    def padded(self) -> bool:
        """Some rows lie in a larger tensor."""
        return any(isinstance(value, PaddedRows) for value in self.fields.values())

    def num_bytes(self) -> int:
        """Bytes of the rows, without padding."""
        return sum(
            value.nbytes
            if isinstance(value, Tensor | PaddedRows)
            else sum(item.nbytes for item in value if isinstance(item, Tensor))
            for value in self.fields.values()
        )

    def held_bytes(self) -> int:
        """Bytes that the tensors hold in memory, padding included."""
        return sum(one.nbytes for one in self.tensors())

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows | None:
        """Return a copy of batches, one behind the other; None if they are not tensors alike."""
        kinds = {
            (one.bare, *((name, *_kind(value)) for name, value in one.fields.items()))
            for one in parts
        }
        if len(kinds) > 1 or not all(isinstance(v, Tensor) for v in parts[0].fields.values()):
            return None
        return cls(
            parts[0].bare,
            {name: torch.cat([one.fields[name] for one in parts]) for name in parts[0].fields},  # type: ignore[misc]
        )

    def tensors(self) -> Iterator[Tensor]:
        """Yield what holds memory: of padded rows the tensor that they lie in."""
        for value in self.fields.values():
            value = value.padded if isinstance(value, PaddedRows) else value
            many = (value,) if isinstance(value, Tensor) else value
            yield from (item for item in many if isinstance(item, Tensor))


def _kind(value: Tensor | Sequence[Value]) -> tuple[Any, ...]:
    return (value.dtype, value.shape[1:]) if isinstance(value, Tensor) else (type(value),)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Records of one layout, one behind the other in one buffer, each at a multiple of 8."""

    layout: Layout
    keys: Sequence[bytes]
    buffer: memoryview
    starts: npt.NDArray[np.int64]
    """Where each begins, and where the last one ends; shape (N + 1,)."""
    sizes: npt.NDArray[np.int64]
    """Without the zeros behind each, shape (N,)."""
    replaced: Sequence[bytes | None] | None = None
    """Per record the last variant that it supersedes, as a key, if any; None: nothing ever will be.
    What is superseded goes with the same commit."""

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield key and record."""
        for key, at, size in zip(
            self.keys, self.starts.tolist(), self.sizes.tolist(), strict=False
        ):
            yield key, self.buffer[at : at + size]

    @classmethod
    def of(cls, layout: Layout, pairs: Sequence[tuple[bytes, Any]]) -> Encoded:
        """Copy records into one buffer."""
        sizes = np.array([len(record) for _, record in pairs], np.int64)
        pieces = [piece for _, one in pairs for piece in (one, bytes(-len(one) % ALIGNMENT))]
        return cls(
            layout, [key for key, _ in pairs], memoryview(b"".join(pieces)), _starts(sizes), sizes
        )

    def only(self, wanted: npt.NDArray[np.bool_]) -> Encoded:
        """Return some of the records."""
        if wanted.all():
            return self
        some = Encoded.of(self.layout, list(itertools.compress(self, wanted.tolist())))
        if self.replaced is None:
            return some
        replaced = [*itertools.compress(self.replaced, wanted.tolist())]
        return replace(some, replaced=replaced)

    def blocks(self, most_bytes: int) -> Iterator[tuple[slice, memoryview]]:
        """Yield neighbours that are at most so many bytes together, or one that is more."""
        starts, first = self.starts.tolist(), 0
        while first < len(self):
            most = starts[first] + most_bytes
            last = max(bisect.bisect_right(starts, most) - 1, first + 1)
            yield slice(first, last), self.buffer[starts[first] : starts[last]]
            first = last


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum((sizes + (ALIGNMENT - 1)) & -ALIGNMENT, out=starts[1:])
    return starts


def encode_rows(
    keys: Sequence[bytes],
    picked: Sequence[int],
    rows: Rows,
    codec: Codec,
    coder: Coder,
    storage: Storage = None,
    error: LossyError | None = None,
    identity: int = 0,
    replaced: Sequence[bytes | None] | None = None,
) -> list[Encoded]:
    """Return the records of the picked rows, by layout.

    Args:
        keys: One per row of the batch.
        picked: Rows to encode.
        rows: The batch.
        codec: Tried on every field large enough; a field it does not shrink stays raw.
        coder: This thread's own.
        storage: Lossy number format for the floating-point tensors.
        error: What the lossy format changes is added here.
        identity: Of the generation; part of the checksums.
        replaced: Per row of the batch, see `Encoded`.

    Raises:
        TypeError: A value of a type that no record holds.
        ValueError: A record too large, or that no layout can tell of.
    """
    native, tensors = kernel(), all(isinstance(one, Tensor) for one in rows.fields.values())
    alike = len({len(keys[row]) for row in picked}) == 1
    if native and storage is None and codec is Codec.RAW and tensors and alike:
        raw = _encode_raw(native, keys, picked, rows, identity)
        return [
            raw if replaced is None else replace(raw, replaced=[replaced[row] for row in picked])
        ]
    columns = [_column(name, value, storage, error) for name, value in rows.fields.items()]
    groups: dict[Layout, list[tuple[int, bytes]]] = {}
    for row in picked:
        fields, entries, sizes, payload = [], [], [], []
        for column in columns:
            field, own, data = column(row)
            # A text stays raw: its decoded size is not in the layout.
            wanted = codec if field.dtype is not None else Codec.RAW
            used, stored = coder.encode(data, wanted, field.elements)
            fields.append(field)
            entries.append(used << 56 | len(stored))
            sizes += own
            payload.append(stored)
        layout = Layout(rows.bare, tuple(fields))
        head = struct.pack(f"<{len(entries)}Q{len(sizes)}Q", *entries, *sizes)
        record = _record(keys[row], layout, head, payload, identity)
        groups.setdefault(layout, []).append((row, record))
    return [
        replace(
            Encoded.of(layout, [(keys[row], record) for row, record in records]),
            replaced=None if replaced is None else [replaced[row] for row, _ in records],
        )
        for layout, records in groups.items()
    ]


def _record(
    key: bytes, layout: Layout, head: bytes, payload: Sequence[Any], identity: int
) -> bytes:
    size = HEAD_BYTES + aligned(len(key)) + len(head) + sum(map(len, payload))
    if size > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {size} bytes; {MAX_RECORD_BYTES} are stored at most")
    first = HEAD.pack(0, size, layout.number, len(key))[CHECKSUM_BYTES:]
    first += key + bytes(-len(key) % ALIGNMENT) + head
    checksum = xxhash.xxh3_64_intdigest(first, identity ^ layout.seed)
    for stored in payload:
        checksum = xxhash.xxh3_64_intdigest(stored, checksum)
    return b"".join((struct.pack("<Q", checksum), first, *payload))


def _encode_raw(
    native: Kernel, keys: Sequence[bytes], picked: Sequence[int], rows: Rows, identity: int
) -> Encoded:
    """Records of tensors as they lie in memory, with keys of one length: the kernel puts them
    together.
    """
    columns = [_matrix(name, value) for name, value in rows.fields.items()]  # type: ignore[arg-type]
    layout = Layout(rows.bare, tuple(field for field, _ in columns))
    entries = struct.pack(f"<{len(columns)}Q", *(data.shape[1] for _, data in columns))
    chosen = [keys[row] for row in picked]
    key_bytes = len(chosen[0])
    start = HEAD_BYTES + aligned(key_bytes) + len(entries)
    size = start + layout.row_bytes
    if size > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {size} bytes; {MAX_RECORD_BYTES} are stored at most")
    starts = _starts(np.full(len(chosen), size, np.int64))
    whole = np.empty((len(chosen), aligned(size)), np.uint8)
    first = HEAD.pack(0, size, layout.number, key_bytes) + bytes(aligned(key_bytes)) + entries
    whole[:, :start] = np.frombuffer(first, np.uint8)
    joined = np.frombuffer(b"".join(chosen), np.uint8).reshape(len(chosen), key_bytes)
    whole[:, HEAD_BYTES : HEAD_BYTES + key_bytes] = joined
    whole[:, size:] = 0
    native.pack(whole, start, [data for _, data in columns], picked, identity ^ layout.seed)
    sizes = np.full(len(chosen), size, np.int64)
    return Encoded(layout, chosen, whole.reshape(-1).data, starts, sizes)


def _matrix(
    name: str, value: Tensor, storage: Storage = None, error: LossyError | None = None
) -> tuple[FieldLayout, Bytes]:
    """Return the layout of each row, and (B, bytes) without copying if possible."""
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    packed, used = pack(plain, storage)
    if used is not None and error is not None:
        error.add(plain, unpack(packed, tuple(value.shape[1:]), value.dtype, used))
    matrix: Bytes = packed.numpy()
    return FieldLayout(name, value.dtype, tuple(value.shape[1:]), used), matrix


Column = Callable[[int], tuple[FieldLayout, list[int], Bytes]]


def _column(
    name: str, value: Tensor | Sequence[Value], storage: Storage, error: LossyError | None
) -> Column:
    """Return a function from the row to its layout, its own sizes, and its bytes."""
    if isinstance(value, Tensor):
        field, data = _matrix(name, value, storage, error)
        return lambda row: (field, [], data[row])

    def one(row: int) -> tuple[FieldLayout, list[int], Bytes]:
        item = value[row]
        if not isinstance(item, Tensor):
            return FieldLayout(name, None), [], np.frombuffer(encode_value(item), np.uint8)
        own, data = _matrix(name, item[None], storage, error)
        shape = (RAGGED,) * len(own.shape)
        if isinstance(value, PaddedRows):
            ragged = {dim for dim, _ in value.dims}
            shape = tuple(RAGGED if at in ragged else n for at, n in enumerate(own.shape))
        sizes = [n for n, kind in zip(own.shape, shape, strict=True) if kind == RAGGED]
        return FieldLayout(name, own.dtype, shape, own.storage), sizes, data[0]

    return one


# -- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """An intact record, still encoded."""

    whole: memoryview
    layout: Layout
    codecs: tuple[int, ...]
    """Per field."""
    payload: tuple[memoryview, ...]
    """Per field."""
    shapes: tuple[tuple[tuple[int, ...], int], ...]
    """Per field its own shape, and its bytes when it is decoded; -1 for what is no tensor."""

    def value(self, position: int, coder: Coder) -> Value:
        """Decode one field.

        Raises:
            RecordError: It is not what the layout says.
            NeedsKernelError: Nothing here can decode it.
        """
        field, (shape, num_bytes) = self.layout.fields[position], self.shapes[position]
        codec, stored = self.codecs[position], self.payload[position]
        if field.dtype is None:
            if codec != Codec.RAW:
                raise RecordError("a scalar or text with a codec")
            return decode_value(bytes(stored))
        packed = torch.empty((1, num_bytes), dtype=torch.uint8)
        try:
            coder.decode_into(stored, codec, packed[0].numpy(), field.elements)
            return unpack(packed, shape, field.dtype, field.storage)[0]
        except NeedsKernelError:
            raise
        except (CodecError, RuntimeError) as error:  # a forged shape that no tensor can have
            raise RecordError(str(error)) from None


def num_bytes_of(record: Any) -> int:
    """Return the length that a record claims; 0 where there is none."""
    return int(HEAD.unpack_from(record)[1]) if len(record) >= HEAD_BYTES else 0


def number_of(record: Any) -> int:
    """Return the number of the layout that a record claims.

    Raises:
        RecordError: It is none.
    """
    if len(record) < HEAD_BYTES:
        raise RecordError(f"{len(record)} bytes are no record")
    return int(HEAD.unpack_from(record)[2])


def key_of(record: Any) -> bytes:
    """Return the key that a record claims."""
    return bytes(record[HEAD_BYTES : HEAD_BYTES + HEAD.unpack_from(record)[3]])


def split_block(block: memoryview) -> Iterator[memoryview]:
    """Yield the records of a block, unchecked, as far as their lengths lead."""
    at = 0
    while HEAD_BYTES <= (size := num_bytes_of(block[at:])) <= len(block) - at:
        yield block[at : at + size]
        at += aligned(size)


def open_record(key: bytes, value: Any, layout: Layout, identity: int = 0) -> Record:
    """Check a record against its own sizes and its checksum; decode nothing yet.

    Args:
        key: The key it was found under.
        value: Its bytes, any buffer.
        layout: Of the number that its entry has.
        identity: Of the generation.

    Raises:
        RecordError: Damaged, cut short, or of another sample, layout or generation.
    """
    view, count = memoryview(value), len(layout.fields)
    if len(view) < HEAD_BYTES:
        raise RecordError(f"{len(view)} bytes are no record")
    expected, size, _, key_bytes = HEAD.unpack_from(view)
    begin = HEAD_BYTES + aligned(key_bytes)
    end = begin + 8 * (count + layout.num_ragged)
    if size != len(view) or end > size:
        raise RecordError(f"a record of {size} bytes in an entry of {len(view)}")
    if view[HEAD_BYTES : HEAD_BYTES + key_bytes] != key:
        raise RecordError("it is another sample's")
    words = struct.unpack_from(f"<{count + layout.num_ragged}Q", view, begin)
    checksum = xxhash.xxh3_64_intdigest(view[CHECKSUM_BYTES:end], identity ^ layout.seed)
    payload, shapes, sizes, at = [], [], [*words[count:]], end
    for field, entry in zip(layout.fields, words, strict=False):
        stored = entry & LENGTH_MASK
        if stored > size - at:
            raise RecordError(f"field {field.name!r} is cut short")
        payload.append(view[at : at + stored])
        checksum = xxhash.xxh3_64_intdigest(payload[-1], checksum)
        at += stored
        shapes.append(((), -1) if field.dtype is None else field.sized(sizes))
        if shapes[-1][1] > stored << MAX_RATIO_BITS:
            raise RecordError(f"field {field.name!r}: {stored} bytes for {shapes[-1][1]}")
    if at != size or checksum != expected:
        raise RecordError("the checksum does not match")
    codecs = tuple(entry >> 56 for entry in words[:count])
    return Record(view, layout, codecs, tuple(payload), tuple(shapes))
