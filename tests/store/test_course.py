"""The short way of a batch, while other threads change what it depends on."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from egeria_cache.store import ActivationStore, NotInMemoryError
from egeria_cache.store import serve as serving
from egeria_cache.store.disk.index import NUM_MARKS, IntegerTable, mark_of
from egeria_cache.store.disk.segment import SEGMENT_NAME
from egeria_cache.store.native import Serving
from egeria_cache.store.records.keys import Keys

FLUSH_S = 30
needs_kernel = pytest.mark.usefixtures("compiled")


@pytest.fixture
def store(directory: Path) -> Iterator[ActivationStore]:
    """Raw, so that a flipped bit is found by its checksum alone."""
    with ActivationStore(directory, codec="raw") as opened:
        yield opened


def flip_secretly(directory: Path) -> None:
    """Change a bit in the middle, so that the file seems not to have been written to."""
    (path,) = directory.glob(f"gen-*/{SEGMENT_NAME}")
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        (byte,) = file.read(1)
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@needs_kernel
def test_what_is_distrusted_while_a_course_is_made_is_not_believed_by_it(
    store, directory, monkeypatch
):
    store.put_batch(range(40), torch.randn(40, 2000))
    assert store.flush(FLUSH_S)
    for _ in range(2):
        assert store.get_batch(range(40))[1].all()
    files = store._own()._files
    files.course = None
    make = serving._source

    def make_while_others_distrust(*args, **options):
        source = make(*args, **options)
        monkeypatch.undo()
        files.index.distrust()
        flip_secretly(directory)
        return source

    monkeypatch.setattr(serving, "_source", make_while_others_distrust)
    assert np.count_nonzero(~store.get_batch(range(40))[1]) == 1


@needs_kernel
def test_a_head_that_another_thread_notes_does_not_mix_with_what_was_begun(store):
    floats, whole = torch.randn(4, 300), torch.arange(1200, dtype=torch.int32).view(4, 300)
    store.put_batch(range(4), floats)
    store.put_batch(range(4, 8), whole)
    assert store.flush(FLUSH_S)
    files = store._own()._files
    assert store.get_batch(range(4, 8))[1].all()
    of_whole, files.template, files.course = files.template, None, None
    for _ in range(2):
        assert store.get_batch(range(4))[1].all()
    files.template = of_whole
    found, hit = store.get_batch([0, 1, 2, 3, 4])
    assert hit.all()
    assert all(torch.equal(row, floats[at]) for at, row in enumerate(found[:4]))
    assert torch.equal(found[4], whole[0])


@needs_kernel
def test_the_space_of_a_void_generation_is_not_kept_by_a_mapping(store, directory):
    generation = store.open_generation({"model": "a"})
    generation.put_batch(range(4), torch.randn(4, 300))
    assert store.flush(FLUSH_S)
    for _ in range(3):
        assert generation.get_batch(range(4))[1].all()

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(str(directory) in line and SEGMENT_NAME in line for line in lines)

    assert is_mapped()
    generation.void("test")
    assert not is_mapped()


def test_a_mark_that_comes_again_begins_without_trust(store, monkeypatch):
    store.put_batch(range(4), torch.randn(4, 300))
    assert store.flush(FLUSH_S)
    index = store._own()._files.index
    forget, rounds = IntegerTable.forget_rounds, []

    def noted(table: IntegerTable) -> None:
        rounds.append(index.round)
        forget(table)

    monkeypatch.setattr(IntegerTable, "forget_rounds", noted)
    for _ in range(2 * NUM_MARKS):
        index.distrust()
    assert [mark_of(one) for one in rounds] == [NUM_MARKS, NUM_MARKS]


@needs_kernel
def test_what_was_verified_many_rounds_ago_is_not_believed(store, directory, monkeypatch):
    store.put_batch(range(40), torch.randn(40, 2000))
    assert store.flush(FLUSH_S)
    assert store.get_batch(range(40))[1].all()
    index = store._own()._files.index
    note = index.trust

    def note_late(*arguments) -> None:
        monkeypatch.undo()
        for _ in range(NUM_MARKS):
            index.distrust()
        note(*arguments)

    index.distrust()
    monkeypatch.setattr(index, "trust", note_late)
    assert store.get_batch(range(40))[1].all()
    flip_secretly(directory)
    assert np.count_nonzero(~store.get_batch(range(40))[1]) == 1


@needs_kernel
def test_whoever_interrupts_a_batch_may_read_one_too(directory, monkeypatch):
    rows = torch.randn(40, 2000)
    with ActivationStore(directory, codec="raw", num_threads=2) as store:
        store.put_batch(range(40), rows)
        assert store.flush(FLUSH_S)
        for _ in range(2):
            assert store.get_batch(range(40))[1].all()
        serve, between = Serving.serve, []

        def interrupted(*arguments, **options):
            monkeypatch.setattr(Serving, "serve", serve)
            between.append(store.get_batch(range(39, -1, -1))[0])
            return serve(*arguments, **options)

        monkeypatch.setattr(Serving, "serve", interrupted)
        found, hit = store.get_batch(range(40))
        assert hit.all()
        assert torch.equal(found, rows)
        assert torch.equal(between[0], rows.flip(0))


@needs_kernel
@pytest.mark.parametrize("after", ["hand_over", "note"])
def test_whoever_interrupts_after_the_read_changes_nothing_of_it(store, monkeypatch, after):
    rows = torch.arange(64.0)[:, None] + torch.ones(64, 500)
    store.put_batch(range(64), rows)
    assert store.flush(FLUSH_S)
    for _ in range(3):
        assert store.get_batch(range(64))[1].all()
    store._own()._files.index.distrust()
    of_begun = getattr(serving.Begun, after)

    def interrupted(*arguments):
        monkeypatch.setattr(serving.Begun, after, of_begun)
        assert store.get_batch(range(40))[1].all()
        return of_begun(*arguments)

    monkeypatch.setattr(serving.Begun, after, interrupted)
    found, hit = store.get_batch([0, 1000, 2, 1001])
    assert getattr(serving.Begun, after) is of_begun
    assert [*hit] == [True, False, True, False]
    assert torch.equal(found, torch.stack([rows[0], 0 * rows[0], rows[2], 0 * rows[0]]))


@needs_kernel
@pytest.mark.parametrize("name", [int, str])
def test_what_others_change_while_a_batch_is_begun_is_not_believed(
    store, directory, monkeypatch, name
):
    """Another thread of ours sees that first, and begins another round of trust."""
    ids = [*map(name, range(40))]
    store.put_batch(ids, torch.randn(40, 2000))
    assert store.flush(FLUSH_S)
    for _ in range(2):
        assert store.get_batch(ids)[1].all()
    hooked = "allocate" if name is int else "_source"
    original = getattr(serving, hooked)

    def while_others_write(*args, **options):
        monkeypatch.setattr(serving, hooked, original)
        (path,) = directory.glob(f"gen-*/{SEGMENT_NAME}")
        flip_secretly(directory)
        os.utime(path)
        store._own()._files.check()
        return original(*args, **options)

    monkeypatch.setattr(serving, hooked, while_others_write)
    assert np.count_nonzero(~store.get_batch(ids)[1]) == 1


class Halved(TorchFunctionMode):
    """Of the user's: whatever makes floats makes shorter ones."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        is_float = isinstance(made, torch.Tensor) and made.dtype is torch.float32
        return made.half() if is_float else made


@needs_kernel
@pytest.mark.parametrize("mode", [Halved, lambda: torch.device("meta")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes_of_the_loop_do_not_change_what_is_read(store, mode, dtype):
    rows = torch.randn(40, 300).to(dtype)
    store.put_batch(range(40), rows)
    assert store.flush(FLUSH_S)
    for _ in range(3):
        with mode():
            found, hit = store.get_batch(range(40))
        assert hit.all()
        assert (found.dtype, found.device) == (rows.dtype, rows.device)
        assert torch.equal(found, rows)


def test_the_first_batch_of_a_thread_may_be_empty(store):
    store.put_batch(range(4), torch.randn(4, 300))
    assert store.flush(FLUSH_S)
    for _ in range(2):
        assert store.get_batch(range(4))[1].all()
    with ThreadPoolExecutor(1) as pool:
        _, hit = pool.submit(store.get_batch, []).result()
    assert not len(hit)


@needs_kernel
def test_the_memory_of_a_batch_is_not_kept(store):
    store.put_batch(range(4), torch.randn(4, 300))
    assert store.flush(FLUSH_S)
    for _ in range(3):
        found, hit = store.get_batch(range(4))
        assert hit.all()
    ref = weakref.ref(found)
    del found
    gc.collect()
    assert ref() is None


@needs_kernel
def test_what_was_verified_is_believed_though_its_batch_was_not_whole(store):
    store.put_batch(range(4), torch.randn(4, 300))
    assert store.flush(FLUSH_S)
    index = store._own()._files.index
    for _ in range(3):
        index.distrust()
        assert store.get_batch(range(8))[1].sum() == 4
        marks = index.look_up(Keys(range(4))).raw[:, 0] & np.uint64(7)
        assert (marks == mark_of(index.round)).all()


@needs_kernel
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_is_asked_for_from_memory_waits_for_no_disk(directory, codec):
    rows = torch.randn(64, 2000)
    with ActivationStore(directory, codec=codec) as store:
        store.put_batch(range(64), rows)
        assert store.flush(FLUSH_S)
    with ActivationStore(directory, codec=codec) as store:
        generation = store._own()
        with pytest.raises(NotInMemoryError):  # nothing is known of its records yet
            generation.get_batch(range(64), in_memory=True)
        assert store.get_batch(range(64))[1].all()
        got, found = generation.get_batch([3, 60, 3], in_memory=True)
        assert found.all()
        assert torch.equal(got, rows[[3, 60, 3]])
        with pytest.raises(NotInMemoryError):
            generation.get_batch([3, 64], in_memory=True)


@needs_kernel
def test_what_left_memory_is_a_readers(directory):
    with ActivationStore(directory, codec="raw") as store:
        store.put_batch(range(64), torch.randn(64, 2000))
        assert store.flush(FLUSH_S)
    with ActivationStore(directory, codec="raw") as store:
        generation = store._own()
        assert store.get_batch(range(8))[1].all()  # the others were not verified yet
        (path,) = directory.glob(f"gen-*/{SEGMENT_NAME}")
        with path.open("rb") as file:
            generation._files.check().mapping = None  # no page that is mapped is given back
            generation._files.course = None
            gc.collect()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            generation._files.check().map_again()
            resident = len(_resident(file.fileno()))
        if resident:
            pytest.skip("this file system keeps its pages")
        with pytest.raises(NotInMemoryError):
            generation.get_batch(range(32, 64), in_memory=True)
        assert generation.get_batch(range(32, 64))[1].all()
        assert generation.get_batch(range(32, 64), in_memory=True)[1].all()


def _resident(descriptor: int) -> list[int]:
    """Return the numbers of the file's pages that are in memory."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None)
        address = ctypes.c_void_p(array.ctypes.data)
        assert (
            libc.mincore(address, ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data))
            == 0
        )
        del array
    return [*map(int, np.flatnonzero(pages & 1))]
