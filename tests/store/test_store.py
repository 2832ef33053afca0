import os
import signal
import subprocess
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import egeria_cache.store.disk.place as place_module
from egeria_cache import ActivationCache
from egeria_cache.errors import StoreError
from egeria_cache.store import writer as writer_module
from egeria_cache.store.disk.files import inspected
from egeria_cache.store.disk.place import filesystem_type
from egeria_cache.store.record import DTYPES, NO_DRAW
from tests.helpers.stored import ActivationStore
from tests.store.conftest import keep, random_rows

rows = partial(random_rows, width=16)


def test_a_bare_tensor_comes_back_bare_in_the_order_asked(store):
    keep(store, range(40), rows(range(40)))
    got, hit = store.get_batch([7, 3, 99, 39, 3])
    assert hit.tolist() == [True, True, False, True, True]
    assert torch.equal(got, torch.cat([rows([7, 3]), torch.zeros(1, 16), rows([39, 3])]))


@pytest.mark.parametrize("way", ["together", "one by one"])
def test_what_is_not_stored_is_zeros_in_every_dtype(store, way):
    for dtype in {*DTYPES.values()} - {torch.complex32}:  # which torch warns of
        values = (torch.arange(48).remainder(5) % 2).byte().view(dtype).view(3, -1)
        batch = {"x": values, "flat": values[:, 0].clone()}
        batch |= {"text": ["a", "b", "c"]} if way == "one by one" else {}
        generation = store.open_generation({"dtype": str(dtype)})
        keep(store, range(3), batch, into=generation)
        got, hit = generation.get_batch([1, 9, 0])
        assert hit.tolist() == [True, False, True]
        for name in ("x", "flat"):
            assert got[name].dtype == dtype
            found = got[name].view(torch.uint8).view(3, -1)
            assert torch.equal(found[[0, 2]], batch[name].view(torch.uint8).view(3, -1)[[1, 0]])
            assert not found[1].any()


def test_the_same_fields_name_the_same_generation_in_any_order(store):
    one = store.open_generation({"a": 1, "b": [2, 3]})
    assert store.open_generation({"b": (2, 3), "a": 1}) is one
    assert store.open_generation({"a": 1, "b": [3, 2]}).name != one.name


def test_a_void_generation_serves_nothing_gives_its_space_back_and_may_begin_anew(store, directory):
    generation = store.open_generation({"a": 1})
    keep(store, [1], torch.zeros(1, 100_000), into=generation)
    generation.void("the weights moved")
    assert not generation.alive
    assert not generation.contains([1]).any()
    assert not generation.get_batch([1])[1].any()
    assert not generation.put_batch([2], torch.zeros(1, 4))
    assert not list(directory.glob("*gen-*"))
    again = store.open_generation({"a": 1})
    assert again.alive
    assert not again.contains([1]).any()
    keep(store, [1], torch.ones(1, 4), into=again)
    assert torch.equal(again.get_batch([1])[0], torch.ones(1, 4))


def test_a_full_queue_drops_the_batch_instead_of_waiting(store, monkeypatch):
    monkeypatch.setattr(writer_module, "QUEUE_BYTES", 1000)
    assert not store.put_batch([1], torch.zeros(1, 1000))
    assert store.stats().dropped_writes == 1


def test_stats_count_what_happened(store):
    keep(store, [1, 2], rows([1, 2]))
    store.get_batch([1, 2, 3])
    stats = store.stats()
    assert (stats.writes, stats.num_samples) == (2, 2)
    assert stats.raw_bytes == rows([1, 2]).nbytes
    assert 0 < stats.bytes_on_disk <= stats.limit_bytes


@pytest.mark.parametrize(
    ("settings", "match"),
    [*(({"limit": limit}, r"size|positive") for limit in (0, -5, "0GB", "much", "-1GB")),
     ({"codec": "gzip"}, "codec must be 'auto'"), ({"storage_dtype": "float12"}, "float16")],
)  # fmt: skip
def test_settings_that_there_are_not_are_refused_with_the_known_ones(directory, settings, match):
    with pytest.raises(ValueError, match=match):
        ActivationStore(directory, **settings)


def test_a_closed_store_serves_misses_and_drops_writes(store, monkeypatch):
    generation = store.open_generation({})
    with monkeypatch.context() as patched:  # whatever the disk says to that
        for name in ("close", "utime"):
            patched.setattr(os, name, Mock(side_effect=OSError("Input/output error")))
        store.close()
    store.close()
    assert not generation.put_batch([1], rows([1]))
    assert not generation.get_batch([1])[1].any()
    with pytest.raises(StoreError, match="closed"):
        store.open_generation({"a": 1})


@pytest.mark.parametrize("width", [4, 20_000], ids=["small", "large"])
def test_a_draw_that_supersedes_another_takes_its_place_on_disk(directory, width):
    """Of each sample there is one draw: the file stays about as large as that."""
    sizes, rng = [], np.random.default_rng(0)
    with ActivationStore(directory, codec="raw") as store:
        generation = store.open_generation({"use": "draws"})
        for draw in range(12):
            for ids in rng.permutation(48).reshape(-1, 8):
                last = np.full(8, draw - 1 if draw else NO_DRAW)
                batch = torch.stack([torch.full((width,), 100.0 * draw + one) for one in ids])
                keep(store, ids, batch, variant=np.full(8, draw), replaces=last, into=generation)
            found, hit = generation.get_batch(range(48), variant=draw)
            assert hit.all()
            assert torch.equal(found[:, 0], 100.0 * draw + torch.arange(48))
            assert not generation.contains(range(48), variant=max(draw - 1, 0)).any() or not draw
            assert generation.totals.num_samples == 48
            assert generation.totals.stored_bytes < 48 * (4 * width + 100)
            sizes.append(store.stats().bytes_on_disk)
            if draw == 5:
                die_reading(directory / generation.name)
    # And what the last two commits have freed, of eight samples each.
    assert sizes[-1] <= max(1.5 * 48 * 4 * width, 400_000)
    assert sizes[-1] == sizes[4]
    with ActivationStore(directory) as store:
        assert store.open_generation({"use": "draws"}).get_batch(range(48), variant=11)[1].all()


def test_a_draw_supersedes_all_before_it_and_nothing_of_other_samples(store):
    generation = store.open_generation({"use": "draws"})
    none = np.full(2, NO_DRAW)
    for name in (["a", "ab"], [7, 8]):
        for draw in (0, 2, 5):
            values = torch.full((2, 600), float(draw))
            generation.put_batch(name, values, variant=draw, replaces=none)
        assert store.flush(30)
        keep(store, name[:1], torch.ones(1, 600), variant=6, replaces=3, into=generation)
        kept = {
            one: [draw for draw in range(8) if generation.contains([one], variant=draw).all()]
            for one in name
        }
        assert kept == {name[0]: [5, 6], name[1]: [0, 2, 5]}
        for draw in (2, 0, 5):
            got, hit = generation.get_batch(name[1:], variant=draw)
            assert hit.all()
            assert (got == draw).all()


def die_reading(path):
    """Start a process that is killed while it reads, and would never be done."""
    if not (child := os.fork()):
        with inspected(path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def mounts(*pairs):
    return lambda all: [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in pairs]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/data/nfs/a/b", "nfs4"), ("/data/nfsother", "ext4"), ("/data/nfs", "nfs4"), ("/x", "xfs")],
)
def test_the_innermost_mount_decides_the_filesystem(monkeypatch, path, expected):
    table = mounts(("/", "rootfs"), ("/", "xfs"), ("/data", "ext4"), ("/data/nfs", "nfs4"))
    monkeypatch.setattr(place_module.psutil, "disk_partitions", table)
    assert filesystem_type(path) == expected


caches = [ActivationStore, partial(ActivationCache, torch.nn.Linear(2, 2))]


@pytest.mark.parametrize("made", caches, ids=["store", "cache"])
def test_a_network_filesystem_is_refused_unless_forced(directory, monkeypatch, made):
    monkeypatch.setattr(place_module.psutil, "disk_partitions", mounts(("/", "nfs")))
    monkeypatch.setattr(place_module.os, "major", lambda device: 709)  # as on Lustre
    with pytest.raises(StoreError, match=r"network filesystem \(nfs\).*force_network=True"):
        made(directory)
    assert not directory.exists()
    made(directory, force_network=True).close()


@pytest.fixture
def read_only(directory, tmp_path):
    with ActivationStore(directory, "1GB") as store:
        store.put_batch([1, 2], torch.ones(2, 1000))
    view = tmp_path / "view"
    view.mkdir()
    for options in (["--bind", directory, view], ["-o", "remount,ro,bind", view]):
        if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
            pytest.skip("a read-only mount needs root")
    yield view
    subprocess.run(["umount", "-l", view], check=True)


def test_a_read_only_cache_is_refused(read_only):
    with pytest.raises(StoreError, match=r"cannot be written: Permission denied; check its owner"):
        ActivationStore(read_only, "2GB")
