"""How records come to the disk: encoded by the writer thread, in blocks, one commit for many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from egeria_cache.store.disk.environment import DATA_NAME
from egeria_cache.store.records.keys import encode_keys
from egeria_cache.store.records.layout import Layout
from egeria_cache.store.records.record import Encoded, Rows
from egeria_cache.store.store import ActivationStore
from egeria_cache.store.writer import Job
from tests.store.conftest import counted, keep, random_rows

FLUSH_S = 30
DEADLINE_S = 60


def assert_stored(generation, ids, width=300):
    got, hit = generation.get_batch(ids)
    assert hit.all()
    assert torch.equal(got, random_rows(ids, width))


@pytest.mark.parametrize("most", [1, 8, 24, 64, 1000])
def test_blocks_hold_every_record_once_in_order_at_multiples_of_8(most):
    contents = [bytes([number]) * size for number, size in enumerate((1, 8, 9, 16, 23), 1)]
    keys = [bytes([65 + at]) for at in range(5)]
    records = Encoded(Layout(False, ()), keys, [(one[:1], one[1:]) for one in contents])
    chosen = records.only([True, False, True, True, True])
    joined = Encoded.joined([records.only([True, False, False, False, False]), chosen])
    for one, rows in ((records, range(5)), (chosen, [0, 2, 3, 4]), (joined, [0, 0, 2, 3, 4])):
        assert one.keys == [keys[row] for row in rows]
        assert one.sizes == [len(contents[row]) for row in rows]
        left = [contents[row] for row in rows]
        for starts, content in one.blocks(most):
            assert content == b"".join(
                record + bytes(-len(record) % 8) for record in left[: len(starts)]
            )
            assert len(content) <= most + 7 or len(starts) == 1
            for start, record in zip(starts, left, strict=False):
                assert content[start:].startswith(record)
                assert start % 8 == 0
            left = left[len(starts) :]
        assert not left


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
        Job(generation, encode_keys([one]), [0], Rows(True, {"value": value}))
        for one, value in enumerate(values)
    ]
    batches[2].zero_()
    generation.commit(jobs)
    assert generation.contains(range(4)).tolist() == [True, True, False, True]
    assert (generation.num_samples, generation.totals.raw_bytes) == (3, 3 * batches[0].nbytes)
    assert counted(generation) == (3, 1)
    assert said in caplog.text
    assert_stored(generation, [0, 1, 3])


@pytest.mark.parametrize("variant", [-1, 2**32])
def test_a_variant_that_no_key_can_name_is_told_to_the_caller(store, variant):
    with pytest.raises(ValueError, match=f"variant must be from 0 to 4294967295, got {variant}"):
        store.put_batch([1], torch.ones(1, 3), variant=variant)
    with pytest.raises(ValueError, match=f"got {variant}"):
        store.get_batch([1], variant=variant)
    keep(store, [1], torch.ones(1, 3), variant=2**32 - 1)
    assert store.get_batch([1], variant=2**32 - 1)[1].all()


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
