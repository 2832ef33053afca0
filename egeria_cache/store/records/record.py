"""One sample's named values <-> one record of bytes: head, then payload. Pure; no pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from egeria_cache.ragged import PaddedRows
from egeria_cache.store.codecs.codec import Bytes, Codec, CodecError, Coder
from egeria_cache.store.codecs.lossy import LossyError, Storage, pack, unpack
from egeria_cache.store.records.encoded import Arena, Buffer, Encoded, aligned
from egeria_cache.store.records.layout import (
    CHECKSUM,
    CHECKSUM_BYTES,
    FieldLayout,
    Head,
    Layout,
    pack_head,
    parse_head,
    payload_seed,
)
from egeria_cache.store.records.values import RecordError, Value, decode_value, encode_value

__all__ = ["Record", "Rows", "encode_rows", "open_record", "plain_value"]

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

    def tensors(self) -> Iterator[Tensor]:
        """Yield what holds memory: of padded rows the tensor that they lie in."""
        for value in self.fields.values():
            value = value.padded if isinstance(value, PaddedRows) else value
            many = (value,) if isinstance(value, Tensor) else value
            yield from (item for item in many if isinstance(item, Tensor))


BUFFER_BYTES = 8 * 2**20
"""Of raw records that are put together, hashed and written at a time."""
HASHED_BYTES = 2**18
"""Raw records are copied and hashed in turns of so many bytes: these stay in the core's cache."""


def encode_rows(
    keys: Sequence[bytes],
    picked: Sequence[int],
    rows: Rows,
    codec: Codec,
    coder: Coder,
    storage: Storage = None,
    error: LossyError | None = None,
    identity: int = 0,
    arena: Arena | None = None,
) -> Encoded:
    """Return the keys and records of the picked rows.

    Args:
        keys: One per row of the batch.
        picked: Rows to encode.
        rows: The batch.
        codec: Tried on every field large enough; a field it does not shrink stays raw.
        coder: This thread's own.
        storage: Lossy number format for the floating-point tensors.
        error: What the lossy format changes is added here.
        identity: Of the generation; part of the checksums.
        arena: Where raw records are put, when they are asked for; in memory of their own without
            it.

    Raises:
        TypeError: A value of a type that no record holds.
    """
    tensors = all(isinstance(value, Tensor) for value in rows.fields.values())
    if storage is None and codec is Codec.RAW and tensors:
        return _encode_raw(keys, picked, rows, identity, Arena() if arena is None else arena)
    columns = [_column(name, value, storage, error) for name, value in rows.fields.items()]
    records = []
    for row in picked:
        fields, lengths, payload = [], [], []
        for column in columns:
            field, data = column(row)
            # A text stays raw: its decoded size is not in the layout.
            wanted = codec if field.dtype is not None else Codec.RAW
            used, stored = coder.encode(data, wanted, field.elements)
            fields.append(field)
            lengths.append(used << 56 | len(stored))
            payload.append(stored)
        head = pack_head(Layout(rows.bare, tuple(fields)), lengths)
        body = b"".join(payload)
        seed = payload_seed(xxhash.xxh3_64_intdigest(head), keys[row], identity)
        checksum = CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, seed=seed))
        records.append((keys[row], (checksum, head, body)))
    return Encoded.of(records)


def _encode_raw(
    keys: Sequence[bytes], picked: Sequence[int], rows: Rows, identity: int, arena: Arena
) -> Encoded:
    """Records of one size, which are made when they are asked for."""
    fields, columns = [], []
    for name, value in rows.fields.items():
        assert isinstance(value, Tensor)
        field, data = _matrix(name, value)
        fields.append(field)
        columns.append(data if len(picked) == len(data) else data[np.asarray(picked)])
    head = pack_head(Layout(rows.bare, tuple(fields)), [field.num_bytes for field in fields])
    chosen = [keys[row] for row in picked]
    size = CHECKSUM_BYTES + len(head) + sum(field.num_bytes for field in fields)
    num_buffers = max(-(-len(chosen) * size // BUFFER_BYTES), 1)
    num_together = max(-(-len(chosen) // num_buffers), 1)
    parts = []
    for first in range(0, len(chosen), num_together):
        part = slice(first, first + num_together)
        own = chosen[part]
        buffer = _raw_buffer(own, [column[part] for column in columns], head, identity, arena)
        parts.append(Encoded.one_behind_the_other(own, buffer, np.full(len(own), size)))
    return Encoded.joined(parts)


def _raw_buffer(
    keys: Sequence[bytes], columns: Sequence[Bytes], head: bytes, identity: int, arena: Arena
) -> Buffer:
    """Return what puts raw records together: checksum, head, and a row of each column."""
    start = CHECKSUM_BYTES + len(head)
    size = start + sum(column.shape[1] for column in columns)
    stride, num_rows = aligned(size), len(keys)
    num_together = max(HASHED_BYTES // stride, 1)

    def fill() -> memoryview:
        block = arena.take(num_rows * stride).reshape(num_rows, stride)
        block[:, CHECKSUM_BYTES:start] = np.frombuffer(head, np.uint8)
        block[:, size:] = 0
        flat, digest = block.reshape(-1).data, xxhash.xxh3_64_intdigest
        head_seed, checksums = digest(head), list[int]()
        for first in range(0, num_rows, num_together):
            part, at = slice(first, first + num_together), start
            for column in columns:
                block[part, at : at + column.shape[1]] = column[part]
                at += column.shape[1]
            begins = range(first * stride, len(flat), stride)
            checksums += [
                digest(flat[begin + start : begin + size], payload_seed(head_seed, key, identity))
                for begin, key in zip(begins, keys[part], strict=False)
            ]
        block[:, :CHECKSUM_BYTES] = np.array(checksums, "<u8")[:, None].view(np.uint8)
        return flat

    return fill


def _matrix(
    name: str, value: Tensor, storage: Storage = None, error: LossyError | None = None
) -> tuple[FieldLayout, Bytes]:
    """Return the layout of each row, and (B, bytes) without copying if possible."""
    shape = tuple(value.shape[1:])
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    packed, used = pack(plain, storage)
    if used is not None and error is not None:
        error.add(plain, unpack(packed, shape, value.dtype, used))
    field = FieldLayout(name, value.dtype, shape, packed.shape[1], used)
    matrix: Bytes = packed.numpy()
    return field, matrix


def _column(
    name: str, value: Tensor | Sequence[Value], storage: Storage, error: LossyError | None
) -> Callable[[int], tuple[FieldLayout, Bytes]]:
    """Return a function from the row to what it holds."""
    if isinstance(value, Tensor):
        field, data = _matrix(name, value, storage, error)
        return lambda row: (field, data[row])

    def one(row: int) -> tuple[FieldLayout, Bytes]:
        item = value[row]
        if isinstance(item, Tensor):
            field, data = _matrix(name, item[None], storage, error)
            return field, data[0]
        return FieldLayout(name, None, (), -1), np.frombuffer(encode_value(item), np.uint8)

    return one


# -- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """An intact record, still encoded."""

    head: Head
    payload: tuple[memoryview, ...]
    """Per field."""

    @property
    def layout(self) -> Layout:
        """Names, dtypes and shapes."""
        return self.head.layout

    def decode_field(self, position: int, coder: Coder, out: Bytes) -> None:
        """Decode one tensor field into `out`, which has the layout's size."""
        codec, _ = self.head.stored[position]
        try:
            coder.decode_into(
                self.payload[position], codec, out, self.layout.fields[position].elements
            )
        except CodecError as error:
            raise RecordError(str(error)) from None

    def codec_name(self, position: int) -> str:
        """Name of the codec of one field, in words."""
        code = self.head.stored[position][0]
        return Codec(code).label if code in Codec._value2member_map_ else f"unknown codec {code}"

    def value(self, position: int) -> Value:
        """Decode one field that is no tensor."""
        return plain_value(self.head.stored[position][0], self.payload[position])

    def tensor(self, position: int, coder: Coder) -> Tensor:
        """Decode one tensor field into a tensor of its own."""
        field = self.layout.fields[position]
        assert field.dtype is not None
        packed = torch.empty((1, field.num_bytes), dtype=torch.uint8)
        self.decode_field(position, coder, packed[0].numpy())
        try:
            return unpack(packed, field.shape, field.dtype, field.storage)[0]
        except RuntimeError as error:  # a forged shape that no tensor can have
            raise RecordError(str(error)) from None


def open_record(key: bytes, value: Any, identity: int = 0) -> Record:
    """Check a record against its own sizes and its checksum; decode nothing yet.

    Args:
        key: The key it was found under.
        value: Its bytes, any buffer.
        identity: Of the generation.

    Raises:
        RecordError: Damaged, cut short, of another version, or of another sample or generation.
    """
    view = memoryview(value)
    head = parse_head(view)
    (expected,) = CHECKSUM.unpack_from(view)
    at = head.num_bytes
    if xxhash.xxh3_64_intdigest(view[at:], payload_seed(head.seed, key, identity)) != expected:
        raise RecordError("the checksum does not match")
    payload = []
    for _, size in head.stored:
        payload.append(view[at : at + size])
        at += size
    return Record(head, tuple(payload))


def plain_value(codec: int, stored: memoryview) -> Value:
    """Decode a field that is no tensor.

    Raises:
        RecordError: It is none.
    """
    if codec != Codec.RAW:
        raise RecordError("a scalar or text with a codec")
    return decode_value(bytes(stored))
