from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria_cache.store.disk.index import HashTable, Index, IntegerTable
from egeria_cache.store.records.keys import encode_key, encode_keys

sample_ids = (
    st.integers(0, 50)
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=3)
    | st.tuples(st.integers(0, 3), st.text(max_size=1))
)


def spans_of(count, begin=1):
    return np.stack((8 * np.arange(count), np.arange(begin, begin + count)), 1).astype(np.uint64)


@given(st.lists(st.lists(st.tuples(sample_ids, st.integers(0, 2)), max_size=20), max_size=8))
@settings(max_examples=60, deadline=None)
def test_all_that_was_added_is_found_where_it_was_last_put_and_nothing_else_is(batches):
    index, added = Index(), {}
    for number, batch in enumerate(batches):
        spans = spans_of(len(batch), 1 + 100 * number)
        index.add([encode_key(one, variant) for one, variant in batch], spans)
        added.update(zip(batch, map(tuple, spans.tolist()), strict=True))
    assert len(index) == len(added)
    for variant in range(3):
        ids = [one for one, _ in added] + list(range(60)) + ["no", (9, "no")]
        expected = [added.get((one, variant), (0, 0)) for one in ids]
        assert list(map(tuple, index.locate(ids, variant).tolist())) == expected
        keys = [encode_key(one, variant) for one in ids]
        assert list(map(tuple, index.locate_keys(keys).tolist())) == expected


def test_an_integer_batch_is_looked_up_among_others_of_all_kinds():
    index = Index()
    index.add(encode_keys([1, 2, 10**12, -4]) + encode_keys(["1", (1, 2)]), spans_of(6))
    assert index.locate([1, 3, 10**12, -4, 2], 0)[:, 1].tolist() == [1, 0, 3, 4, 2]
    assert index.locate(np.array([2, 3]), 0)[:, 1].tolist() == [2, 0]
    assert index.locate(["1", (1, 2), 1, "2"], 0)[:, 1].tolist() == [5, 6, 1, 0]


def test_a_denied_key_is_absent_until_it_is_added_again():
    index = Index()
    index.add(encode_keys([1, 2]) + encode_keys(["a"]), spans_of(3))
    assert index.deny(encode_key(1))
    assert index.deny(encode_key("a"))
    assert not index.deny(encode_key("a"))
    assert not index.deny(encode_key(7))
    assert index.locate([1, 2], 0)[:, 1].tolist() == [0, 2]
    assert index.locate(["a", 2], 0)[:, 1].tolist() == [0, 2]
    assert len(index) == 1
    index.add([encode_key(1), encode_key("a")], spans_of(2))
    assert index.locate([1, "a"], 0)[:, 1].tolist() == [1, 2]
    assert len(index) == 3


@pytest.mark.parametrize("size", [10, 5_000, 200_000])
def test_a_hash_table_finds_all_it_holds_in_every_layer(size):
    hashes = np.random.default_rng(0).integers(0, 2**63, size).astype(np.uint64)
    table, spans = HashTable(), spans_of(size)
    for start in range(0, size, 1000):
        table.add(hashes[start : start + 1000], spans[start : start + 1000])
    table.add(hashes[:5], spans[5:10])
    assert table.count == size
    assert (table.locate(hashes)[5:] == spans[5:]).all()
    assert (table.locate(hashes)[:5] == spans[5:10]).all()
    assert not table.locate(hashes + np.uint64(2**63)).any()
    assert table.nbytes <= 24 * size


def test_a_million_dense_integers_cost_sixteen_bytes_each():
    table = IntegerTable()
    assert table.add(np.random.default_rng(0).permutation(10**6), spans_of(10**6)).all()
    assert table.nbytes <= 16 * 2**20
    assert (table.locate(np.array([0, 10**6 - 1, 10**6, -1, 2**62]))[:, 1] > 0).tolist() == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_sparse_integers_do_not_make_a_huge_table():
    index = Index()
    index.add(encode_keys((np.arange(1000) * 10**15).tolist()), spans_of(1000))
    assert index.nbytes < 2**20
    assert index.locate([0, 10**15, 5], 0)[:, 1].tolist() == [1, 2, 0]
