"""Damage, strangers, full disks: nothing intact is lost, nothing wrong served, nobody dies."""

from __future__ import annotations

import errno
import gc
import io
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time

import lmdb
import pytest
import torch

import egeria_cache.store.disk.environment as environment_module
import egeria_cache.store.generation as generation_module
from egeria_cache.errors import ForeignError, StoreError
from egeria_cache.inspect.census import contents, survey, verify
from egeria_cache.store.disk.budget import Budget, directory_bytes, generation_directories
from egeria_cache.store.disk.claims import in_use_elsewhere, remove_directory
from egeria_cache.store.disk.environment import Environment
from egeria_cache.store.disk.manifest import ROOT_FORMAT, read_json, write_json
from egeria_cache.store.native import SWITCH, kernel
from egeria_cache.store.parcel import pack
from egeria_cache.store.store import ActivationStore
from tests.store.conftest import entries_of, keep, run_python, warnings_of

FLUSH_S = 60
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


def fill(directory, limit="50MB"):
    with ActivationStore(directory, limit, codec="raw") as store:
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


# -- damage ----------------------------------------------------------------------------------


def mutate(rng, path):
    """Change a file as bad memory, bad disks, and people do."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(["bit", "byte", "zeros", "noise", "cut", "longer", "twice", "word"])
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


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "manifest.json"])
@pytest.mark.cases(3)
@pytest.mark.parametrize("count", [25, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.timeout(7200)
def test_a_mutated_file_kills_nobody_and_serves_nothing_wrong(original, tmp_path, name, count):
    rng, copy = random.Random(f"{name} {count}"), tmp_path / "cache"
    for _ in range(count):
        shutil.copytree(original, copy)
        mutate(rng, rng.choice(sorted(copy.glob(f"gen-*/{name}"))))
        first, again, *_ = use(copy)
        assert again >= first
        assert directory_bytes(copy) <= 50_000_000
        shutil.rmtree(copy)


@pytest.mark.parametrize("kind", ["manifest.json", "cache.json"])
def test_a_bit_that_flips_in_a_description_loses_nothing_that_is_stored(original, tmp_path, kind):
    copy, rng = tmp_path / "cache", random.Random(0)
    shutil.copytree(original, copy)
    path = copy / kind if kind == "cache.json" else generation_directories(copy)[0] / kind
    content = path.read_bytes()
    for bit in rng.sample(range(8 * len(content)), 60):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert use(copy) == [COUNT] * 4
        shutil.rmtree(copy)
        shutil.copytree(original, copy)


@pytest.mark.parametrize("count", [30, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.timeout(7200)
def test_files_exchanged_between_generations_serve_nothing_wrong(original, tmp_path, count):
    rng, copy = random.Random(count), tmp_path / "cache"
    for _ in range(count):
        shutil.copytree(original, copy)
        one, other = rng.sample(generation_directories(copy), 2)
        names = ["data.mdb", "lock.mdb", "manifest.json"]
        for name in rng.sample(names, rng.randrange(1, 4)):
            theirs = (other / name).read_bytes()
            ours = bytearray((one / name).read_bytes())
            at, end = (
                sorted(rng.choices(range(len(ours) + 1), k=2)) if rng.random() < 0.5 else (0, None)
            )
            ours[at:end] = theirs[at:end]
            (one / name).write_bytes(bytes(ours))
        use(copy)
        shutil.rmtree(copy)


def test_another_generations_records_are_damaged_records_and_not_values(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    one, other = generation_directories(copy)
    shutil.copy(other / "data.mdb", one / "data.mdb")
    assert len(list(verify(one))) == COUNT
    assert not list(verify(other))
    assert use(copy) in ([0, COUNT, COUNT, COUNT], [COUNT, COUNT, 0, COUNT])


def spoil_tree(path):
    """Overwrite the heads of all pages of the tree, and none of the records."""
    with (path / "data.mdb").open("r+b") as file:
        for page in range(2, os.fstat(file.fileno()).st_size // 4096):
            head = os.pread(file.fileno(), 12, 4096 * page)
            if int.from_bytes(head[:8], "little") == page and head[10] in (1, 2):
                os.pwrite(file.fileno(), b"\xff\xff", 4096 * page + 12)


def test_a_tree_that_was_damaged_is_set_aside_counted_shown_and_not_deleted(
    original, tmp_path, caplog
):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    path = generation_directories(copy)[0]
    spoil_tree(path)
    before = (path / "data.mdb").read_bytes()
    assert [one.generation for one in verify(path)] == [path.name]
    assert sorted(use(copy)) == [0, COUNT, COUNT, COUNT]
    (aside,) = copy.glob("damaged-*")
    assert (aside / "data.mdb").read_bytes() == before
    assert len(warnings_of(caplog)) == 1
    report = survey(copy)
    assert not report.healthy
    assert [one.name for one in report.generations if one.damage] == [aside.name]
    assert report.bytes_on_disk >= directory_bytes(aside)


def test_a_file_that_was_closed_is_opened_without_a_walk_and_any_other_is_walked(
    tmp_path, monkeypatch
):
    walks = []
    walk = environment_module.verify
    monkeypatch.setattr(
        environment_module,
        "verify",
        lambda *args, **kwargs: walks.append(1) or walk(*args, **kwargs),
    )
    directory = tmp_path / "cache"
    fill(directory)
    with ActivationStore(directory) as store:
        store.open_generation(FIELDS[0])
        path = directory / store.open_generation(FIELDS[1]).name
        assert not walks
        with ActivationStore(directory) as other:  # in one process, the same environment
            assert other.open_generation(FIELDS[0]).get_batch(range(COUNT))[1].all()
        shutil.copytree(directory, tmp_path / "killed")  # it is open
    assert not walks
    assert use(tmp_path / "killed") == [COUNT] * 4
    assert len(walks) == 2
    assert use(directory) == [COUNT] * 4
    assert len(walks) == 2
    os.utime(path / "data.mdb")
    assert use(directory) == [COUNT] * 4
    assert len(walks) == 3


def test_while_a_tree_is_walked_other_processes_may_open_and_commit(tmp_path, monkeypatch):
    directory, walk, walks = tmp_path / "cache", environment_module.verify, []
    fill(directory)
    for path in generation_directories(directory):
        os.utime(path / "data.mdb")
    monkeypatch.setattr("egeria_cache.store.disk.budget.LOCK_WAIT_S", 0.0)

    def watched(*args, **kwargs):
        with Budget(directory, 1).locked():
            walks.append(1)
        return walk(*args, **kwargs)

    monkeypatch.setattr(environment_module, "verify", watched)
    assert use(directory) == [COUNT] * 4
    assert len(walks) == 2


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
    (damage,) = verify(path)
    assert damage.sample == "5"
    assert "Input/output error" in damage.reason
    assert contents(path).codecs == {"raw": COUNT - 1, "damaged": 1}
    done = pack(path, io.BytesIO())
    assert (done.num_records, done.num_damaged) == (COUNT - 1, 1)
    monkeypatch.undo()
    kernel.cache_clear()
    with ActivationStore(tmp_path / "cache") as store:
        assert torch.equal(store.get_batch(range(COUNT))[0], values)


def test_a_file_that_cannot_be_read_for_a_moment_is_neither_changed_nor_set_aside(
    original, tmp_path, monkeypatch
):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    before = {}
    for path in generation_directories(copy):
        os.utime(path / "data.mdb")
        before[path.name] = (path / "data.mdb").read_bytes()

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched, ActivationStore(copy) as store:
        patched.setattr(environment_module, "verify", fail)
        for fields in FIELDS:
            with pytest.raises(StoreError, match="Input/output error"):
                store.open_generation(fields)
        for path in generation_directories(copy):
            (damage,) = verify(path)
            assert "Input/output error" in damage.reason
    assert {
        path.name: (path / "data.mdb").read_bytes() for path in generation_directories(copy)
    } == (before)
    assert use(copy) == [COUNT] * 4


def test_a_directory_of_a_newer_format_is_refused_and_not_rewritten(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    write_json(copy / "cache.json", {"format": ROOT_FORMAT + 1, "limit_bytes": 1, "new": "word"})
    before = (copy / "cache.json").read_bytes()
    with pytest.raises(StoreError, match=f"format {ROOT_FORMAT + 1}"):
        ActivationStore(copy)
    assert (copy / "cache.json").read_bytes() == before


def test_words_of_others_in_a_directorys_description_stay(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    write_json(copy / "cache.json", {"format": ROOT_FORMAT, "limit_bytes": 1, "new": "word"})
    assert use(copy) == [COUNT] * 4
    content = read_json(copy / "cache.json", ROOT_FORMAT)
    assert (content["new"], content["limit_bytes"]) == ("word", 50_000_000)


def test_a_lost_description_of_a_directory_of_ours_is_written_anew(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    (copy / "cache.json").unlink()
    assert use(copy) == [COUNT] * 4


def test_where_no_thread_can_be_started_training_goes_on_uncached(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with ActivationStore(tmp_path / "cache") as store:
        for _ in range(2):
            assert not store.put_batch([1], torch.ones(1, 10))
            assert not store.get_batch([1])[1].any()
        assert store.stats().dropped_writes == 2
    (warning,) = warnings_of(caplog)
    assert "can't start new thread" in warning


def test_a_compacted_copy_is_read_though_everything_lies_elsewhere(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    for path in generation_directories(copy):
        compact = tmp_path / path.name
        compact.mkdir()
        with lmdb.open(str(path), max_dbs=3, readonly=True) as env:
            env.copy(str(compact), compact=True)
        shutil.copy(compact / "data.mdb", path / "data.mdb")
    assert use(copy) == [COUNT] * 4


def test_a_close_that_fails_and_directories_without_end_end_no_training(
    original, tmp_path, monkeypatch
):
    copy, real = tmp_path / "cache", os.close
    shutil.copytree(original, copy)

    def close(descriptor):
        real(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    with ActivationStore(copy) as store:
        generation = store.open_generation(FIELDS[0])
        assert generation.get_batch(range(COUNT))[1].all()
        place = os.open(copy, os.O_RDONLY)
        for _ in range(1300):
            os.mkdir("a", dir_fd=place)
            inner = os.open("a", os.O_RDONLY, dir_fd=place)
            real(place)
            place = inner
        real(place)
        assert store.stats().bytes_on_disk > 1000 * 4096
        monkeypatch.setattr(os, "close", close)
        store.close()
        monkeypatch.undo()
    subprocess.run(["rm", "-rf", copy / "a"], check=True)
    assert use(copy) == [COUNT] * 4


def test_under_a_limit_of_address_space_training_goes_on(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    code = """
        import resource, sys, torch
        from egeria_cache.store import ActivationStore
        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))
        with ActivationStore(sys.argv[1], codec="raw") as store:
            generation = store.open_generation({"boundary": "a"})
            assert generation.get_batch(range(24))[1].all()
            for start in range(100, 4000, 100):
                generation.put_batch(range(start, start + 100), {"x": torch.ones(100, 10_000)})
                assert store.flush(60)
            assert generation.get_batch(range(24))[1].all()
            print("trained on")
    """
    out, err = run_python(code, copy, stderr=subprocess.PIPE).communicate()
    assert out == "trained on\n", err


# -- what is no damage -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.ENFILE])
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "manifest.json", "in-use"])
def test_what_cannot_be_opened_for_a_moment_is_not_damaged(
    original, tmp_path, monkeypatch, number, name
):
    copy, real = tmp_path / "cache", os.open
    shutil.copytree(original, copy)

    def refuse(path, *args, **kwargs):
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    with ActivationStore(copy) as store, monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(StoreError):
            store.open_generation(FIELDS[0])
        assert not any(one.damage for one in survey(copy).generations)
        patched.undo()
        assert store.open_generation(FIELDS[0]).get_batch(range(COUNT))[1].all()
    assert not list(copy.glob("damaged-*"))


def test_running_out_of_descriptors_loses_nothing(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ActivationStore(copy) as store:
        spare = [os.open("/dev/null", os.O_RDONLY)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare[0] + 2, before[1]))
            for _ in range(3):
                with pytest.raises(StoreError):
                    store.open_generation(FIELDS[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            os.close(spare[0])
        assert store.open_generation(FIELDS[0]).get_batch(range(COUNT))[1].all()


@pytest.mark.parametrize("limit", ["500TB", 2**62])
def test_a_limit_beyond_any_address_space_is_as_good_as_any(original, tmp_path, limit):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
    assert use(copy, limit) == [COUNT] * 4


def test_statistics_and_sizes_never_raise(original, tmp_path, monkeypatch):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    with ActivationStore(copy) as store:
        generation = store.open_generation(FIELDS[0])
        monkeypatch.setattr(os, "scandir", refuse)
        monkeypatch.setattr(Environment, "transaction", refuse)
        assert store.stats().num_samples == 0
        assert generation.num_samples == 0
        assert not generation.contains([1]).any()
        assert generation.locate([1]).num_bytes == 0
        assert not generation.get_batch([1])[1].any()


# -- limits and disks ------------------------------------------------------------------------


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


def test_space_that_is_freed_is_used_again(small_disk, monkeypatch):
    monkeypatch.setattr(generation_module, "RETRY_S", 0.0)
    with ActivationStore(small_disk / "cache", "50MB", codec="raw") as store:
        keep(store, [0], torch.zeros(1, 20_000))
        with (small_disk / "ballast").open("wb", buffering=0) as file:
            file.write(bytes(shutil.disk_usage(small_disk).free))
        keep(store, [1], torch.zeros(1, 20_000))
        assert store.contains([0, 1]).tolist() == [True, False]
        (small_disk / "ballast").unlink()
        keep(store, [1], torch.ones(1, 20_000))
        assert store.contains([0, 1]).all()


def test_an_existing_cache_opens_on_a_full_disk_with_another_limit(original, tmp_path, monkeypatch):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("egeria_cache.store.disk.place.write_json", full)
    assert use(copy, "60MB") == [COUNT] * 4


def test_a_lowered_limit_is_applied_when_a_generation_is_opened(tmp_path):
    directory = tmp_path / "cache"
    with ActivationStore(directory, "10MB", codec="raw") as store:
        for fields in FIELDS:
            keep(store, range(20), torch.zeros(20, 5000), into=store.open_generation(fields))
    with ActivationStore(directory, "500kB", codec="raw") as store:
        kept = store.open_generation(FIELDS[1])
        assert kept.num_samples == 20
        assert [path.name for path in generation_directories(directory)] == [kept.name]
        assert store.stats().bytes_on_disk <= 500_000


# -- leaks -----------------------------------------------------------------------------------


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_hundred_stores_dropped_without_close_leave_nothing(tmp_path):
    gc.collect()
    before = num_descriptors(), threading.active_count()
    for number in range(100):
        store = ActivationStore(tmp_path / f"cache-{number % 5}", codec="raw")
        store.put_batch([number], torch.zeros(1, 10))
        del store
    gc.collect()
    assert (num_descriptors(), threading.active_count()) == before
    for path in tmp_path.glob("cache-*/gen-*"):
        assert not in_use_elsewhere(path)
        assert len(list(verify(path))) == 0
    with ActivationStore(tmp_path / "cache-0") as store:
        assert store.contains(range(0, 100, 5)).all()  # what was queued was still written


def test_a_released_generation_is_unlocked_though_a_forked_child_lives(tmp_path):
    with ActivationStore(tmp_path / "cache") as store:
        keep(store, [1], torch.zeros(1, 10))
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        (path,) = generation_directories(tmp_path / "cache")
        assert not in_use_elsewhere(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_opens_what_its_parent_has_open_and_leaves_it_alone(tmp_path):
    with ActivationStore(tmp_path / "cache", codec="raw") as store:
        keep(store, [1], torch.ones(1, 10))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with ActivationStore(tmp_path / "cache", codec="raw") as own:
                    own.put_batch([3], torch.ones(1, 10))
                    if own.flush(FLUSH_S) and own.get_batch([1, 3])[1].all():
                        status = 7
                gc.collect()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert in_use_elsewhere(generation_directories(tmp_path / "cache")[0])
        assert store.get_batch([1])[1].all()
        keep(store, [2], torch.ones(1, 10))
        assert store.get_batch([1, 2, 3])[1].all()


def test_what_waits_when_a_generation_is_released_is_stored_without_a_word(tmp_path, caplog):
    with ActivationStore(tmp_path / "cache", codec="raw") as store:
        for number in range(12):
            generation = store.open_generation({"boundary": number})
            assert generation.put_batch(range(8), torch.full((8, 100), float(number)))
            generation.release()
        assert store.flush(FLUSH_S)
        for number in range(12):
            assert store.open_generation({"boundary": number}).num_samples == 8
        assert store.stats().dropped_writes == 0
    assert warnings_of(caplog) == []


def test_an_interrupted_close_is_finished_by_the_next(tmp_path, monkeypatch):
    before = num_descriptors(), threading.active_count()
    store = ActivationStore(tmp_path / "cache", codec="raw")
    for turn in range(3):
        if turn == 0:
            store.put_batch([1], torch.zeros(1, 10))
            monkeypatch.setattr(store._writer, "flush", interrupt)
        elif turn == 1:
            monkeypatch.undo()
            monkeypatch.setattr(store._own(), "release", interrupt)
        else:
            monkeypatch.undo()
            store.close()
            break
        with pytest.raises(KeyboardInterrupt):
            store.close()
    assert (num_descriptors(), threading.active_count()) == before


def interrupt(*args):
    raise KeyboardInterrupt


# -- strangers -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, mode):
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ForeignError, match="others"):
        ActivationStore(directory)


def test_a_directory_that_others_may_read_is_made_private(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o755)
    ActivationStore(directory).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_directory_or_file_is_refused(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
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


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "manifest.json", "in-use"])
def test_a_planted_link_is_not_followed(original, tmp_path, name):
    copy, outside = tmp_path / "cache", tmp_path / "outside"
    shutil.copytree(original, copy)
    outside.write_bytes(b"precious")
    for path in generation_directories(copy):
        (path / name).unlink()
        (path / name).symlink_to(outside)
    with ActivationStore(copy) as store:
        for fields in FIELDS:
            with pytest.raises(StoreError):
                store.open_generation(fields)
    assert outside.read_bytes() == b"precious"
    for path in generation_directories(copy):
        shutil.rmtree(path)
        path.symlink_to(tmp_path)
    with ActivationStore(copy) as store:
        for fields in FIELDS:
            with pytest.raises(StoreError):
                store.open_generation(fields)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "outside"]
    (copy / "cache.lock").unlink()
    (copy / "cache.lock").symlink_to(outside)
    with ActivationStore(copy) as store, pytest.raises(StoreError):
        store.open_generation({"c": 1})
    assert outside.read_bytes() == b"precious"


def test_only_what_carries_our_manifest_is_removed_and_of_it_only_our_files(original, tmp_path):
    copy = tmp_path / "cache"
    shutil.copytree(original, copy)
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


def test_a_reader_that_may_not_lock_sees_only_whole_records(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    with ActivationStore(directory, codec="raw") as writer:
        keep(writer, [0], torch.zeros(1, 100))
        monkeypatch.setattr("egeria_cache.store.disk.place.os.access", lambda *args: False)
        with ActivationStore(directory) as reader:
            for one in range(1, 200):
                while not writer.put_batch([one], torch.full((1, 100), float(one))):
                    time.sleep(0.002)  # the queue is full: what is offered then is dropped
                got, hit = reader.get_batch(range(200))
                for row in hit.nonzero()[0].tolist():
                    assert (got[row] == row).all()
            assert writer.flush(FLUSH_S)
            assert reader.get_batch(range(200))[1].all()
            assert reader.stats().corrupt == 0
            assert not reader.put_batch([500], torch.zeros(1, 100))


def test_a_lock_that_becomes_a_link_ends_the_writing_and_not_the_writer(tmp_path, caplog):
    directory = tmp_path / "cache"
    with ActivationStore(directory, codec="raw") as store:
        keep(store, [0], torch.zeros(1, 100))
        (directory / "cache.lock").unlink()
        (directory / "cache.lock").symlink_to(tmp_path / "outside")
        keep(store, [1], torch.zeros(1, 100))
        assert store.get_batch([0, 1])[1].tolist() == [True, False]
    assert len(warnings_of(caplog)) == 1
    assert not (tmp_path / "outside").exists()


def test_generations_of_an_earlier_release_are_listed_and_make_room(tmp_path):
    directory = tmp_path / "cache"
    ActivationStore(directory, "1MB").close()
    old = directory / "gen-0123456789ab"
    old.mkdir(mode=0o700)
    write_json(old / "manifest.json", {"format": 1, "created": 1.0, "fields": {"boundary": "a"}})
    for name in ("data.mdb", "lock.mdb", "in-use"):
        (old / name).write_bytes(bytes(0 if name == "in-use" else 300_000))
    (report,) = survey(directory).generations
    assert report.damage is None
    assert "earlier release" in report.note
    assert not list(verify(old))
    with ActivationStore(directory, "1MB", codec="raw") as store:
        keep(store, range(40), torch.zeros(40, 4000), into=store.open_generation(FIELDS[0]))
        assert store.stats().num_samples == 40
    assert not old.exists()


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
        assert store.flush(FLUSH_S)
        found, hit = store.get_batch(range(200))
        assert hit.tolist() == [one != 7 for one in range(200)]
        rightly = torch.from_numpy(hit)
        assert torch.equal(found["x"][rightly], values["x"][rightly])
        assert found["text"] == [None if one == "7" else one for one in texts]
    assert len(list((tmp_path / "cache").glob("damaged-*"))) == 1
