"""What every reader of stored bytes must do with any bytes at all, as one function to be fuzzed."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from egeria_cache.store.codecs.codec import Codec, CodecError, Coder, NeedsKernelError
from egeria_cache.store.records.keys import decode_key, encode_key
from egeria_cache.store.records.layout import Layout, RecordError, decode_value
from egeria_cache.store.records.record import (
    HEAD,
    Rows,
    aligned,
    encode_rows,
    open_record,
    split_block,
)

KEY = encode_key(7)
CODER = Coder()
LARGE_BYTES = 2**24
"""A record that passes its checksum says how much memory to take; the fuzzer can forge one."""


def check(blob: bytes) -> str:
    """Feed the bytes to every decoder; return how far the record got.

    Args:
        blob: Bytes of a layout's length (2), a layout, a record.

    Raises:
        Exception: Any but the errors that damaged bytes are supposed to end in.
    """
    for decode, errors in ((decode_value, RecordError), (decode_key, ValueError)):
        with contextlib.suppress(errors):
            decode(blob)
    for _ in split_block(memoryview(blob)):
        pass
    _check_field(blob)
    size = int.from_bytes(blob[:2], "little")
    try:
        layout = Layout.parse(blob[2 : 2 + size])
    except RecordError:
        return "no layout"
    record = blob[2 + size :]
    with contextlib.suppress(RecordError):
        open_record(KEY, record, layout)
        return "intact"  # a seed, or the checksum is broken: both are worth a look
    try:
        opened = open_record(KEY, seal(record, layout), layout)
    except RecordError:
        return "refused"
    outcome = "decoded"
    for position in range(len(opened.payload)):
        try:
            field, _ = opened.field(position)
            if field.num_bytes > LARGE_BYTES:
                outcome = "large"
                continue
            value = opened.value(position, CODER)
            if isinstance(value, torch.Tensor):
                assert (value.dtype, tuple(value.shape)) == (field.dtype, field.shape)
        except (RecordError, NeedsKernelError):
            outcome = "damaged field"
    return outcome


def _check_field(blob: bytes) -> None:
    """Decode the bytes as one field: codec and size from the first four, the rest as stored."""
    if len(blob) < 4:
        return
    codec, kind, count = struct.unpack_from("<BBH", blob)
    width, floating = ((1, False), (2, True), (4, True), (8, True), (3, False))[kind % 5]
    target = np.empty(width * (count % 2048), np.uint8)
    with contextlib.suppress(CodecError):
        CODER.decode_into(blob[4:], codec % 5, target, (width, floating))


def seal(record: bytes, layout: Layout) -> bytes:
    """Give a record the length, the key, the last stored length and the checksum that its other
    bytes want, so that it is opened.
    """
    start = HEAD.size + aligned(len(KEY))
    count = len(layout.fields)
    end = start + 8 * count
    if len(record) < end:
        return record
    words = list(struct.unpack_from(f"<{count}Q", record, start))
    stored = [word & (2**56 - 1) for word in words[:count]]
    rest = len(record) - end - sum(stored[:-1])
    if count and rest >= 0:
        stored[-1] = rest
        words[count - 1] = words[count - 1] >> 56 << 56 | rest
    head = HEAD.pack(0, len(record), len(KEY))[8:]
    head += KEY + bytes(-len(KEY) % 8) + struct.pack(f"<{len(words)}Q", *words)
    checksum, at = xxhash.xxh3_64_intdigest(head, layout.seed), end
    for size in stored:
        checksum = xxhash.xxh3_64_intdigest(record[at : at + size], checksum)
        at += size
    return struct.pack("<Q", checksum) + head + record[end:]


def seeds() -> Iterator[bytes]:
    """Yield records of every codec, storage and kind of field."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    for codec, dtype, size in itertools.product(Codec, dtypes, (3, 400)):
        act = torch.randn(1, 2, size, generator=torch.Generator().manual_seed(size)).relu()
        fields = {"act": act.to(dtype), "label": torch.tensor([3]), "text": ["ab"]}
        yield from _records(fields, codec)
    for storage in ("float16", "bfloat16", "int8"):
        yield from _records({"act": torch.randn(1, 3, 100)}, Codec.SPLIT, storage)
    # The field that the codec made stands last, so that its length can grow and shrink.
    for codec in Codec:
        act = torch.randn(1, 400, generator=torch.Generator().manual_seed(1)).relu()
        yield from _records({"label": torch.tensor([3]), "act": act}, codec)
    yield from _records({"none": [None], "scalar": [1.5], "empty": torch.zeros(1, 0)}, Codec.RAW)
    yield from _records({"ragged": [torch.ones(3, 40)], "text": ["ab"]}, Codec.ZSTD)


def _records(fields, codec, storage=None) -> Iterator[bytes]:
    records = encode_rows([KEY], [0], Rows(False, fields), codec, CODER, storage)
    layout = records.layout.packed
    for pieces in records.pieces:
        yield len(layout).to_bytes(2, "little") + layout + b"".join(pieces)
