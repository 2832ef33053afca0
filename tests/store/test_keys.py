import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egeria_cache.store.records.keys import decode_key, encode_key, encode_keys

int64 = st.integers(-(2**63), 2**63 - 1)
elements = st.integers() | st.text(max_size=40)
sample_ids = int64 | st.text(max_size=100) | st.lists(elements, max_size=4).map(tuple)


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
    one, other = ("x" * 5000, 1), ("x" * 5000, 2)
    assert len(encode_key(one)) <= 511
    assert encode_key(one) != encode_key(other)
    assert decode_key(encode_key(one, 3)) == (None, 3)


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
    assert blob[:1] in (b"i", b"s", b"t", b"h")
