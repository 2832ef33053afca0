"""One sample's named values <-> one record of bytes, under the sample's key. Pure; no pickle.

A key is a sample's ID and a variant. Integers are big-endian with the sign bit flipped, so that
their order is that of the integers; the variants of a sample are neighbours. A layout is one for
all records: a field is a tensor of one dtype and shape in all of them, or free; then each record
tells what it has there. A record tells its own length and key, so that it can be found without the
index. Its checksum covers both, the layout, and which generation it is of. Byte for byte:
docs/format.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from egeria_cache.arguments import StorageDtype
from egeria_cache.store import codecs
from egeria_cache.store.codecs import Bytes, Codec, CodecError, Coder, Elements, Storage, decode

SampleId = int | str | tuple[Any, ...]
"""Hashable name of a sample: an integer, a text, or a tuple of these."""
Variants = int | npt.NDArray[np.int64]
"""Of a batch's samples: one number for all of them, or one each, shape (B,)."""

NO_DRAW = (1 << 32) - 1
"""Stands for a draw where there is none to be superseded."""
MAX_KEY_BYTES = 511
"""As LMDB takes them."""
SIGN = 1 << 63
INT, _JSON, _HASHED = b"i", b"j", b"h"
INT_KEY = struct.Struct(">cQI")


def encode_key(sample_id: SampleId, variant: int = 0) -> bytes:
    """Return the key of one sample.

    Raises:
        TypeError: The ID is not an integer, a text, or a tuple of these.
        ValueError: No variant has this number: it has 32 bits.
    """
    if not 0 <= variant < 1 << 32:
        raise ValueError(f"variant must be from 0 to {(1 << 32) - 1}, got {variant}")
    tail = struct.pack(">I", variant)
    if isinstance(sample_id, str):
        name: Any = sample_id
    elif isinstance(sample_id, tuple):
        name = [one if isinstance(one, str) else _integer(one) for one in sample_id]
    else:
        name = _integer(sample_id)
        if -SIGN <= name < SIGN:
            return INT + struct.pack(">Q", name + SIGN) + tail
    # As they are: two halves of a character that stand alone are not that character.
    key = _JSON + json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass") + tail
    if len(key) > MAX_KEY_BYTES:
        # The whole key is hashed, not its tail: two long keys then differ by 256 bits.
        key = _HASHED + hashlib.blake2b(key[: -len(tail)], digest_size=32).digest() + tail
    return key


def superseded(keys: Sequence[bytes], last: Variants) -> list[bytes]:
    """Return, per sample, the key of the last of its draws that goes; nothing for `NO_DRAW`."""
    draws = zip(keys, np.full(len(keys), last).tolist(), strict=True)
    return [b"" if draw == NO_DRAW else key[:-4] + struct.pack(">I", draw) for key, draw in draws]


def decode_key(key: bytes) -> tuple[SampleId | None, int]:
    """Return (sample ID, variant); the ID of a hashed key is None.

    Raises:
        ValueError: These bytes are no sample's key.
    """
    with suppress(struct.error, ValueError, TypeError, RecursionError):
        kind, body, (variant,) = key[:1], key[1:-4], struct.unpack(">I", key[1:][-4:])
        if kind == INT and len(key) == INT_KEY.size:
            return struct.unpack(">Q", body)[0] - SIGN, variant
        if kind == _JSON:
            found = json.loads(body)
            return found if isinstance(found, int | str) else tuple(found), variant
        if kind == _HASHED and len(body) == 32:
            return None, variant
    raise ValueError(f"not the key of a sample: {key[:32]!r}")


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"a sample ID is an integer, a text, or a tuple of these; got {type(value).__name__}"
        ) from None


# -- layout ----------------------------------------------------------------------------------

Value = Tensor | str | bytes | int | float | bool | None
"""What one sample may hold under one name."""
Plain = str | bytes | int | float | bool | None

MAX_FIELD_BYTES = 1 << 40
_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32",
)  # fmt: skip
DTYPES = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""What records hold: quantized numbers, say, are no plain bytes."""


class RecordError(ValueError):
    """These bytes are no intact record."""


@dataclass(frozen=True)
class FieldLayout:
    """What one name of a record holds."""

    name: str
    dtype: torch.dtype | None = None
    """None: free, each record tells."""
    shape: tuple[int, ...] = ()
    storage: Storage = None
    """Lossy number format of the stored elements; None: `dtype` itself."""

    @property
    def kind(self) -> str:
        """What it holds, in words."""
        if self.dtype is None:
            return "scalar, text or bytes"
        lossy = f" as {self.storage}" if self.storage else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{lossy}"

    @cached_property
    def num_bytes(self) -> int:
        """Before the codec; -1 if only the record tells."""
        return (
            -1 if self.dtype is None else codecs.storage_bytes(self.shape, self.dtype, self.storage)
        )

    @cached_property
    def elements(self) -> Elements:
        """What the codec wants to know of the numbers; a complex one is two."""
        if self.dtype is None or self.storage == "int8":
            return 1, False
        if self.storage is not None:
            return 2, True
        if self.dtype.is_complex:
            return self.dtype.itemsize // 2, True
        return self.dtype.itemsize, self.dtype.is_floating_point

    def told(self) -> list[Any]:
        """Return what stands for it in JSON.

        Raises:
            ValueError: No record holds such tensors.
        """
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"no record holds tensors of {self.dtype}")
        return [self.name, dtype, self.shape, self.storage]

    @classmethod
    def of(cls, told: Any) -> FieldLayout:
        """Undo `told`.

        Raises:
            TypeError, ValueError, KeyError: It tells of nothing that there is.
        """
        name, dtype, shape, storage = told
        found = cls(name, None if dtype is None else DTYPES[dtype], tuple(shape), storage)
        is_known = type(name) is str and storage in (None, *get_args(StorageDtype))
        is_known = is_known and all(type(n) is int and 0 <= n <= MAX_FIELD_BYTES for n in shape)
        if not is_known or math.prod(shape) > MAX_FIELD_BYTES:
            raise RecordError(f"a tensor of shape {shape}")
        return found


@dataclass(frozen=True)
class Layout:
    """All fields of a record, in their order."""

    fields: tuple[FieldLayout, ...]

    @cached_property
    def is_plain(self) -> bool:
        """All fields are tensors of one size."""
        return all(one.dtype for one in self.fields)

    @cached_property
    def room(self) -> tuple[int, int]:
        """Bytes of what it takes to decode a field, and a record with that: more is none."""
        sizes = [one.num_bytes for one in self.fields]
        decoding = codecs.room_bytes(max(sizes, default=0))
        return decoding, decoding + sum(sizes) + codecs.MOST_HEAD_BYTES

    @cached_property
    def seed(self) -> int:
        """Part of every record's checksum, so that none is read by another layout."""
        return xxhash.xxh3_64_intdigest(self.packed)

    @cached_property
    def packed(self) -> bytes:
        """The bytes that stand for it: JSON."""
        return json.dumps([one.told() for one in self.fields], separators=(",", ":")).encode()

    def sealed(self, identity: int) -> bytes:
        """Return the same behind its hash, which no other generation's has."""
        return xxhash.xxh3_64_intdigest(self.packed, identity).to_bytes(8, "little") + self.packed

    @classmethod
    def unsealed(cls, stored: bytes, identity: int) -> Layout:
        """Undo `sealed`; `RecordError` where it is another generation's, or damaged."""
        found = cls.parse(stored[8:])
        if found.sealed(identity) != stored:
            raise RecordError("another generation's layout")
        return found

    @classmethod
    def parse(cls, stored: bytes) -> Layout:
        """Undo `packed`.

        Raises:
            RecordError: It is none.
        """
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            found = cls(tuple(map(FieldLayout.of, json.loads(stored))))
            if found.packed == stored:
                return found
        raise RecordError("damaged layout")


def encode_value(value: Plain) -> bytes:
    """Return a scalar, text or byte string as tagged bytes.

    Raises:
        TypeError: The value is of another type.
    """
    if isinstance(value, bytes):
        return b"b" + value
    if value is None or isinstance(value, bool | int | float | str):
        return b"j" + json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    raise TypeError(
        "a sample may hold tensors, texts, bytes, numbers, bools and None; "
        f"got {type(value).__name__}"
    )


def decode_value(stored: bytes) -> Plain:
    """Undo `encode_value`.

    Raises:
        RecordError: These bytes are no such value.
    """
    tag, content = stored[:1], stored[1:]
    with suppress(ValueError, RecursionError):
        if tag == b"b":
            return content
        value: Plain = json.loads(content.decode("utf-8", "surrogatepass"))
        if tag == b"j" and (value is None or isinstance(value, int | float | str)):
            return value
    raise RecordError(f"not a stored value: {stored[:16]!r}")


# -- records ---------------------------------------------------------------------------------

ALIGNMENT = 8
HEAD = struct.Struct("<QII")
"""Checksum, bytes of the record, bytes of its key."""
CHECKSUM_BYTES, HEAD_BYTES = 8, HEAD.size
MAX_RECORD_BYTES = 1 << 31
MAX_RATIO_BITS = 22
"""zstd stores a block of 128 KiB in four bytes at best, a byte of a bitmap stands for 64 bytes of
zeros at most: 2^21 together. A field that claims twice that is refused before room is made."""
LENGTH_MASK = (1 << 56) - 1
NUM_RECORDS = 16
MIN_SAVING = 0.05
"""A codec that saves less than this part of the raw bytes is not worth its decoding."""
SAME_BYTES = 0.03
"""Within this margin of the smallest, the codec that decodes fastest is taken."""
FASTEST = (Codec.SPLIT, Codec.BITMAP, Codec.ZSTD)
"""To decode. What the clock said of a few records beside a training changed from run to run."""


Rows = Mapping[str, Tensor | Sequence[Value]]
"""A batch as the writer takes it: per name, a tensor with rows, or a list of values."""


def aligned(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def checksum_of(first: Any, payload: Iterable[Any], seed: int) -> int:
    """Return the checksum of a record's beginning and its stored fields."""
    checksum = xxhash.xxh3_64_intdigest(first, seed)
    for stored in payload:
        checksum = xxhash.xxh3_64_intdigest(stored, checksum)
    return checksum


# -- writing ---------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A record as the pieces that it is put together from when it is written."""

    layout: Layout
    key: bytes
    pieces: Sequence[Any]
    """Buffers."""
    size: int
    """Bytes of the record."""
    replaced: bytes | None = None
    """The last variant that it supersedes, as a key, which goes with the same commit, or nothing;
    None: nothing ever will be."""


Records = Sequence[Encoded]
"""Of one layout; of all or of none something may be superseded."""


def blocks(records: Records, most_bytes: int) -> Iterator[tuple[list[int], bytes]]:
    """Yield where each of some neighbours begins, and their bytes, each record at a multiple of 8:
    so many bytes together at most, or one record that is more.
    """
    starts, pieces, end = list[int](), list[Any](), 0
    for one in records:
        if starts and end + aligned(one.size) > most_bytes:
            yield starts, b"".join(pieces)
            starts, pieces, end = [], [], 0
        starts.append(end)
        pieces += (*one.pieces, bytes(aligned(one.size) - one.size))
        end += aligned(one.size)
    if starts:
        yield starts, b"".join(pieces)


def encode_rows(
    keys: Sequence[bytes],
    rows: Rows,
    coder: Coder,
    identity: int = 0,
    replaced: Sequence[bytes] | None = None,
    known: Layout | None = None,
) -> list[Encoded]:
    """Return the records of a batch's first rows.

    Args:
        keys: Of these rows.
        rows: The batch.
        coder: Its codec is tried on every field large enough; one it does not shrink stays raw.
        identity: Of the generation; part of the checksums.
        replaced: Per row, see `Encoded`.
        known: What the generation's records hold; None before the first one.

    Raises:
        TypeError: A value of a type that no record holds.
        ValueError: A record too large, or not of the layout that is known.
    """
    storages = {one.name: one.storage for one in known.fields} if known is not None else {}
    columns = [
        _column(name, value, storages.get(name, coder.storage)) for name, value in rows.items()
    ]
    layout = Layout(tuple(field for field, _ in columns))
    if known is not None and layout != known:
        raise ValueError(
            f"records here hold ({_in_words(known)}), and it holds ({_in_words(layout)})"
        )
    stored = [
        [coder.encode(data[row], field.elements) for row in range(len(keys))]
        if isinstance(data, np.ndarray)
        else [_encode_free(data[row], coder) for row in range(len(keys))]
        for field, data in columns
    ]
    every: Sequence[bytes | None] = replaced or [None] * len(keys)
    seed = identity ^ layout.seed
    made = [_pieces(key, own, seed) for key, *own in zip(keys, *stored, strict=True)]
    return [
        Encoded(layout, key, pieces, sum(map(len, pieces)), last)
        for key, pieces, last in zip(keys, made, every, strict=True)
    ]


def choose_codec(keys: Sequence[bytes], rows: Rows, coder: Coder) -> str:
    """Set the codec for these records; return what each made of them in words.

    Smallest wins; among equals the fastest to decode; raw unless something is saved.
    """
    sizes = {}
    for codec in Codec if codecs.kernel() is not None else (Codec.RAW, Codec.ZSTD):
        trial = Coder(codec.label, coder.storage)
        sizes[codec] = sum(one.size for one in encode_rows(keys[:NUM_RECORDS], rows, trial))
    best, least = Codec.RAW, min(sizes.values())
    if least <= (1 - MIN_SAVING) * sizes[best]:
        small = [codec for codec, size in sizes.items() if size <= (1 + SAME_BYTES) * least]
        best = next((codec for codec in FASTEST if codec in small), small[0])
    coder.codec = best
    made = ", ".join(f"{codec.label} {size} B" for codec, size in sizes.items())
    return f"{best.label}: {made}"


def _in_words(layout: Layout) -> str:
    return ", ".join(f"{one.name}: {one.kind}" for one in layout.fields)


def _pieces(key: bytes, fields: Sequence[tuple[int, Any]], seed: int) -> Sequence[Any]:
    head, payload = _first(len(key), len(fields)), [stored for _, stored in fields]
    words = (codec << 56 | len(stored) for codec, stored in fields)
    size = CHECKSUM_BYTES + head.size + sum(map(len, payload))
    if size > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {size} bytes; {MAX_RECORD_BYTES} are stored at most")
    first = head.pack(size, len(key), key, *words)
    return checksum_of(first, payload, seed).to_bytes(8, "little"), first, *payload


@cache
def _first(key_bytes: int, num_fields: int) -> struct.Struct:
    """What of a record stands between its checksum and its fields."""
    return struct.Struct(f"<II{aligned(key_bytes)}s{num_fields}Q")


def _column(
    name: str, value: Tensor | Sequence[Value], storage: Storage
) -> tuple[FieldLayout, Bytes | Sequence[Value]]:
    """Return what is the same in all rows, and (B, bytes), without copying if possible; or what
    each record tells of itself.
    """
    if not isinstance(value, Tensor):
        return FieldLayout(name), value
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    packed, used = codecs.pack(plain, storage)
    return FieldLayout(name, value.dtype, tuple(value.shape[1:]), used), packed.numpy()


def _encode_free(value: Value, coder: Coder) -> tuple[Codec, bytes]:
    if not isinstance(value, Tensor):
        return Codec.RAW, encode_value(value)
    field, data = _column("", value[None], coder.storage)
    assert isinstance(data, np.ndarray)
    used, stored = coder.encode(data[0], field.elements)
    head = json.dumps(field.told(), separators=(",", ":")).encode()
    return used, b"".join((b"t", len(head).to_bytes(2, "little"), head, stored))


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

    @classmethod
    def open(cls, key: bytes, value: Any, layout: Layout, identity: int = 0) -> Record:
        """Check a record against its own sizes and its checksum; decode nothing yet.

        Args:
            key: The key it was found under.
            value: Its bytes, any buffer.
            layout: Of the generation's records.
            identity: Of the generation.

        Raises:
            RecordError: Damaged, cut short, or of another sample, layout or generation.
        """
        view, count = memoryview(value), len(layout.fields)
        if len(view) < HEAD_BYTES:
            raise RecordError(f"{len(view)} bytes are no record")
        expected, size, key_bytes = HEAD.unpack_from(view)
        begin = HEAD_BYTES + aligned(key_bytes)
        end = begin + 8 * count
        if size != len(view) or end > size:
            raise RecordError(f"a record of {size} bytes in an entry of {len(view)}")
        if view[HEAD_BYTES : HEAD_BYTES + key_bytes] != key:
            raise RecordError("it is another sample's")
        words = struct.unpack_from(f"<{count}Q", view, begin)
        ends = [*itertools.accumulate((word & LENGTH_MASK for word in words), initial=end)]
        payload = tuple(view[one:next_] for one, next_ in itertools.pairwise(ends))
        checksum = checksum_of(view[CHECKSUM_BYTES:end], payload, identity ^ layout.seed)
        if ends[-1] != size or checksum != expected:
            raise RecordError("the checksum does not match")
        return cls(view, layout, tuple(word >> 56 for word in words), payload)

    def field(self, position: int) -> tuple[FieldLayout, memoryview]:
        """Return what a field holds in this record, and its numbers.

        Raises:
            RecordError: It tells of no tensor that there is.
        """
        field, stored = self.layout.fields[position], self.payload[position]
        if field.dtype is not None or bytes(stored[:1]) != b"t":
            return field, stored
        end = 3 + int.from_bytes(stored[1:3], "little")
        return _told(bytes(stored[3:end])), stored[end:]

    def value(self, position: int) -> Value:
        """Decode one field.

        Raises:
            RecordError: It is not what the layout says.
            NeedsKernelError: Nothing here can decode it.
        """
        (field, stored), codec = self.field(position), self.codecs[position]
        if field.dtype is None:
            if codec != Codec.RAW:
                raise RecordError("a scalar or text with a codec")
            return decode_value(bytes(stored))
        if field.num_bytes > len(stored) << MAX_RATIO_BITS:
            raise RecordError(f"{field.kind}: only {len(stored)} bytes")
        packed = torch.empty(field.num_bytes, dtype=torch.uint8)
        try:
            decode(stored, codec, packed.numpy(), field.elements)
            if field.storage is None:
                return packed.view(field.dtype).view(field.shape)
            return codecs.unpack(packed[None], field.shape, field.dtype, field.storage)[0]
        except (CodecError, RuntimeError) as error:  # a forged shape that no tensor can have
            raise RecordError(str(error)) from None


@lru_cache(4096)
def _told(head: bytes) -> FieldLayout:
    """Return what a tensor of a record tells of itself."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return FieldLayout.of(json.loads(head))
    raise RecordError("what it tells of itself is damaged")


def key_of(record: Any) -> bytes:
    """Return the key that a record claims."""
    return bytes(record[HEAD_BYTES : HEAD_BYTES + HEAD.unpack_from(record)[2]])


def split_block(block: memoryview) -> Iterator[memoryview]:
    """Yield the records of a block, unchecked, as far as their lengths lead."""
    at = 0
    while len(block) - at >= HEAD_BYTES:
        size = HEAD.unpack_from(block, at)[1]
        if not HEAD_BYTES <= size <= len(block) - at:
            return
        yield block[at : at + size]
        at += aligned(size)
