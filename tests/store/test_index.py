from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import egeria_cache.store.index as index_module
from egeria_cache.store.index import HashSet, IntegerSet, Membership
from egeria_cache.store.keys import encode_key, encode_keys

sample_ids = (
    st.integers(0, 50)
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=3)
    | st.tuples(st.integers(0, 3), st.text(max_size=1))
)


@given(st.lists(st.lists(st.tuples(sample_ids, st.integers(0, 2)), max_size=20), max_size=8))
@settings(max_examples=60, deadline=None)
def test_all_that_was_added_is_found_and_hardly_anything_else(batches):
    membership, added = Membership(), set()
    for batch in batches:
        membership.add_keys([encode_key(one, variant) for one, variant in batch])
        added.update(batch)
    for variant in range(3):
        ids = [one for one, _ in added] + list(range(60)) + ["no", (9, "no")]
        expected = [(one, variant) in added for one in ids]
        assert membership.contains(ids, variant).tolist() == expected


def test_an_integer_batch_is_looked_up_among_others_of_all_kinds():
    membership = Membership()
    membership.add_keys(encode_keys([1, 2, 10**12, -4]) + encode_keys(["1", (1, 2)]))
    assert membership.contains([1, 3, 10**12, -4, 2], 0).tolist() == [True, False, True, True, True]
    assert membership.contains(np.array([2, 3]), 0).tolist() == [True, False]
    assert membership.contains(["1", (1, 2), 1, "2"], 0).tolist() == [True, True, True, False]


def test_a_denied_key_is_absent_until_it_is_added_again():
    membership = Membership()
    membership.add_keys(encode_keys([1, 2]) + encode_keys(["a"]))
    membership.deny(encode_key(1))
    membership.deny(encode_key("a"))
    assert membership.contains([1, 2], 0).tolist() == [False, True]
    assert membership.contains(["a", 2], 0).tolist() == [False, True]
    membership.add_keys([encode_key(1), encode_key("a")])
    assert membership.contains([1, "a"], 0).all()


@pytest.mark.parametrize("size", [10, 5_000, 200_000])
def test_a_hash_set_finds_all_its_keys_in_every_layer(size, monkeypatch):
    monkeypatch.setattr(index_module, "_PACKED_FROM", 100_000)
    keys = encode_keys([f"sample-{one}" for one in range(size)])
    hashes = HashSet()
    for start in range(0, size, 1000):
        hashes.add(keys[start : start + 1000])
    assert hashes.contains(keys).all()
    others = encode_keys([f"other-{one}" for one in range(10_000)])
    assert hashes.contains(others).mean() <= 0.002
    assert hashes


def test_ten_million_dense_integers_cost_less_than_a_quarter_byte_each():
    bits = IntegerSet()
    assert bits.add(np.random.default_rng(0).permutation(10**7)).all()
    assert bits.nbytes <= 0.25 * 10**7
    assert bits.contains(np.array([0, 10**7 - 1, 10**7, -1, 2**62])).tolist() == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_a_large_hash_set_costs_at_most_two_bytes_a_key():
    hashes = np.cumsum(np.random.default_rng(0).integers(1, 850, 10**7)).astype(np.uint32)
    base = index_module._Base(hashes)
    assert base.nbytes <= 2 * len(hashes)
    assert base.contains(hashes[::1000]).all()
    assert np.array_equal(base.values()[::97], hashes[::97])
    others = np.random.default_rng(1).integers(0, 2**32, 50_000).astype(np.uint32)
    assert base.contains(others).mean() < 0.004


def test_sparse_integers_do_not_make_a_huge_bitmap():
    membership = Membership()
    keys = encode_keys((np.arange(1000) * 10**15).tolist())
    membership.add_keys(keys)
    assert membership.nbytes < 5 * 2**20
    assert membership.contains([0, 10**15, 5], 0).tolist() == [True, True, False]
