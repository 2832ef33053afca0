"""What every reader of stored bytes must do with any bytes at all, as one function to be fuzzed."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from egeria_cache.store.codecs.codec import Codec, CodecError, Coder
from egeria_cache.store.disk.log import parse_commit
from egeria_cache.store.records.keys import decode_key, encode_key
from egeria_cache.store.records.layout import parse_head, payload_seed
from egeria_cache.store.records.record import Rows, encode_rows, open_record
from egeria_cache.store.records.values import RecordError, decode_value

KEY = encode_key(7)
CODER = Coder()
LARGE_BYTES = 2**24
"""A record that passes its checksum says how much memory to take; the fuzzer can forge one."""


def check(blob: bytes) -> str:
    """Feed the bytes to every decoder; return how far the record got.

    Raises:
        Exception: Any but the errors that damaged bytes are supposed to end in.
    """
    for decode, errors in ((decode_value, RecordError), (decode_key, ValueError)):
        with contextlib.suppress(errors):
            decode(blob)
    assert parse_commit(memoryview(blob), 0) is None  # else the checksum is broken
    try:
        open_record(KEY, blob)
        return "intact"  # a seed, or the checksum is broken: both are worth a look
    except RecordError:
        pass
    _check_field(blob)
    sealed = seal(blob)
    if sealed is None:
        return "no head"
    try:
        record = open_record(KEY, sealed)
    except RecordError:
        return "refused"
    outcome = "decoded"
    for position, field in enumerate(record.layout.fields):
        if field.num_bytes > LARGE_BYTES:
            outcome = "large"
            continue
        try:
            if field.dtype is None:
                record.value(position)
            else:
                tensor = record.tensor(position, CODER)
                assert tensor.dtype == field.dtype
                assert tuple(tensor.shape) == tuple(field.shape)
        except RecordError:
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


def seal(blob: bytes) -> bytes | None:
    """Give a record the last length and the checksum that its other bytes want, so that it is
    opened; None if even its head cannot be parsed.
    """
    blob = _with_last_length(blob)
    try:
        head = parse_head(memoryview(blob))
    except RecordError:
        return None
    seed = payload_seed(head.seed, KEY, 0)
    checksum = xxhash.xxh3_64_intdigest(blob[head.num_bytes :], seed)
    return struct.pack("<Q", checksum) + blob[8:]


def _with_last_length(blob: bytes) -> bytes:
    """Let the sizes in the head add up: the fuzzer changes a record's length all the time."""
    if len(blob) < 16:
        return blob
    num_fields, layout_bytes = struct.unpack_from("<BI", blob, 11)
    end = 16 + 8 * num_fields + layout_bytes
    if not num_fields or end > len(blob):
        return blob
    lengths = list(struct.unpack_from(f"<{num_fields}Q", blob, 16))
    rest = len(blob) - end - sum(length & (2**56 - 1) for length in lengths[:-1])
    if rest < 0:
        return blob
    lengths[-1] = lengths[-1] >> 56 << 56 | rest
    return blob[:16] + struct.pack(f"<{num_fields}Q", *lengths) + blob[16 + 8 * num_fields :]


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


def fields() -> Iterator[bytes]:
    """Yield fields as `_check_field` takes them: they are no records."""
    data = np.random.default_rng(0).integers(0, 3, 1024).astype(np.uint8)
    for codec, (kind, elements) in itertools.product(
        (Codec.ZSTD, Codec.SPLIT, Codec.BITMAP),
        enumerate(((1, False), (2, True), (4, True), (8, True))),
    ):
        used, stored = CODER.encode(data, codec, elements)
        yield struct.pack("<BBH", used, kind, len(data) // elements[0]) + bytes(stored)


def _records(fields, codec, storage=None) -> Iterator[bytes]:
    for _, record in encode_rows([KEY], [0], Rows(False, fields), codec, CODER, storage):
        yield bytes(record)
