import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from egeria_cache.store.codecs import pack, storage_bytes, unpack
from egeria_cache.store.generation import encode_keys
from egeria_cache.store.record import decode_key, encode_key
from tests.helpers.stored import ActivationStore
from tests.store.conftest import keep

elements = st.integers() | st.text(max_size=40)
sample_ids = elements | st.text(max_size=100) | st.lists(elements, max_size=4).map(tuple)


@given(sample_ids, st.integers(0, 2**32 - 1))
def test_a_key_decodes_to_the_sample_and_variant_it_was_made_from(sample_id, variant):
    assert decode_key(encode_key(sample_id, variant)) == (sample_id, variant)


@given(st.lists(sample_ids, max_size=8), st.integers(0, 9))
def test_a_batch_is_encoded_as_its_samples_are_one_by_one(ids, variant):
    assert encode_keys(ids, variant) == [encode_key(one, variant) for one in ids]


@given(sample_ids, sample_ids)
def test_different_samples_have_different_keys(one, other):
    assert (encode_key(one) == encode_key(other)) == (one == other)


def test_a_long_id_is_hashed_to_a_key_of_bounded_length():
    one = "x" * 5000, 1
    assert len(encode_key(one)) <= 511
    assert encode_key(one) != encode_key(("x" * 5000, 2))
    assert decode_key(encode_key(one, 3)) == (None, 3)
    assert encode_key("\U0001f600") != encode_key("\ud83d\ude00"), "halves that stand alone"


@pytest.mark.parametrize("ids", [np.arange(3), np.arange(3, dtype=np.uint8), range(3)])
def test_arrays_and_ranges_are_encoded_as_lists_of_integers(ids):
    assert encode_keys(ids) == encode_keys([0, 1, 2])


@pytest.mark.parametrize("make", [np.array, list], ids=["array", "list of scalars"])
def test_huge_unsigned_ids_do_not_wrap_around(make):
    ids = make(np.array([2**63 + 5, 1, 2**64 - 1], np.uint64))
    assert encode_keys(ids) == [encode_key(2**63 + 5), encode_key(1), encode_key(2**64 - 1)]
    assert encode_key(-1) not in encode_keys(ids)


@pytest.mark.parametrize("bad", [1.5, None, b"bytes", (1, 2.5)])
def test_an_id_of_another_type_is_refused_by_name(bad):
    with pytest.raises(TypeError, match="a sample ID is"):
        encode_key(bad)


@given(st.binary(max_size=64))
def test_decoding_arbitrary_bytes_gives_an_id_or_a_value_error(blob):
    try:
        decode_key(blob)
    except ValueError:
        return
    assert blob[:1] in (b"i", b"j", b"h")


SHAPES = [(5,), (6, 7), (3, 4, 5), (2, 3, 4, 5), ()]


def through(rows, storage):
    packed, used = pack(rows, storage)
    shape = tuple(rows.shape[1:])
    assert packed.shape == (len(rows), storage_bytes(shape, rows.dtype, used))
    return unpack(packed, shape, rows.dtype, used), used


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("storage", "bound"), [("float16", 5e-4), ("bfloat16", 4e-3), ("int8", 5e-3)]
)
def test_the_error_is_within_the_storages_resolution(storage, bound, shape):
    rows = torch.randn(8, *shape, generator=torch.Generator().manual_seed(0))
    back, used = through(rows, storage)
    assert used == storage
    assert back.shape == rows.shape
    assert back.dtype == rows.dtype
    scale = rows.abs().max() if storage == "int8" else rows.abs()
    assert ((back - rows).abs() <= bound * scale + 1e-7).all()


@pytest.mark.parametrize(
    ("rows", "storage"),
    [(torch.full((2, 3), 1e6), "float16"), (torch.tensor([[float("nan")]]), "int8"),
     (torch.tensor([[float("inf")]]), "bfloat16"), (torch.arange(6).view(2, 3), "int8"),
     *((torch.ones(2, 3, dtype=one), "float16") for one in (torch.bool, torch.bfloat16)),
     (torch.ones(2, 3, dtype=torch.complex64), "int8"), (torch.empty(2, 0), "int8")],
    ids=str,
)  # fmt: skip
def test_what_the_storage_cannot_hold_keeps_every_bit(rows, storage):
    back, used = through(rows, storage)
    assert used is None
    assert torch.equal(back.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize("codec", ["raw", "zstd", "split+zstd", "bitmap+split", "auto"])
@pytest.mark.parametrize("storage", ["float16", "bfloat16", "int8"])
def test_a_lossy_generation_has_its_own_address(directory, storage, codec):
    batch = {"act": torch.randn(20, 8, 16), "label": torch.arange(20)}
    batch["ragged"] = [torch.ones(3)] * 20
    with ActivationStore(directory, codec=codec) as store:
        exact = store.open_generation({"a": 1}).name
    with ActivationStore(directory, codec=codec, storage_dtype=storage) as store:
        generation = store.open_generation({"a": 1})
        assert generation.name != exact
        assert generation.fields["storage_dtype"] == storage
        keep(store, range(20), batch, into=generation)
        got, hit = generation.get_batch([3, 50, 4])
        assert hit.tolist() == [True, False, True]
        assert got["act"].dtype == torch.float32
        torch.testing.assert_close(got["act"][[0, 2]], batch["act"][[3, 4]], atol=0.02, rtol=0.02)
        assert not got["act"][1].any()
        assert got["label"][[0, 2]].tolist() == [3, 4]
