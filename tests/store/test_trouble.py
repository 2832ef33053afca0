"""What the disk, the writer and other processes do to a store, and what training sees of it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import egeria_cache.store.disk.budget as budget_module
import egeria_cache.store.generation as generation_module
import egeria_cache.store.store as store_module
from egeria_cache.errors import StoreError
from egeria_cache.inspect.census import survey, verify
from egeria_cache.store.disk.budget import Budget
from egeria_cache.store.disk.files import GoneError, inspected
from egeria_cache.store.disk.manifest import DamagedError, generation_name
from egeria_cache.store.records.keys import encode_keys
from egeria_cache.store.store import ActivationStore
from tests.store.conftest import damage, keep, run_python, warnings_of

ROOT = Path(__file__).resolve().parents[2]
FLUSH_S = 30
DEADLINE_S = 60


def rows(ids, width=5000):
    return torch.stack(
        [torch.randn(width, generator=torch.Generator().manual_seed(int(one))) for one in ids]
    )


def assert_right(store, ids, width=5000):
    got, hit = store.get_batch(ids)
    for row, one in enumerate(ids):
        if hit[row]:
            assert torch.equal(got[row], rows([one], width)[0])
    return hit


def test_a_full_disk_costs_one_warning_and_keeps_what_was_stored(small_disk, caplog):
    with ActivationStore(small_disk / "cache", codec="raw") as store:
        for start in range(0, 400, 20):
            ids = range(start, start + 20)
            keep(store, ids, rows(ids))
        hit = assert_right(store, range(400))
        assert 0 < hit.sum() < 400
        assert store.stats().dropped_writes == 400 - hit.sum()
        assert not store.put_batch([1000], rows([1000]))
    warnings = warnings_of(caplog)
    assert len(warnings) == 1
    assert "space" in warnings[0].lower()
    with ActivationStore(small_disk / "cache") as store:
        assert assert_right(store, range(400)).sum() == hit.sum()


def test_a_file_that_may_not_grow_is_a_full_disk(directory):
    code = """
        import resource, sys, torch
        from egeria_cache.store.store import ActivationStore
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        with ActivationStore(sys.argv[1], codec="raw") as store:
            for one in range(100):
                store.put_batch([one], torch.full((1, 5000), float(one)))
                store.flush(30)
            got, hit = store.get_batch(range(100))
            assert 0 < hit.sum() < 100
            assert all((got[i] == i).all() for i in range(100) if hit[i])
            print("trained on")
    """
    child = run_python(code, directory, stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=DEADLINE_S)
    assert out == "trained on\n", err


def test_a_directory_removed_under_us_ends_in_misses(store, directory, caplog):
    keep(store, [1], rows([1]))
    shutil.rmtree(directory)
    assert_right(store, [1, 2])
    keep(store, [2], rows([2]))
    assert not store.put_batch([3], rows([3]))
    assert not store.get_batch([1, 2, 3])[1].any()
    assert store.stats().dropped_writes == 2
    warnings = warnings_of(caplog)
    assert len(warnings) == 1


def test_opening_in_a_directory_that_was_removed_is_a_store_error(store, directory):
    keep(store, [1], rows([1]))
    shutil.rmtree(directory)
    with pytest.raises(StoreError, match="was the directory removed"):
        store.open_generation({"another": "boundary"})
    assert store.stats().bytes_on_disk <= 4096


def test_a_directory_whose_lock_is_held_too_long_is_a_store_error(store, directory, monkeypatch):
    monkeypatch.setattr(budget_module, "LOCK_WAIT_S", 0.05)
    with Budget(directory, 1).locked(), pytest.raises(StoreError, match="long"):
        store.open_generation({"a": 1})
    assert store.open_generation({"a": 1}).alive


def test_a_lock_held_too_long_costs_the_batch_and_not_the_training(
    store, directory, monkeypatch, caplog
):
    monkeypatch.setattr(budget_module, "LOCK_WAIT_S", 0.05)
    monkeypatch.setattr(generation_module, "RETRY_S", 0.0)
    keep(store, [1], rows([1]))
    with Budget(directory, 1).locked():
        for one in (2, 3):
            keep(store, [one], rows([one]))
        assert assert_right(store, [1, 2, 3]).tolist() == [True, False, False]
    assert store.stats().dropped_writes == 2
    (warning,) = warnings_of(caplog)
    assert "cache.lock is held" in warning
    keep(store, [2], rows([2]))
    assert assert_right(store, [2]).all()


@pytest.mark.parametrize("stage", ["nothing", "root", "generation"])
def test_a_disk_that_was_full_leaves_a_directory_that_works_once_there_is_room(small_disk, stage):
    place, ballast = small_disk / "cache", small_disk / "ballast"
    if stage != "nothing":
        ActivationStore(place).close()
    if stage == "generation":
        with ActivationStore(place) as store:
            store.put_batch([7], rows([7]))
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with contextlib.suppress(StoreError), ActivationStore(place) as store:
        with contextlib.suppress(StoreError):
            store.open_generation({"a": 1})
        keep(store, [1], rows([1]))
        assert_right(store, [1, 7])
    ballast.unlink()
    for path in place.glob("gen-*"):
        assert list(verify(path)) == []
    with ActivationStore(place) as store:
        assert store.open_generation({"a": 1}).alive
        keep(store, [2], rows([2]))
        assert assert_right(store, [2, 7]).tolist() == [True, stage == "generation"]


def test_a_dead_writer_drops_writes_and_still_reads(store, monkeypatch, caplog):
    keep(store, [1], rows([1]))

    def die(job):
        raise SystemError("the thread is killed")

    monkeypatch.setattr(store._own(), "commit", die)
    store.put_batch([2], rows([2]))
    store._writer._thread.join(FLUSH_S)
    assert not store.flush(timeout_s=FLUSH_S)
    assert not store.put_batch([3], rows([3]))
    assert assert_right(store, [1, 2, 3]).tolist() == [True, False, False]
    assert "writer thread died" in caplog.text


def test_a_damaged_record_is_a_miss_counted_and_named_once(directory, caplog):
    with ActivationStore(directory, codec="raw") as store:
        keep(store, [1, 2, 3], rows([1, 2, 3]))
        damage(store, [2, 3], 1000)
    with ActivationStore(directory) as store:
        for _ in range(2):
            assert assert_right(store, [1, 2, 3]).tolist() == [True, False, False]
        assert store.stats().corrupt == 2
        assert not store.contains([2, 3]).any()
    (warning,) = warnings_of(caplog)
    assert "sample 2" in warning


@pytest.mark.parametrize("at", [0, 8, 12, 14, 16, 28, 32, 200], ids="byte {}".format)
@pytest.mark.parametrize("codec", ["raw", "zstd", "split+zstd", "bitmap+split"])
def test_wherever_a_record_is_damaged_it_is_a_miss_and_stored_anew(directory, codec, at):
    ids = list(range(5))
    with ActivationStore(directory, codec=codec) as store:
        keep(store, ids, rows(ids).relu())
        assert store.get_batch(ids)[1].all()
        damage(store, ids[1:], at)
        found, hit = store.get_batch(ids)
        assert hit.tolist() == [True] + 4 * [False]
        assert torch.equal(found[0], rows([0])[0].relu())
        assert not found[1:].any()
        assert store.stats().corrupt == 4
        assert store.contains(ids).tolist() == [True] + 4 * [False]
        keep(store, ids, rows(ids).relu())
        assert torch.equal(store.get_batch(ids)[0], rows(ids).relu())


def test_more_readers_than_lmdb_has_places_for_are_misses_and_one_warning(store, caplog):
    keep(store, [1], rows([1]))
    environment = store._own()._files._environment
    with contextlib.ExitStack() as readers:
        with contextlib.suppress(OSError):
            for _ in range(200):
                readers.enter_context(environment.transaction())
        for _ in range(2):
            assert not store.get_batch([1])[1].any()
            assert not store.contains([1]).any()
    assert assert_right(store, [1]).all()
    (warning,) = warnings_of(caplog)
    assert "cannot be read now" in warning
    assert "READERS_FULL" in warning


def test_a_record_moved_to_another_samples_key_is_not_served(store):
    for one in (1, 2):
        keep(store, [one], rows([one]))
    environment = store._own()._files._environment
    with environment.transaction(writes=True) as transaction:
        table, (one, two) = environment.tables[b"samples"], encode_keys([1, 2])
        transaction.put(one, bytes(transaction.get(two, db=table)), db=table)
    assert store.get_batch([1, 2])[1].tolist() == [False, True]


def test_an_unwritable_place_is_a_clear_error(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        ActivationStore("/proc/no-such-place/cache")


def test_a_store_used_across_fork_says_what_to_do(store):
    keep(store, [1], rows([1]))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.get_batch([1])
            answer = b"served"
        except StoreError as error:
            answer = str(error).encode()
        os.write(writing, answer)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert b"before fork()" in os.read(reading, 10_000)
    os.close(reading)
    assert store.get_batch([1])[1].all()


def test_a_forked_child_that_exits_takes_nothing_from_its_parent(directory):
    code = """
        import gc, os, sys, torch
        from egeria_cache.store.store import ActivationStore
        torch.set_num_threads(1)
        store = ActivationStore(sys.argv[1])
        store.put_batch([1], torch.ones(1, 10))
        assert store.flush(30) and store.get_batch([1])[1].all()
        for way in ("exit", "collect"):
            child = os.fork()
            if child == 0:
                if way == "collect":
                    del store
                    gc.collect()
                sys.exit(0)  # the interpreter frees what it holds
            os.waitpid(child, 0)
            assert store.get_batch([1])[1].all(), way
        store.put_batch([2], torch.ones(1, 10))
        assert store.flush(30) and store.get_batch([2])[1].all()
        print("trained on")
    """
    child = run_python(code, directory, stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=DEADLINE_S)
    assert out == "trained on\n", err


NURSERY = """
    import os, sys, torch
    from egeria_cache.store.store import ActivationStore
    torch.set_num_threads(1)

    def rows(ids):
        return torch.stack(
            [torch.randn(5000, generator=torch.Generator().manual_seed(one)) for one in ids]
        )

    for line in sys.stdin:  # one child each: importing torch anew would take seconds
        directory, codec = line.split()
        child = os.fork()
        if child == 0:
            store = ActivationStore(directory, codec=codec)
            for start in range(0, 100_000, 8):
                store.put_batch(range(start, start + 8), rows(range(start, start + 8)))
                store.flush(30)
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
        nursery.stdin.write(f"{directory} {('raw', 'zstd')[kill % 2]}\n")
        nursery.stdin.flush()
        pid, committed, wanted = None, 0, 8 * int(rng.integers(1, 6))
        if kill % 4 == 3:
            wanted = 0  # the kill lands while the directory and its files are being made
        while pid is None or committed < wanted:
            word, *rest = nursery.stdout.readline().split()
            if word == "pid":
                pid = int(rest[0])
            else:
                committed = int(word)
        # The kill lands anywhere in the next transactions.
        time.sleep(rng.random() * (0.01 if wanted else 0.03))
        os.kill(pid, signal.SIGKILL)
        while (line := nursery.stdout.readline()) != "dead\n":
            committed = int(line)
        for path in directory.glob("gen-*"):
            assert list(verify(path)) == []
        with ActivationStore(directory) as store:
            hit = assert_right(store, range(committed + 64))
            assert hit[:committed].all()
            keep(store, [10**6], rows([10**6]))
            assert assert_right(store, [10**6]).all()
        shutil.rmtree(directory)
    nursery.communicate(timeout=DEADLINE_S)


def test_a_kill_at_each_file_that_is_made_leaves_nothing_damaged(tmp_path):
    code = """
        import os, signal, sys, torch
        from egeria_cache.store.store import ActivationStore
        torch.set_num_threads(1)

        def die_at(last, directory):
            def hook(event, args):
                nonlocal last
                if event in ("open", "os.mkdir", "os.rename") and directory in str(args[0]):
                    last -= 1
                    if last < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(hook)

        for last in range(1000):
            directory = f"{sys.argv[1]}/{last}"
            child = os.fork()
            if child == 0:
                die_at(last, directory)
                with ActivationStore(directory) as store:
                    store.put_batch([0], torch.ones(1, 5000))
                    store.flush(30)
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                break
        print(last)
    """
    out, _ = run_python(code, tmp_path).communicate(timeout=DEADLINE_S)
    num_kills = int(out)
    assert num_kills > 5
    for directory in map(tmp_path.joinpath, map(str, range(num_kills))):
        assert_nothing_is_damaged(directory)


@pytest.mark.parametrize("made", [[], ["data.mdb"], ["data.mdb", "lock.mdb"], ["lock.mdb"]])
def test_a_generation_whose_files_are_still_empty_is_not_damaged(directory, made):
    with ActivationStore(directory) as store:
        keep(store, [0], rows([0]))
    (generation,) = directory.glob("gen-*")
    for name in ("data.mdb", "lock.mdb"):
        (generation / name).unlink()
        if name in made:
            (generation / name).touch()
    assert survey(directory).generations[0].damage is None
    # As who looks just before, and opens it when it was removed and is made anew.
    with pytest.raises(GoneError if "data.mdb" in made else DamagedError), inspected(generation):
        pass
    assert_nothing_is_damaged(directory)


def assert_nothing_is_damaged(directory):
    for path in directory.glob("gen-*"):
        assert list(verify(path)) == []
    with ActivationStore(directory) as store:
        keep(store, [1], rows([1]))
        assert assert_right(store, [1]).all()


def test_two_processes_write_and_read_one_generation(directory):
    code = """
        import sys, torch
        from egeria_cache.store.store import ActivationStore
        mine = int(sys.argv[2])
        with ActivationStore(sys.argv[1], limit="50MB") as store:
            for start in range(0, 400, 16):
                ids = [2 * i + mine for i in range(start, start + 16)]
                store.put_batch(ids, torch.stack([torch.full((500,), float(i)) for i in ids]))
                got, hit = store.get_batch(range(800))
                for i in range(800):
                    if hit[i]:
                        assert (got[i] == i).all()
                store.flush(30)
    """
    children = [run_python(code, directory, one) for one in range(2)]
    for child in children:
        child.communicate(timeout=DEADLINE_S)
        assert child.returncode == 0
    with ActivationStore(directory) as store:
        got, hit = store.get_batch(range(800))
        assert hit.all()
        assert (got == torch.arange(800.0)[:, None]).all()


def test_a_process_with_a_smaller_limit_reads_on_when_another_grows_the_index(directory):
    code = """
        import sys, torch
        from egeria_cache.store.store import ActivationStore
        with ActivationStore(sys.argv[1], "500MB", codec="raw") as store:
            for start in range(100, 60_100, 20_000):
                store.put_batch(range(start, start + 20_000), torch.zeros(20_000, 20))
                assert store.flush(30)
    """
    with ActivationStore(directory, "1MB", codec="raw") as store:
        keep(store, range(10), rows(range(10), 20))
        run_python(code, directory).communicate(timeout=DEADLINE_S)
        (data,) = directory.glob("gen-*/data.mdb")
        assert data.stat().st_size > 1_000_000  # beyond this process's limit
        assert assert_right(store, range(12), 20).tolist() == [True] * 10 + [False] * 2
        store.put_batch([11], rows([11], 20))  # there is no room, by this process's limit
        assert store.flush(FLUSH_S)
        assert assert_right(store, range(12), 20).sum() == 10


HOLDER = """
    import sys, torch
    from egeria_cache.store.store import ActivationStore
    torch.set_num_threads(1)
    with ActivationStore(sys.argv[1], limit="2MB", codec="raw") as store:
        generation = store.open_generation({"name": "held"})
        generation.put_batch(range(30), torch.zeros(30, 5000))
        store.flush(30)
        print("holding", flush=True)
        sys.stdin.readline()
"""


def test_a_generation_of_another_live_process_stays_and_goes_when_that_is_killed(directory):
    holder = run_python(HOLDER, directory, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "holding\n"
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        generation = store.open_generation({"name": "new"})
        keep(store, range(80), torch.ones(80, 5000), into=generation)
        before = generation.num_samples
        assert 30 < before < 75
        holder.kill()
        holder.communicate(timeout=DEADLINE_S)
        assert (directory / generation_name({"name": "held"})).exists()
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        generation = store.open_generation({"name": "new"})
        keep(store, range(80), torch.ones(80, 5000), into=generation)
        assert generation.num_samples == 80
        assert not (directory / generation_name({"name": "held"})).exists()
        assert store.stats().bytes_on_disk <= 2_000_000


def test_an_interrupted_removal_does_not_eat_the_limit_for_ever(directory):
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        generation = store.open_generation({"a": 1})
        generation.put_batch(range(60), torch.zeros(60, 5000))
    (directory / generation.name).rename(directory / f".gone-{generation.name}-1")
    with ActivationStore(directory, limit="2MB", codec="raw") as store:
        generation = store.open_generation({"b": 1})
        keep(store, range(60), torch.zeros(60, 5000), into=generation)
        assert generation.num_samples == 60


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


def test_two_processes_together_stay_within_the_limit(directory):
    code = """
        import pathlib, sys, time, torch
        from egeria_cache.store.store import ActivationStore
        ready = [pathlib.Path(f"{sys.argv[1]}.ready{n}") for n in range(2)]
        with ActivationStore(sys.argv[1], limit="3MB", codec="raw") as store:
            generation = store.open_generation({"process": sys.argv[2]})
            for start in range(0, 400, 8):
                while start == 8 and not all(map(pathlib.Path.exists, ready)):
                    time.sleep(0.01)  # neither may fill the directory before both are in it
                generation.put_batch(range(start, start + 8), torch.zeros(8, 5000))
                store.flush(30)
                assert store.stats().bytes_on_disk <= 3_000_000
                ready[int(sys.argv[2])].touch()
            assert generation.num_samples > 0
    """
    children = [run_python(code, directory, one) for one in range(2)]
    for child in children:
        child.communicate(timeout=DEADLINE_S)
        assert child.returncode == 0


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
        assert new.num_samples > 30
        assert store.stats().bytes_on_disk <= 2_000_000


@pytest.mark.parametrize(
    ("num_flips", "seed"), [(200, 1), pytest.param(10_000, 2, marks=pytest.mark.long)]
)
@pytest.mark.timeout(7200)
def test_a_flipped_bit_anywhere_gives_no_wrong_tensor_and_no_crash(num_flips, seed):
    with tempfile.TemporaryDirectory(dir=Path("/dev/shm")) as place:
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.flipper", place, str(num_flips), str(seed)],
            capture_output=True, text=True, check=False,
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["outcomes"]["missed"] > num_flips / 10  # the flips did hit something


def test_a_generation_that_is_removed_while_it_is_looked_at_is_not_a_strangers(store, monkeypatch):
    keep(store, [1], rows([1]), into=(generation := store.open_generation({"a": 1})))
    generation.release()
    look = store_module.is_own_directory
    monkeypatch.setattr(
        store_module, "is_own_directory", lambda path: shutil.rmtree(path, True) or look(path)
    )
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


def test_a_spawned_process_gets_its_own_handle_by_pickle(store):
    keep(store, [1], rows([1]))
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=_answer, args=(store, answers))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    assert answers.get() == [True, False]


def _answer(store, answers):
    answers.put(store.contains([1, 2]).tolist())
    store.close()


@pytest.mark.parametrize("limit", [1, 20_000, 95_232, 200_000, 300_000, 600_000])
def test_a_limit_however_small_is_never_exceeded(tmp_path, limit):
    with ActivationStore(tmp_path, limit=limit, codec="raw") as store:
        for number in range(3):
            generation = store.open_generation({"text": number * 150_000 * "x"})
            for start in range(0, 64, 8):
                keep(store, range(start, start + 8), torch.randn(8, 500), into=generation)
                used = store.stats().bytes_on_disk
                assert used <= max(limit, 16_384)  # the directory and its description
