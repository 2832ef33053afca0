"""Damage, kills, full disks, strangers: nothing wrong is served, nothing lost, nobody dies."""

import contextlib
import errno
import gc
import io
import os
import random
import shutil
import signal
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import lmdb
import numpy as np
import pytest
import torch

import egeria_cache.store.disk.files as files_module
import egeria_cache.store.disk.place as place_module
import egeria_cache.store.generation as generation_module
from egeria_cache.errors import ForeignError, StoreError
from egeria_cache.store.codecs import SWITCH, kernel
from egeria_cache.store.disk.files import inspected
from egeria_cache.store.disk.place import (
    ROOT_FORMAT,
    Budget,
    GoneError,
    directory_bytes,
    generation_directories,
    generation_name,
    in_use_elsewhere,
    remove_directory,
    write_json,
)
from egeria_cache.store.generation import encode_keys
from egeria_cache.store.report import pack, survey, verify
from tests.helpers.stored import ActivationStore
from tests.store.conftest import (
    DEADLINE_S,
    damage,
    entries_of,
    keep,
    random_rows,
    run_python,
    run_to_its_end,
    warnings_of,
)

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ({"boundary": "a"}, {"boundary": "b"})
COUNT = 24


def truth(number, one):
    seed = torch.Generator().manual_seed(1000 * number + one)
    # Free in the first generation, of one shape in the second.
    return torch.randn(70 if number else 40 + 30 * (one % 2), generator=seed)


def batch(values):
    is_fixed = len({len(one) for one in values}) == 1
    return {"x": torch.stack(values) if is_fixed else values}


TRUTH = [[truth(number, one) for one in range(COUNT)] for number in range(2)]


def fill(directory, limit="50MB", codec="raw"):
    with ActivationStore(directory, limit, codec=codec) as store:
        for fields, values in zip(FIELDS, TRUTH, strict=True):
            generation = store.open_generation(fields)
            for start in range(0, COUNT, 6):
                ids = range(start, start + 6)
                keep(store, ids, batch(values[start : start + 6]), into=generation)


def use(directory, limit="50MB"):
    """Read both generations, store what is missing, read again; return the hits of both turns."""
    hits = []
    with ActivationStore(directory, limit, codec="raw") as store:
        for fields, values in zip(FIELDS, TRUTH, strict=True):
            generation = store.open_generation(fields)
            for _ in range(2):
                got, hit = generation.get_batch(range(COUNT))
                for row in hit.nonzero()[0].tolist():
                    assert torch.equal(got["x"][row], values[row])
                hits.append(int(hit.sum()))
                keep(store, range(COUNT), batch(values), into=generation)
    return hits


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("faults") / "cache"
    fill(directory)
    return directory


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "cache")


rows = partial(random_rows, width=5000)


def assert_right(store, ids, width=5000):
    got, hit = store.get_batch(ids)
    for row, one in enumerate(ids):
        if hit[row]:
            assert torch.equal(got[row], random_rows([one], width)[0])
    return hit


# -- damage ----------------------------------------------------------------------------------


KINDS = ["bit", "byte", "zeros", "noise", "cut", "longer", "twice", "word"]


def mutate(rng, path, kinds):
    """Change a file as bad memory, bad disks, and people do."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(kinds)
    at = rng.randrange(len(content))
    if kind == "bit":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        content[at] = rng.randrange(256)
    elif kind == "zeros":
        content[at : at + rng.choice([8, 64, 512, 4096])] = b""
    elif kind == "noise":
        size = min(rng.choice([8, 64, 512]), len(content) - at)
        content[at : at + size] = rng.randbytes(size)
    elif kind == "cut":
        del content[at:]
    elif kind == "longer":
        content += rng.randbytes(rng.randrange(1, 5000))
    elif kind == "twice":
        content[at:at] = content[at : at + 8 * rng.randrange(1, 100)]
    else:
        word = rng.choice([0, 1, 2**31, 2**32 - 1, 2**56, 2**63, 2**64 - 1])
        content[at // 8 * 8 : at // 8 * 8 + 8] = word.to_bytes(8, "little")
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("codec", ["raw", "zstd", "bitmap+split"])
@pytest.mark.cases(3)
@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.timeout(7200)
def test_a_mutated_file_kills_nobody_and_serves_nothing_wrong(tmp_path, codec, count):
    rng, copy, num_missed, num_fewer = random.Random(count), tmp_path / "cache", 0, 0
    fill(tmp_path / "original", codec=codec)
    for number in range(count):
        shutil.copytree(tmp_path / "original", copy)
        files = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.stat().st_size]
        sizes = [path.stat().st_size if number % 4 else 1 for path in files]
        mutate(rng, *rng.choices(files, sizes), kinds=["bit"] if number % 2 else KINDS)
        with contextlib.suppress(StoreError):  # refused
            first, again, second, _ = use(copy)
            num_fewer += again < first
            num_missed += first + second < 2 * COUNT
        assert directory_bytes(copy) <= 50_000_000
        shutil.rmtree(copy)
    assert num_missed > count / 25  # they did hit something
    assert num_fewer <= count / 500  # of keys that are out of order by now, who writes loses some


def spoil_tree(path, holding=b"", at=12, word=b"\xff\xff"):
    """Overwrite the heads of pages of the tree that hold something, and none of the records."""
    with (path / "data.mdb").open("r+b") as file:
        for page in range(2, os.fstat(file.fileno()).st_size // 4096):
            content = os.pread(file.fileno(), 4096, 4096 * page)
            is_tree = int.from_bytes(content[:8], "little") == page and content[10] in (1, 2)
            if is_tree and holding in content:
                os.pwrite(file.fileno(), word, 4096 * page + at)


def spoil_a_page(path):
    spoil_tree(path, encode_keys([0])[0], 10, bytes(2))


def cut_tree(path):
    os.truncate(path / "data.mdb", 65536)


@pytest.mark.parametrize("damage", [spoil_a_page, cut_tree, spoil_tree])
@pytest.mark.cases(3)
def test_a_tree_that_was_damaged_is_set_aside_counted_shown_and_not_deleted(copy, caplog, damage):
    path = generation_directories(copy)[0]
    time_ns = (path / "data.mdb").stat().st_mtime_ns
    damage(path)
    os.utime(path / "data.mdb", ns=(time_ns, time_ns))
    assert [one["generation"] for one in verify(path)["damage"]] == [path.name]
    before = (path / "data.mdb").read_bytes()
    assert sorted(use(copy)) == [0, COUNT, COUNT, COUNT]
    (aside,) = copy.glob("damaged-*")
    assert (aside / "data.mdb").read_bytes() == before
    assert len(warnings_of(caplog)) == 1
    report = survey(copy)
    assert not report["healthy"]
    assert [one["name"] for one in report["generations"] if one["damage"]] == [aside.name]
    assert report["bytes_on_disk"] >= directory_bytes(aside)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_of_a_damaged_tree_every_record_that_is_intact_is_salvaged(tmp_path, codec):
    texts = [str(one) for one in range(200)]
    values = {"x": torch.randn(200, 700), "label": torch.arange(200), "text": texts}
    with ActivationStore(tmp_path / "cache", codec=codec) as store:
        for start in range(0, 200, 20):
            batch = {name: rows[start : start + 20] for name, rows in values.items()}
            keep(store, range(start, start + 20), batch)
        places = entries_of(store, [7])["place"]
        path = tmp_path / "cache" / store._own().name
    spoil_tree(path)
    with (path / "data.mdb").open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff\xff", int(places[0]) + 100)
    with ActivationStore(tmp_path / "cache", codec=codec) as store:
        store.contains([0])
        assert store.flush(DEADLINE_S)
        assert store.stats().num_samples == 199
        found, hit = store.get_batch(range(200))
        assert hit.tolist() == [one != 7 for one in range(200)]
        rightly = torch.from_numpy(hit)
        assert torch.equal(found["x"][rightly], values["x"][rightly])
        assert found["text"] == [None if one == "7" else one for one in texts]
    assert len(list((tmp_path / "cache").glob("damaged-*"))) == 1


def test_a_sector_that_cannot_be_read_is_one_damaged_record_named_and_walked_on(
    tmp_path, monkeypatch
):
    values, real, bad = torch.randn(COUNT, 1000), os.pread, 0

    def pread(descriptor, size, place):
        if place == bad:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, size, place)

    with ActivationStore(tmp_path / "cache", codec="raw") as store:
        keep(store, range(COUNT), values)
        bad = int(entries_of(store, [5])["place"][0])
        path = tmp_path / "cache" / store._own().name
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setenv(SWITCH, "0")
    kernel.cache_clear()
    with ActivationStore(tmp_path / "cache", codec="raw") as store:
        for _ in range(2):
            hit = store.get_batch(range(COUNT))[1]
            assert hit.tolist() == [one != 5 for one in range(COUNT)]
        assert store.stats().corrupt == 1
        # It is computed again, and what is on disk stays as it is: the disk may find it again.
        before = store.stats().stored_bytes
        keep(store, range(COUNT), values)
        assert store.stats().stored_bytes == before
    found = verify(path)
    (damage,) = found["damage"]
    assert damage["sample"] == "5"
    assert "Input/output error" in damage["reason"]
    assert sum(found["variants"].values()) == COUNT - 1
    done = pack(path, io.BytesIO())
    assert (done["packed"], done["damaged"]) == (COUNT - 1, 1)
    monkeypatch.undo()
    kernel.cache_clear()
    with ActivationStore(tmp_path / "cache") as store:
        assert torch.equal(store.get_batch(range(COUNT))[0], values)


@pytest.mark.parametrize("at", [0, 8, 12, 14, 16, 28, 32, 200], ids="byte {}".format)
@pytest.mark.parametrize("codec", ["raw", "zstd", "split+zstd", "bitmap+split"])
def test_wherever_a_record_is_damaged_it_is_a_miss_named_once_and_stored_anew(
    directory, codec, at, caplog
):
    ids = list(range(5))
    with ActivationStore(directory, codec=codec) as store:
        keep(store, ids, rows(ids).relu())
        assert store.get_batch(ids)[1].all()
        damage(store, ids[1:], at)
    with ActivationStore(directory, codec=codec) as store:
        for _ in range(2):
            found, hit = store.get_batch(ids)
            assert hit.tolist() == [True] + 4 * [False]
        assert torch.equal(found[0], rows([0])[0].relu())
        assert not found[1:].any()
        assert store.stats().corrupt == 4
        assert store.contains(ids).tolist() == [True] + 4 * [False]
        keep(store, ids, rows(ids).relu())
        assert torch.equal(store.get_batch(ids)[0], rows(ids).relu())
    (warning,) = warnings_of(caplog)
    assert "sample 1" in warning


def flip(name):
    def bits_of(copy, patch):
        path, rng = next(copy.glob(f"gen-*/{name}"), copy / name), random.Random(0)
        content = path.read_bytes()
        for bit in rng.sample(range(8 * len(content)), 60):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            assert use(copy) == [COUNT] * 4
            path.write_bytes(content)

    return bits_of


def nest(copy, patch):
    for depth in range(1, 1300):
        (copy / ("n/" * depth)).mkdir()
    assert use(copy) == [COUNT] * 4
    os.removedirs(copy / ("n/" * depth))


def lose_description(copy, patch):
    (copy / "cache.json").unlink()


def fill_disk(copy, patch):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    patch.setattr("egeria_cache.store.disk.place.write_json", full)


@pytest.mark.parametrize(
    ("change", "limit"),
    [(flip("manifest.json"), "50MB"), (flip("cache.json"), "50MB"), (lose_description, "50MB"),
     (fill_disk, "60MB"), (lambda *_: None, "500TB"), (nest, "50MB")],
    ids=["bits of the manifest", "bits of the root", "the root is lost",
         "a full disk and another limit", "any limit", "folders within folders"],
)  # fmt: skip
def test_what_costs_nothing_that_is_stored(copy, monkeypatch, change, limit):
    change(copy, monkeypatch)
    assert use(copy, limit) == [COUNT] * 4


# -- what is no damage -----------------------------------------------------------------------


def test_a_file_that_cannot_be_read_for_a_moment_is_neither_changed_nor_set_aside(
    copy, monkeypatch
):
    paths = generation_directories(copy)
    before = [(path / "data.mdb").read_bytes() for path in paths]

    fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with monkeypatch.context() as patched, ActivationStore(copy) as store:
        patched.setattr(files_module, "verify", fail)
        for fields in FIELDS:
            with pytest.raises(StoreError, match="Input/output error"):
                store.open_generation(fields)
        for path in paths:
            (damaged,) = verify(path)["damage"]
            assert "Input/output error" in damaged["reason"]
    assert [(path / "data.mdb").read_bytes() for path in paths] == before
    with monkeypatch.context() as patched, ActivationStore(copy) as store:
        generation = store.open_generation(FIELDS[0])
        patched.setattr(Path, "lstat", fail)
        keep(store, [COUNT], batch(TRUTH[0][:1]), into=generation)
        assert generation.alive
    assert use(copy) == [COUNT] * 4


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.ENFILE])
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "manifest.json", "in-use"])
def test_what_cannot_be_opened_for_a_moment_is_not_damaged(copy, monkeypatch, number, name):
    real = os.open

    def refuse(path, *args, **kwargs):
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    with ActivationStore(copy) as store, monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(StoreError):
            store.open_generation(FIELDS[0])
        assert not any(one["damage"] for one in survey(copy)["generations"])
        with contextlib.suppress(StoreError, PermissionError):
            assert number != errno.EACCES or not verify(generation_directories(copy)[0])["damage"]
        patched.undo()
        assert store.open_generation(FIELDS[0]).get_batch(range(COUNT))[1].all()
    assert not list(copy.glob("damaged-*"))


@contextlib.contextmanager
def too_many_readers(files):
    with contextlib.ExitStack() as readers:
        with contextlib.suppress(OSError):
            for _ in range(200):
                readers.enter_context(files.reading())
        yield


def test_what_lmdb_cannot_read_now_are_misses_and_one_warning(store, caplog):
    keep(store, [1], rows([1]))
    with too_many_readers(store._own()._files):
        for _ in range(2):
            assert not store.get_batch([1])[1].any()
            assert not store.contains([1]).any()
    keep(store, [2], rows([2]))
    assert assert_right(store, [1, 2]).all()
    (warning,) = warnings_of(caplog)
    assert "cannot be read now" in warning
    assert "READERS_FULL" in warning


def test_where_no_thread_can_be_started_training_goes_on_uncached(tmp_path, monkeypatch, caplog):
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with ActivationStore(tmp_path / "cache") as store:
        for _ in range(2):
            assert not store.put_batch([1], torch.ones(1, 10))
            assert not store.get_batch([1])[1].any()
        assert store.stats().dropped_writes == 2
    (warning,) = warnings_of(caplog)
    assert "can't start new thread" in warning


def test_a_dead_writer_drops_writes_and_still_reads(store, monkeypatch, caplog):
    keep(store, [1], rows([1]))

    die = Mock(side_effect=SystemError("the thread is killed"))
    monkeypatch.setattr(store._own().real, "commit", die)
    store.put_batch([2], rows([2]))
    store.writer._thread.join(DEADLINE_S)
    assert not store.flush(timeout_s=DEADLINE_S)
    assert not store.put_batch([3], rows([3]))
    assert assert_right(store, [1, 2, 3]).tolist() == [True, False, False]
    assert "writer thread died" in caplog.text


@contextlib.contextmanager
def removed(directory):
    yield shutil.rmtree(directory)


@contextlib.contextmanager
def held(directory):
    with Budget(directory, 1).locked():
        yield


@pytest.mark.parametrize(
    ("trouble", "warned", "said", "passes"),
    [(removed, "removed while in use", "was the directory removed", False),
     (held, "cache.lock is held", "long", True)],
)  # fmt: skip
def test_trouble_with_the_directory_costs_the_batches_and_one_warning(
    store, directory, monkeypatch, caplog, trouble, warned, said, passes
):
    monkeypatch.setattr(place_module, "LOCK_WAIT_S", 0.05)
    monkeypatch.setattr(generation_module, "RETRY_S", 0.0)
    keep(store, [1], rows([1]))
    with trouble(directory):
        for one in (2, 3):
            keep(store, [one], rows([one]))
        assert assert_right(store, [1, 2, 3]).tolist() == [passes, False, False]
        assert store.stats().dropped_writes == 2
        with pytest.raises(StoreError, match=said):
            store.open_generation({"a": 1})
        assert directory.exists() or store.stats().bytes_on_disk <= 4096
    (warning,) = warnings_of(caplog)
    assert warned in warning
    if passes:
        keep(store, [2], rows([2]))
        assert assert_right(store, [2]).all()
        assert store.open_generation({"a": 1}).alive


def test_readers_and_voids_race_without_wrong_rows_or_errors(directory):
    stop = threading.Event()
    errors = []
    with ActivationStore(directory, codec="raw") as store:

        def read():
            try:
                while not stop.is_set():
                    generation = store.open_generation({"a": 1})
                    got, hit = generation.get_batch(range(20))
                    for row in np.flatnonzero(hit):
                        assert torch.equal(got[row], rows([int(row)])[0])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            generation = store.open_generation({"a": 1})
            keep(store, range(20), rows(range(20)), into=generation)
            generation.void("test")
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert not errors


def test_nobody_waits_for_who_opens_another_generation(store):
    generation = store.open_generation({"a": 1})
    keep(store, [3], rows([3]), into=generation)
    with ThreadPoolExecutor(1) as pool, files_module._lock:  # held while its tree is walked over
        _, hit = pool.submit(generation.get_batch, [3]).result(DEADLINE_S)
    assert hit.all()


def test_files_that_were_closed_are_read_by_nobody(store):
    files = store.open_generation({"a": 1})._files
    again = files_module.GenerationFiles(files.directory)
    again.close()
    with pytest.raises(GoneError), again.reading():
        pass
    with files.reading() as view:
        assert view.totals().num_samples == 0


# -- processes -------------------------------------------------------------------------------


def test_a_store_used_across_fork_says_what_to_do(store):
    keep(store, [1], rows([1]))
    store.writer.gather(True)
    reading, writing = os.pipe()
    other = ThreadPoolExecutor(1)
    other.submit(store.writer._changed.acquire).result()  # as the writer may, just then
    child = os.fork()
    if child == 0:
        threading.Timer(10, os._exit, [1]).start()
        try:
            store.writer.gather(False)
            store.get_batch([1])
            answer = b"served"
        except StoreError as error:
            answer = str(error).encode()
        os.write(writing, answer)
        os._exit(0)
    os.waitpid(child, 0)
    other.submit(store.writer._changed.release).result()
    os.close(writing)
    assert b"before fork()" in os.read(reading, 10_000)
    os.close(reading)
    assert store.get_batch([1])[1].all()


def test_a_forked_child_opens_what_its_parent_has_open_and_leaves_it_alone(tmp_path):
    with ActivationStore(tmp_path / "cache", codec="raw") as store:
        keep(store, [1], torch.ones(1, 10))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with ActivationStore(tmp_path / "cache", codec="raw") as own:
                    own.put_batch([3], torch.ones(1, 10))
                    if own.flush(DEADLINE_S) and own.get_batch([1, 3])[1].all():
                        status = 7
                gc.collect()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert in_use_elsewhere(generation_directories(tmp_path / "cache")[0])
        assert store.get_batch([1])[1].all()
        keep(store, [2], torch.ones(1, 10))
        assert store.get_batch([1, 2, 3])[1].all()


def test_where_addresses_are_scarce_a_quarter_of_them_is_mapped(tmp_path, monkeypatch):
    def scarce(map_size, *, of=lmdb.open, **settings):
        if map_size > 1 << 37:
            raise lmdb.MemoryError
        return of(map_size=map_size, **settings)

    monkeypatch.setattr(lmdb, "open", scarce)
    with ActivationStore(tmp_path / "cache", codec="raw") as store:
        keep(store, [1], torch.ones(1, 10))
        with store._own()._files.reading() as view:
            assert view.environment.env.info()["map_size"] == 1 << 34


NURSERY = """
    import signal, threading

    def rows(ids):
        return torch.stack(
            [torch.randn(5000, generator=torch.Generator().manual_seed(one)) for one in ids]
        )

    def dies_at(line):
        def trace(frame, event, arg):
            nonlocal line
            if "egeria_cache" in frame.f_code.co_filename:
                line -= event == "line"
                if line == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return trace

        sys.settrace(trace)
        threading.settrace(trace)

    for line in sys.stdin:  # one child each: importing torch anew would take seconds
        directory, codec, last = line.split()
        child = os.fork()
        if child == 0:
            if int(last):
                dies_at(int(last))
            store = ActivationStore(directory, codec=codec)
            for start in range(0, 100_000, 8):
                store.put_batch(range(start, start + 8), rows(range(start, start + 8)))
                store.flush(120)
                os.write(1, b"%d\\n" % (start + 8))  # at once: a kill leaves no half of a line
        os.write(1, b"pid %d\\n" % child)
        os.waitpid(child, 0)
        print("dead", flush=True)
"""


@pytest.mark.parametrize("num_kills", [20, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_kill_9_loses_nothing_that_was_flushed_and_needs_no_repair(tmp_path, num_kills):
    rng = np.random.default_rng(0)
    nursery = run_python(NURSERY, stdin=subprocess.PIPE)
    for kill in range(num_kills):
        directory = tmp_path / str(kill)
        # At a line, from the first of all on; or within the transaction behind some others.
        last = int(10 ** rng.uniform(1, 4)) if kill % 4 < 2 else 0
        wanted = 8 * int(rng.integers(1, 6))
        nursery.stdin.write(f"{directory} {('raw', 'zstd')[kill % 2]} {last}\n")
        nursery.stdin.flush()
        pid, committed = 0, 0
        while (line := nursery.stdout.readline()) != "dead\n":
            word, *rest = line.split()
            if word == "pid":
                pid = int(rest[0])
            else:
                committed = int(word)
            if pid and committed >= wanted and not last:
                os.kill(pid, signal.SIGKILL)
        for path in directory.glob("gen-*"):
            assert list(verify(path)["damage"]) == []
        with ActivationStore(directory) as store:
            hit = assert_right(store, range(committed + 64))
            assert hit[:committed].all()
            keep(store, [10**6], rows([10**6]))
            assert assert_right(store, [10**6]).all()
        shutil.rmtree(directory)
    nursery.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize("made", [[], ["data.mdb"], ["data.mdb", "lock.mdb"], ["lock.mdb"]])
def test_a_generation_whose_files_are_still_empty_is_not_damaged(directory, made):
    with ActivationStore(directory) as store:
        keep(store, [0], rows([0]))
    (generation,) = directory.glob("gen-*")
    for name in ("data.mdb", "lock.mdb"):
        (generation / name).unlink()
        if name in made:
            (generation / name).touch()
    assert survey(directory)["generations"][0]["damage"] is None
    # As who looks just before, and opens it when it was removed and is made anew.
    gone = GoneError if "data.mdb" in made else FileNotFoundError
    with pytest.raises(gone), inspected(generation):
        pass
    for path in directory.glob("gen-*"):
        assert list(verify(path)["damage"]) == []
    with ActivationStore(directory) as store:
        keep(store, [1], rows([1]))
        assert assert_right(store, [1]).all()


def test_two_processes_write_and_read_one_generation(directory):
    code = """
        mine = int(sys.argv[2])
        with ActivationStore(sys.argv[1], limit="50MB") as store:
            for start in range(0, 400, 16):
                ids = [2 * i + mine for i in range(start, start + 16)]
                store.put_batch(ids, torch.stack([torch.full((500,), float(i)) for i in ids]))
                got, hit = store.get_batch(range(800))
                for i in range(800):
                    if hit[i]:
                        assert (got[i] == i).all()
                store.flush(120)
    """
    run_to_its_end(code, directory, count=2)
    with ActivationStore(directory) as store:
        got, hit = store.get_batch(range(800))
        assert hit.all()
        assert (got == torch.arange(800.0)[:, None]).all()


def test_a_process_with_a_smaller_limit_reads_on_when_another_grows_the_index(directory):
    code = """
        with ActivationStore(sys.argv[1], "500MB", codec="raw") as store:
            for start in range(100, 60_100, 20_000):
                store.put_batch(range(start, start + 20_000), torch.zeros(20_000, 20))
                assert store.flush(120)
    """
    with ActivationStore(directory, "1MB", codec="raw") as store:
        keep(store, range(10), random_rows(range(10), 20))
        run_to_its_end(code, directory)
        (data,) = directory.glob("gen-*/data.mdb")
        assert data.stat().st_size > 1_000_000  # beyond this process's limit
        assert assert_right(store, range(12), 20).tolist() == [True] * 10 + [False] * 2
        store.put_batch([11], random_rows([11], 20))  # there is no room, by this process's limit
        assert store.flush(DEADLINE_S)
        assert assert_right(store, range(12), 20).sum() == 10


# -- limits and disks ------------------------------------------------------------------------


def test_a_full_disk_costs_one_warning_and_nothing_stored_and_is_used_once_there_is_room(
    small_disk, caplog
):
    (small_disk / "ballast").write_bytes(bytes(500_000))
    with ActivationStore(small_disk / "cache", codec="raw") as store:
        for start in range(0, 400, 20):
            ids = range(start, start + 20)
            keep(store, ids, rows(ids))
        hit = assert_right(store, range(400))
        assert 0 < hit.sum() < 400
        assert store.stats().dropped_writes == 400 - hit.sum()
        assert not store.put_batch([1000], rows([1000]))
        (small_disk / "ballast").unlink()
        store._own().real._write_again_at = 0.0
        keep(store, [1000], rows([1000]))
        assert assert_right(store, [1000]).all()
    (warning,) = warnings_of(caplog)
    assert "space" in warning.lower()
    with ActivationStore(small_disk / "cache") as store:
        assert (assert_right(store, range(400)) == hit).all()


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_a_nearly_full_disk_kills_nobody_and_loses_nothing(small_disk, count):
    ballast = small_disk / "ballast"
    for number in range(count):
        pages_left, said = number % 40, "disk full"
        with ActivationStore(small_disk / "cache", "50MB", codec="raw") as store:
            keep(store, range(COUNT), {"x": TRUTH[0]}, into=store.open_generation(FIELDS[0]))
        with ballast.open("wb", buffering=0) as file:
            free = shutil.disk_usage(small_disk).free // 4096
            file.write(bytes(4096 * max(free - pages_left, 0)))
        try:
            with ActivationStore(small_disk / "cache", "40MB", codec="raw") as store:
                generation = store.open_generation(FIELDS[0])
                assert generation.get_batch(range(COUNT))[1].all()
                other = store.open_generation(FIELDS[1])
                keep(store, range(COUNT), {"x": TRUTH[1]}, into=other)
                got, hit = other.get_batch(range(COUNT))
                for row in hit.nonzero()[0].tolist():
                    assert torch.equal(got["x"][row], TRUTH[1][row])
        except StoreError as error:
            said = str(error)
        assert "disk full" in said
        ballast.unlink()
        assert not list((small_disk / "cache").glob("damaged-*"))
        shutil.rmtree(small_disk / "cache")


HOLDER = """
    with ActivationStore(sys.argv[1], limit="2MB", codec="raw") as store:
        generation = store.open_generation({"name": "held"})
        generation.put_batch(range(30), torch.zeros(30, 5000))
        store.flush(120)
        print("holding", flush=True)
        sys.stdin.readline()
"""


def test_a_generation_of_another_live_process_stays_and_goes_when_that_is_killed(directory):
    holder = run_python(HOLDER, directory, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "holding\n"
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        generation = store.open_generation({"name": "new"})
        keep(store, range(80), torch.ones(80, 5000), into=generation)
        before = generation.totals.num_samples
        assert 30 < before < 75
        holder.kill()
        holder.communicate(timeout=DEADLINE_S)
        assert (directory / generation_name({"name": "held"})).exists()
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        generation = store.open_generation({"name": "new"})
        keep(store, range(80), torch.ones(80, 5000), into=generation)
        assert generation.totals.num_samples == 80
        assert not (directory / generation_name({"name": "held"})).exists()
        assert store.stats().bytes_on_disk <= 2_000_000


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
def test_a_limit_for_a_part_of_the_samples_gives_that_part_of_hits(directory, part):
    """An LRU would give 3, 15 and 40 %: it evicts what is needed next."""
    num_samples, row_bytes = 400, 20_000
    limit = int(part * num_samples * row_bytes) + 300_000
    rng = np.random.default_rng(0)
    with ActivationStore(directory, limit=limit, codec="raw") as store:
        for epoch in range(3):
            num_hits = 0
            for ids in rng.permutation(num_samples).reshape(-1, 20):
                hit = store.contains(ids)
                num_hits += int(hit.sum())
                keep(store, ids, torch.zeros(len(ids), row_bytes, dtype=torch.uint8))
            if epoch:
                assert part - 0.02 <= num_hits / num_samples <= part + 0.05


def test_a_generation_nobody_uses_makes_room_and_one_in_use_stays(directory):
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        for name in ("old", "older"):
            generation = store.open_generation({"name": name})
            keep(store, range(30), torch.zeros(30, 5000), into=generation)
            assert generation.contains(range(30)).all()
        names = {name: store.open_generation({"name": name}) for name in ("old", "older")}
    os.utime(directory / names["older"].name / "in-use", (1, 1))
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        old = store.open_generation({"name": "old"})
        new = store.open_generation({"name": "new"})
        for start in range(0, 200, 10):
            keep(store, range(start, start + 10), torch.ones(10, 5000), into=new)
        assert not (directory / names["older"].name).exists()
        assert old.contains(range(30)).all()
        assert new.totals.num_samples > 30
        assert store.stats().bytes_on_disk <= 2_000_000


def test_what_was_not_used_for_longest_makes_room_first(directory):
    with ActivationStore(directory) as store:
        for number in range(3):
            keep(store, [0], torch.zeros(1, 9), into=store.open_generation({"number": number}))
    paths = generation_directories(directory)
    for age, path in enumerate(reversed(paths)):
        os.utime(path / "in-use", (age, age))
    Budget(directory, directory_bytes(directory) - 1).make_room(0)
    assert generation_directories(directory) == paths[:2]


@pytest.mark.parametrize("limit", [1, 20_000, 95_232, 200_000, 300_000, 600_000])
def test_a_limit_however_small_is_never_exceeded(tmp_path, limit):
    with ActivationStore(tmp_path, limit=limit, codec="raw") as store:
        for number in range(3):
            generation = store.open_generation({"text": number * 150_000 * "x"})
            for start in range(0, 64, 8):
                keep(store, range(start, start + 8), torch.randn(8, 500), into=generation)
                used = store.stats().bytes_on_disk
                assert used <= max(limit, 16_384)  # the directory and its description


# -- leaks -----------------------------------------------------------------------------------


def test_a_hundred_stores_dropped_without_close_leave_nothing(tmp_path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(100):
        store = ActivationStore(tmp_path / f"cache-{number % 5}", codec="raw")
        store.put_batch([number], torch.zeros(1, 10))
        del store
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    for path in tmp_path.glob("cache-*/gen-*"):
        assert not in_use_elsewhere(path)
        assert len(list(verify(path)["damage"])) == 0
    with ActivationStore(tmp_path / "cache-0") as store:
        assert store.contains(range(0, 100, 5)).all()  # what was queued was still written


# -- strangers -------------------------------------------------------------------------------


def of_somebody_else(copy):
    (copy.parent / "work").mkdir()
    (copy.parent / "work" / "thesis.tex").write_text("do not touch")
    return copy.parent / "work"


@pytest.mark.parametrize(
    ("prepare", "match"),
    [*((lambda copy, mode=mode: copy.chmod(mode), "others") for mode in (0o777, 0o770, 0o702)),
     (lambda copy: write_json(copy / "cache.json", {"format": ROOT_FORMAT + 1, "new": "word"}),
      f"format {ROOT_FORMAT + 1}"),
     (lambda copy: "/proc/no-such-place/cache", "cannot be written"),
     (of_somebody_else, r"thesis\.tex"), (lambda copy: copy / "cache.json", "not a directory"),
     (lambda copy: copy / "cache.json" / "below", "not a directory")],
    ids=["777", "770", "702", "a newer format", "a place that cannot be written",
         "somebody else's", "a file", "below a file"],
)  # fmt: skip
def test_a_directory_that_is_refused_is_left_as_it_is(copy, prepare, match):
    directory = prepare(copy) or copy
    before = contents_of(copy.parent)
    with pytest.raises(StoreError, match=match) as refused:
        ActivationStore(directory)
    assert isinstance(refused.value, ForeignError) == (match == "others")
    assert contents_of(copy.parent) == before


def contents_of(place):
    return {one: one.is_file() and one.read_bytes() for one in place.rglob("*")}


def test_a_directory_that_others_may_read_is_made_private(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o755)
    with ActivationStore(directory) as store:
        keep(store, [1], rows([1]))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in directory.rglob("*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_directory_or_file_is_refused(copy):
    path = generation_directories(copy)[0]
    os.chown(path / "data.mdb", 12345, -1)
    with ActivationStore(copy) as store:
        refused = 0
        for fields in FIELDS:
            try:
                store.open_generation(fields)
            except ForeignError:
                refused += 1
    assert refused == 1
    os.chown(copy, 12345, -1)
    with pytest.raises(ForeignError, match="12345"):
        ActivationStore(copy)


def assert_refused(copy, *generations):
    with ActivationStore(copy) as store:
        for fields in generations:
            with pytest.raises(StoreError):
                store.open_generation(fields)


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "manifest.json", "in-use"])
def test_a_planted_link_is_not_followed(copy, tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    for path in generation_directories(copy):
        (path / name).unlink()
        (path / name).symlink_to(outside)
    assert_refused(copy, *FIELDS)
    for path in generation_directories(copy):
        shutil.rmtree(path)
        path.symlink_to(tmp_path)
    assert_refused(copy, *FIELDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "outside"]
    (copy / "cache.lock").unlink()
    (copy / "cache.lock").symlink_to(outside)
    assert_refused(copy, {"c": 1})
    assert outside.read_bytes() == b"precious"


def test_only_what_carries_our_manifest_is_removed_and_of_it_only_our_files(copy):
    foreign, linked = copy / "gen-foreign", copy / "gen-linked"
    mixed, whole = generation_directories(copy)
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years")
    linked.symlink_to(foreign)
    (mixed / "notes.txt").write_text("mine")
    for path in (foreign, linked, mixed):
        assert not remove_directory(path)
    assert (foreign / "thesis.tex").read_text() == "years"
    assert (mixed / "notes.txt").read_text() == "mine"
    assert (mixed / "data.mdb").exists()
    assert remove_directory(whole)


@pytest.mark.parametrize("name", [b"\xff\xfe cache", "größe".encode(), b"a\nb"])
def test_a_path_of_any_bytes_is_as_good_as_any(tmp_path, name):
    directory = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    for expected in (False, True):
        with ActivationStore(directory, codec="raw") as store:
            assert store.contains([1]).all() == expected
            keep(store, [1], torch.zeros(1, 10))
