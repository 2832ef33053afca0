"""Records whose shapes differ, as those of padded samples: each comes back as it was, or not."""

from __future__ import annotations

import itertools

import pytest
import torch

from egeria_cache.store import ActivationStore
from tests.store.conftest import keep

LENGTHS = [5, 3, 900, 3, 1, 40, 0, 700, 5, 9]


def rows_of(lengths):
    torch.manual_seed(0)
    states = [torch.randn(length, 24).relu() for length in lengths]
    return {
        "states": states,
        "mask": [torch.ones(length, dtype=torch.bool) for length in lengths],
        "label": torch.arange(len(lengths)),
        "text": [str(length) for length in lengths],
    }


@pytest.fixture(params=["raw", "zstd", "split+zstd", "bitmap+split"])
def stored(request, tmp_path, way_to_read):
    if "split" in request.param:
        request.getfixturevalue("compiled")
    rows = rows_of(LENGTHS)
    with ActivationStore(tmp_path, codec=request.param) as store:
        keep(store, range(len(LENGTHS)), rows)
        yield store, rows


def check(store, rows, order):
    found, hit = store.get_batch(order)
    assert hit.tolist() == [one < len(LENGTHS) for one in order]
    for name, column in found.items():
        for one, value in zip(order, column, strict=True):
            if one >= len(LENGTHS):
                continue
            expected = rows[name][one]
            if isinstance(expected, str):
                assert value == expected
            else:
                assert value.dtype == expected.dtype
                assert torch.equal(value, expected)
    return found


def test_they_come_back_as_they_were_however_often_they_are_read(stored):
    store, rows = stored
    for order in ([2, 7, 1, 0], [6, 99, 2, 2, 3, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [98, 4]):
        check(store, rows, order)


def test_what_has_one_shape_in_all_rows_of_a_batch_is_one_tensor(stored):
    store, rows = stored
    for _ in range(2):
        found = check(store, rows, [0, 2, 5, 7])
        assert isinstance(found["label"], torch.Tensor)
        assert isinstance(found["states"], list)
    found = check(store, rows, [1, 99, 3])
    assert isinstance(found["states"], torch.Tensor)
    assert found["states"].shape == (3, 3, 24)
    assert not found["states"][1].any()


def test_rows_are_the_callers_own(stored):
    store, rows = stored
    for _ in range(2):
        found, _ = store.get_batch([0, 8, 2])
        for row in found["states"]:
            row.fill_(7.0)
    check(store, rows, [0, 8, 2])


def test_lossy_numbers_of_differing_shapes_are_unpacked(tmp_path):
    rows = rows_of(LENGTHS)["states"]
    with ActivationStore(tmp_path, storage_dtype="bfloat16") as store:
        keep(store, range(len(rows)), {"x": rows})
        for order in itertools.permutations([0, 2, 7]):
            found, _ = store.get_batch(list(order))
            for one, row in zip(order, found["x"], strict=True):
                assert torch.equal(row, rows[one].bfloat16().float())


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_of_another_layout_is_refused_by_name(tmp_path, caplog, together):
    rows = rows_of(LENGTHS)["states"]
    with ActivationStore(tmp_path) as store:
        store.gather(together)
        store.put_batch(range(len(rows)), {"x": rows})
        assert together or store.flush(30)
        keep(store, [50], {"y": torch.ones(1, 3)})
        assert "records here hold (" in caplog.text
        assert "it holds (y: float32 [3])" in caplog.text
        assert store.stats().dropped_writes == 1
        for _ in range(2):
            found, hit = store.get_batch([0, 50, 2])
            assert hit.tolist() == [True, False, True]
            assert found["x"][1] is None
            assert torch.equal(found["x"][2], rows[2])


def test_what_a_lossy_storage_cannot_hold_is_refused_by_name(tmp_path, caplog):
    rows = torch.ones(4, 5)
    with ActivationStore(tmp_path, storage_dtype="float16") as store:
        keep(store, [0, 1], rows[:2])
        keep(store, [2, 3], rows[2:] * 1e9)
        assert "float32 [5] as float16" in caplog.text
        assert store.get_batch(range(4))[1].tolist() == [True, True, False, False]
