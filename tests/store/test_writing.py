"""How records come to the disk: encoded by the writer thread, as few buffers, flushed in order."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import egeria_cache.store.disk.segment as segment_module
import egeria_cache.store.disk.writeback as writeback_module
import egeria_cache.store.generation as generation_module
import egeria_cache.store.records.record as record_module
import egeria_cache.store.writer as writer_module
from egeria_cache.store.disk.segment import SEGMENT_NAME, Segment
from egeria_cache.store.records.encoded import ALIGNMENT, Encoded
from egeria_cache.store.records.record import Rows
from egeria_cache.store.store import ActivationStore
from egeria_cache.store.writer import Job

FLUSH_S = 30
DEADLINE_S = 60


def rows(ids, width=300):
    return torch.stack(
        [torch.randn(width, generator=torch.Generator().manual_seed(int(one))) for one in ids]
    )


def assert_stored(generation, ids, width=300):
    got, hit = generation.get_batch(ids)
    assert hit.all()
    assert torch.equal(got, rows(ids, width))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=5)), ids=str)
def test_the_pieces_of_some_records_are_these_records_each_at_a_multiple_of_8(wanted):
    contents = [bytes([number]) * size for number, size in enumerate((1, 8, 9, 16, 23), 1)]
    keys = [b"a", b"b", b"c", b"d", b"e"]
    pairs = [(key, (one[:3], one[3:])) for key, one in zip(keys, contents, strict=True)]
    records = Encoded.joined([Encoded.of(pairs[:2]), Encoded.of(pairs[2:])])
    chosen = records.only(np.array(wanted))
    expected = list(itertools.compress(zip(keys, contents, strict=True), wanted))
    assert [(key, bytes(record)) for key, record in chosen] == expected
    padded = [one + bytes(-len(one) % ALIGNMENT) for _, one in expected]
    assert b"".join(itertools.chain.from_iterable(chosen.pieces())) == b"".join(padded)
    assert chosen.room.tolist() == list(map(len, padded))


def test_all_records_of_a_buffer_are_one_piece():
    records = Encoded.of((bytes([number]), (b"x" * 5,)) for number in range(100))
    assert [len(together) for together in records.pieces()] == [1]


def test_a_put_encodes_nothing_on_the_calling_thread(store, monkeypatch):
    threads = set()

    def noted(function):
        def call(*args, **kwargs):
            threads.add(threading.current_thread().name)
            return function(*args, **kwargs)

        return call

    for module, name in (
        (generation_module, "encode_keys"),
        (generation_module, "encode_rows"),
        (writer_module, "encode_keys"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    ids = [5, 3, 2**40]
    assert store.put_batch(ids, rows(ids))
    assert store.flush(FLUSH_S)
    assert threads == {"egeria-writer"}
    assert_stored(store, ids)


def test_the_ids_of_a_put_may_be_changed_after_it(store, monkeypatch):
    generation = store.open_generation({"use": "ids"})
    jobs = []
    monkeypatch.setattr(generation._writer, "submit", lambda job: jobs.append(job) or True)
    ids, array = [1, 2], np.array([3, 4])
    generation.put_batch(ids, rows(ids))
    generation.put_batch(array, rows(array))
    ids[:] = array[:] = [7, 8]
    generation.commit(jobs)
    assert_stored(generation, [1, 2, 3, 4])
    assert not generation.contains([7, 8]).any()


def test_what_is_stored_by_now_is_neither_written_again_nor_counted(directory):
    with ActivationStore(directory, codec="raw") as store:
        write_twice(store)


def write_twice(store: ActivationStore) -> None:
    generation = store.open_generation({"use": "twice"})
    for _ in range(2):
        assert generation.put_batch([1, 2], rows([1, 2]))
        assert store.flush(FLUSH_S)
    (path,) = store.config.directory.glob(f"gen-*/{SEGMENT_NAME}")
    size = path.stat().st_size
    assert generation.put_batch([1, 2, 3], rows([1, 2, 3]))
    assert store.flush(FLUSH_S)
    assert (generation.counts.writes, generation.counts.dropped_writes) == (3, 0)
    assert 1200 <= path.stat().st_size - size < 2 * 1200  # one record
    assert_stored(generation, [1, 2, 3])


def test_a_batch_that_was_changed_does_not_take_those_it_waited_with_along(store, caplog):
    generation = store.open_generation({"use": "changed"})
    batches = [rows([one]) for one in range(4)]
    jobs = [
        Job.of(generation, np.array([one]), [0], Rows(True, {"value": batch}))
        for one, batch in enumerate(batches)
    ]
    batches[2].zero_()
    generation.commit(jobs)
    assert generation.contains(range(4)).tolist() == [True, True, False, True]
    assert (generation.counts.writes, generation.counts.dropped_writes) == (3, 1)
    assert "changed after put_batch" in caplog.text
    assert_stored(generation, [0, 1, 3])
    # What was written before the change was noticed was cut off.
    (path,) = store.config.directory.glob(f"gen-*/{SEGMENT_NAME}")
    assert path.stat().st_size - generation.stored_bytes < 3 * ALIGNMENT


def test_a_large_batch_is_put_together_buffer_by_buffer_in_the_same_memory(directory, monkeypatch):
    monkeypatch.setattr(record_module, "BUFFER_BYTES", 5000)
    monkeypatch.setattr(record_module, "HASHED_BYTES", 2000)
    ids = list(range(40))
    with ActivationStore(directory, codec="raw") as store:
        generation = store.open_generation({"use": "large"})
        assert generation.put_batch(ids, rows(ids))
        assert store.flush(FLUSH_S)
        assert 0 < generation._writer.arena.nbytes <= 5000
        assert_stored(generation, ids)


def test_the_writer_s_memory_is_given_back_when_nothing_is_written(store):
    store.put_batch([1], rows([1]))
    assert store.flush(FLUSH_S)
    deadline = time.monotonic() + DEADLINE_S
    while store._own()._writer.arena.nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    store.put_batch([2], rows([2]))
    assert store.flush(FLUSH_S)
    assert_stored(store, [1, 2])


def test_where_the_disk_cannot_be_told_to_begin_it_is_only_flushed(store, monkeypatch):
    monkeypatch.setattr(writeback_module, "_sync_file_range", lambda: None)
    store.put_batch([1, 2], rows([1, 2]))
    assert store.flush(FLUSH_S)
    assert_stored(store, [1, 2])


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_a_kill_between_writing_records_and_their_commit_hides_all_of_them(directory, num_pieces):
    code = """
        import os, sys, torch
        import egeria_cache.store.disk.segment as segment
        import egeria_cache.store.records.record as record
        from egeria_cache.store.disk.log import Log
        from egeria_cache.store.store import ActivationStore
        record.BUFFER_BYTES = 5000
        rows = lambda ids: torch.stack([
            torch.randn(300, generator=torch.Generator().manual_seed(one)) for one in ids])
        store = ActivationStore(sys.argv[1], codec="raw")
        store.put_batch(range(4), rows(range(4)))
        assert store.flush(30)
        written, begin = [], segment.begin_writeback
        def begin_and_die(*args):
            begin(*args)
            written.append(args)
            if len(written) == int(sys.argv[2]):
                os._exit(9)
        segment.begin_writeback = begin_and_die
        Log.append = lambda *args: os._exit(9)
        store.put_batch(range(4, 12), rows(range(4, 12)))
        store.flush(30)
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), directory, str(num_pieces)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert child.returncode == 9, child.stderr
    with ActivationStore(directory, codec="raw") as store:
        assert store.contains(range(12)).tolist() == [True] * 4 + [False] * 8
        (path,) = directory.glob(f"gen-*/{SEGMENT_NAME}")
        assert path.stat().st_size > store._own().stored_bytes + 1200 * num_pieces
        assert store.stats().bytes_on_disk >= path.stat().st_size  # it counts, if nobody sees it
        store.put_batch(range(2, 12), rows(range(2, 12)))
        assert store.flush(FLUSH_S)
        assert_stored(store, list(range(12)))
        assert path.stat().st_size < store._own().stored_bytes + 12 * ALIGNMENT


@pytest.mark.parametrize("variant", [-1, 2**32])
def test_a_variant_that_no_key_can_name_is_told_to_the_caller(store, variant):
    with pytest.raises(ValueError, match=f"variant must be from 0 to 4294967295, got {variant}"):
        store.put_batch([1], torch.ones(1, 3), variant=variant)
    with pytest.raises(ValueError, match=f"got {variant}"):
        store.get_batch([1], variant=variant)
    assert store.put_batch([1], torch.ones(1, 3), variant=2**32 - 1)
    assert store.flush(FLUSH_S)
    assert store.get_batch([1], variant=2**32 - 1)[1].all()


@pytest.mark.parametrize("codec", ["raw", "split+zstd"])
@pytest.mark.parametrize(
    "fields",
    [{f"f{n}": torch.ones(1, 3) for n in range(256)}, {"f": torch.ones((1,) * 34)},
     {"f" * 70_000: torch.ones(1, 3)}, {f"f{n}" * 100: torch.ones(1, 3) for n in range(250)},
     {"f": torch.ones(1, 3, dtype=torch.uint8).view(torch.bits8)}],
    ids=["fields", "dimensions", "a name", "names", "dtype"],
)  # fmt: skip
def test_what_no_record_can_tell_of_is_left_out_and_others_are_stored(directory, codec, fields):
    with ActivationStore(directory, codec=codec) as store:
        store.put_batch([1], fields)
        assert store.flush(FLUSH_S)
        assert not store.get_batch([1])[1].any()
        assert store.put_batch([2], torch.ones(1, 3))
        assert store.flush(FLUSH_S)
        assert store.get_batch([2])[1].all()
        assert store.stats().corrupt == 0


@given(
    st.lists(st.integers(0, 40), max_size=30),
    st.integers(1, 8),
    st.integers(1, 50),
    st.integers(1, 60),
)
def test_what_is_written_in_several_calls_is_all_there(lengths, per_call, bytes_per_call, short):
    """Each call takes no more than the system and the machine's memory like, and may take less."""
    content = np.random.default_rng(0).bytes(sum(lengths))
    view, ends = memoryview(content), [0, *itertools.accumulate(lengths)]
    buffers = [view[start:end] for start, end in itertools.pairwise(ends)]
    calls = []

    def pwritev(descriptor: int, buffers: list[memoryview], at: int) -> int:
        calls.append([len(one) for one in buffers])
        return os.pwrite(descriptor, b"".join(buffers)[:short], at)

    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.multiple(segment_module, _PER_CALL=per_call, _BYTES_PER_CALL=bytes_per_call),
        mock.patch.object(segment_module.os, "pwritev", pwritev),
    ):
        segment = Segment(Path(directory, SEGMENT_NAME), readonly=False)
        begin = segment.append(8, [buffers[:10], buffers[10:]])
        assert begin == 8
        assert Path(directory, SEGMENT_NAME).read_bytes()[begin:] == content
    assert all(len(sizes) <= per_call and sum(sizes) <= bytes_per_call for sizes in calls)
