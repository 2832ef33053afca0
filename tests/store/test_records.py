import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria_cache.store.codecs import Codec, CodecError, Coder
from egeria_cache.store.codecs import decode as decode_bytes
from egeria_cache.store.generation import encode_keys
from egeria_cache.store.record import (
    DTYPES,
    FieldLayout,
    Layout,
    Record,
    RecordError,
    choose_codec,
    decode_value,
    encode_rows,
    encode_value,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SPLIT = (2, 3)
"""Read by the compiled kernel alone."""
CODECS = list(Codec)


def bits_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def decode(key, record, layout):
    opened = Record.open(key, record, layout)
    return {one.name: opened.value(at) for at, one in enumerate(opened.layout.fields)}


def encode(keys, rows, codec, **options):
    """Key, record and layout of each row."""
    records = encode_rows(keys, rows, Coder(codec.label), **options)
    return [(one.key, b"".join(one.pieces), Layout.parse(one.layout.packed)) for one in records]


def random_tensor(dtype, shape, seed=0, zeros=False):
    count = int(np.prod(shape)) * dtype.itemsize
    blob = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count)
    if zeros:
        blob[: count // 2] = 0
    flat = torch.from_numpy(blob.astype(np.uint8))
    return flat.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bits_of(one) == bits_of(other)


@pytest.fixture(params=CODECS)
def codec(request, way_to_read):
    if request.param in SPLIT:
        request.getfixturevalue("compiled")
    return request.param


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@pytest.mark.usefixtures("compiled")
@given(
    st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), shapes), max_size=4),
    st.sampled_from(CODECS), st.integers(0, 99), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_any_set_of_named_tensors_round_trips(fields, codec, seed, zeros):
    batch = {
        f"field {position}": random_tensor(dtype, (3, *shape), seed + position, zeros)
        for position, (dtype, shape) in enumerate(fields)
    }
    keys = encode_keys(["a", "b", "c"])
    encoded = encode(keys[:2], batch, codec)
    assert [key for key, *_ in encoded] == keys[:2]
    for row, one in enumerate(encoded):
        decoded = decode(*one)
        assert decoded.keys() == batch.keys()
        assert all(same(decoded[name], value[row]) for name, value in batch.items())


values = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)


@given(values)
def test_any_scalar_or_text_round_trips_with_its_type(value):
    decoded = decode_value(encode_value(value))
    assert decoded == value
    assert type(decoded) is type(value)


def sample_record(codec, dtype=torch.float32):
    act = random_tensor(dtype, (1, 300), zeros=True)
    batch = {"act": act, "label": torch.tensor([3]), "text": ["hello"]}
    (encoded,) = encode(encode_keys([5]), batch, codec)
    return encoded


def test_a_record_with_any_bit_flipped_cut_short_or_continued_is_refused(codec):
    key, record, layout = sample_record(codec)
    decode(key, record, layout)
    changed = [bytearray(record + b"\0")]
    for at in range(len(record)):
        changed += bytearray(record), bytearray(record[:at])
        changed[-2][at] ^= 1 << at % 8
    for one in changed:
        with pytest.raises(RecordError):
            Record.open(key, bytes(one), layout)


def test_a_record_under_another_key_layout_or_generation_is_refused():
    key, record, layout = sample_record(Codec.RAW)
    with pytest.raises(RecordError, match="another sample"):
        Record.open(encode_keys([6])[0], record, layout)
    field = layout.fields[0]
    other = FieldLayout(field.name, torch.int32, field.shape)
    with pytest.raises(RecordError, match="checksum"):
        Record.open(key, record, Layout((other, *layout.fields[1:])))
    with pytest.raises(RecordError, match="checksum"):
        Record.open(key, record, layout, identity=1)


def test_a_zstd_frame_that_claims_gigabytes_is_refused_before_anything_is_allocated():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(2**24))
    with pytest.raises(CodecError, match="not what was promised"):
        decode_bytes(bomb, Codec.ZSTD, np.empty(64, np.uint8), (1, False))


def relu(count=64, size=4096):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, size, generator=generator).relu()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        pytest.param(relu(), {Codec.BITMAP}, id="sparse"),
        pytest.param(torch.randn(64, 4096).bfloat16(), {Codec.SPLIT}, id="dense bfloat16"),
        pytest.param(torch.randint(0, 256, (64, 4096)).to(torch.uint8), {Codec.RAW}, id="noise"),
        pytest.param(torch.zeros(64, 4096), {Codec.ZSTD, Codec.BITMAP, Codec.SPLIT}, id="zeros"),
    ],
)
def test_auto_takes_the_codec_that_suits_the_data(tensor, expected):
    keys, coder = encode_keys(range(64)), Coder()
    with pytest.raises(TypeError):
        choose_codec(keys, {"x": [object()] * 64}, coder)
    assert coder.codec is None, "it is chosen by the next batch"
    assert choose_codec(keys, {"x": tensor}, coder) and coder.codec in expected  # noqa: PT018
