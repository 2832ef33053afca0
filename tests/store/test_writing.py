"""How records come to the disk: encoded by the writer thread, in blocks, one commit for many."""

import numpy as np
import pytest
import torch

from egeria_cache.store.codecs import Coder
from egeria_cache.store.disk.files import DATA_NAME, Totals
from egeria_cache.store.generation import encode_keys
from egeria_cache.store.record import encode_rows
from egeria_cache.store.writer import Job
from tests.helpers.stored import ActivationStore
from tests.store.conftest import counted, keep, random_rows


def assert_stored(generation, ids, width=300):
    got, hit = generation.get_batch(ids)
    assert hit.all()
    assert torch.equal(got, random_rows(ids, width))


def test_the_ids_of_a_put_may_be_changed_after_it(store, monkeypatch):
    generation = store.open_generation({"use": "ids"})
    jobs = []
    monkeypatch.setattr(generation._writer, "submit", lambda job: jobs.append(job) or True)
    ids, array = [1, 2], np.array([3, 4])
    generation.put_batch(ids, random_rows(ids, 300))
    generation.put_batch(array, random_rows(array, 300))
    ids[:] = array[:] = [7, 8]
    generation.commit(jobs)
    assert_stored(generation, [1, 2, 3, 4])
    assert not generation.contains([7, 8]).any()


def test_what_is_stored_by_now_is_neither_written_again_nor_counted(store, directory):
    generation = store.open_generation({"use": "twice"})
    for _ in range(2):
        keep(store, [1, 2], random_rows([1, 2], 300), into=generation)
    (path,) = directory.glob(f"gen-*/{DATA_NAME}")
    size = generation.totals.stored_bytes
    keep(store, [1, 2, 3], random_rows([1, 2, 3], 300), into=generation)
    assert counted(generation) == (3, 0)
    assert generation.totals.stored_bytes - size == pytest.approx(size / 2, rel=0.1)  # one record
    assert path.stat().st_size < 100_000
    assert_stored(generation, [1, 2, 3])


@pytest.mark.parametrize("said", ["changed after put_batch", "cannot be stored"])
def test_a_batch_that_is_not_stored_does_not_take_those_it_waited_with_along(store, caplog, said):
    generation = store.open_generation({"use": "group"})
    batches = [random_rows([one], 300) for one in range(4)]
    values = [*batches] if "changed" in said else [*batches[:2], [object()], batches[3]]
    jobs = [
        Job(generation, encode_keys([one]), {"value": value}) for one, value in enumerate(values)
    ]
    batches[2].zero_()
    generation.commit(jobs)
    assert generation.contains(range(4)).tolist() == [True, True, False, True]
    assert (generation.totals.num_samples, generation.totals.raw_bytes) == (
        3,
        3 * batches[0].nbytes,
    )
    assert counted(generation) == (3, 1)
    assert said in caplog.text
    assert_stored(generation, [0, 1, 3])


@pytest.mark.parametrize("codec", ["raw", "split+zstd"])
@pytest.mark.parametrize(
    "fields",
    [{f"f{n}": torch.ones(1, 3) for n in range(256)}, {"f": torch.ones((1,) * 34)},
     {"f" * 70_000: torch.ones(1, 3)}, {f"f{n}" * 100: torch.ones(1, 3) for n in range(250)},
     {"none": torch.ones(1, 0), "text": ["a"]}, {}],
    ids=["fields", "dimensions", "a name", "names", "nothing", "no field"],
)  # fmt: skip
def test_whatever_tensors_there_are_is_stored(directory, codec, fields):
    with ActivationStore(directory, codec=codec) as store:
        keep(store, [1] if fields else [], fields)
        found, hit = store.get_batch([1])
        assert hit.all() == bool(fields)
        assert set(found) == set(fields)
        assert all(found[name].equal(one) for name, one in fields.items() if name != "text")


def test_what_no_record_can_tell_of_is_left_out_and_others_are_stored(store, caplog):
    keep(store, [1], {"f": torch.ones(1, 3, dtype=torch.uint8).view(torch.bits8)})
    assert "no record holds tensors of torch.bits8" in caplog.text
    assert not store.get_batch([1])[1].any()
    keep(store, [2], torch.ones(1, 3))
    assert store.get_batch([2])[1].all()
    assert store.stats().corrupt == 0


# Records whose shapes differ, as those of padded samples: each comes back as it was, or not.

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
            assert type(value) is type(expected)
            assert value == expected if name == "text" else torch.equal(value, expected)
            assert name == "text" or value.dtype == expected.dtype
    return found


def test_they_come_back_as_they_were_however_often_they_are_read_and_written_to(stored):
    store, rows = stored
    for order in ([2, 7, 1, 0], [6, 99, 2, 2, 3, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [98, 4]):
        for row in check(store, rows, order)["states"]:
            if row is not None:
                row.fill_(7.0)


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


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_of_another_layout_is_refused_by_name(tmp_path, caplog, together):
    rows = rows_of(LENGTHS)["states"]
    with ActivationStore(tmp_path) as store:
        store.writer.gather(together)
        store.put_batch(range(len(rows)), {"x": rows})
        assert together or store.flush(30)
        keep(store, [50], {"y": torch.ones(1, 3)})
        assert "records here hold (" in caplog.text
        assert "it holds (y: float32 [3])" in caplog.text
        assert store.stats().dropped_writes == 1
        meanwhile = {"y": torch.ones(1, 3)}  # another process has stored some
        encoded = encode_rows(encode_keys([50]), meanwhile, Coder())
        with pytest.raises(ValueError, match="another layout"):
            store._own().take(encoded, Totals())
        for _ in range(2):
            found, hit = store.get_batch([0, 50, 2])
            assert hit.tolist() == [True, False, True]
            assert found["x"][1] is None
            assert torch.equal(found["x"][2], rows[2])
